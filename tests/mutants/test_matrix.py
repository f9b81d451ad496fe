"""Every seeded bug on its stored trace: what it must break, in which words, and what breaks besides.

``make.py`` beside this file makes the traces and ``matrix.json``.
"""

import json
from pathlib import Path

import pytest

from hitproof.fuzz.seeded import fires, with_and_without
from hitproof.model import RELEASES, Trace
from hitproof.properties.mutants import MUTANTS
from hitproof.properties.registry import PROPERTIES

HERE = Path(__file__).parent
MATRIX = json.loads((HERE / "matrix.json").read_text())

each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)


def stored(mutant):
    return Trace.loads((HERE / "traces" / f"{mutant.id}.json").read_text())


def words(finding):
    return {"expected": finding.expected, "seen": finding.seen}


@each_mutant
def test_the_named_property_breaks_with_the_bug_alone(mutant):
    """On its trace the bug breaks its property in exactly these words, and without it that holds."""
    bent, straight = with_and_without(mutant, stored(mutant), mutant.breaks)
    assert MATRIX[mutant.id][mutant.breaks] == words(bent.finding)
    assert straight.finding is None
    assert straight.evidence > 0


@each_mutant
def test_which_properties_see_the_bug(mutant):
    """The mutant's row of the matrix property x bug."""
    seen = {name: words(finding) for name, finding in fires(mutant, stored(mutant)).items()}
    assert MATRIX[mutant.id] == seen


def test_every_property_has_a_bug():
    """A property that no seeded bug breaks may check nothing."""
    assert {prop.id for prop in PROPERTIES} == {mutant.breaks for mutant in MUTANTS}


def test_bugs_are_well_named():
    """Ids are unique, releases are modelled ones, and every trace and row belongs to a bug."""
    ids = [mutant.id for mutant in MUTANTS]
    assert len(set(ids)) == len(ids)
    assert {mutant.semantics for mutant in MUTANTS} <= set(RELEASES)
    assert sorted(ids) == sorted(path.stem for path in (HERE / "traces").iterdir())
    assert sorted(ids) == sorted(MATRIX)
