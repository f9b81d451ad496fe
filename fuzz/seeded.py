"""Seeded bugs put to the test: a bug counts as caught where the promise is broken with it and kept
without it, on one trace.
"""

from __future__ import annotations

from hitproof.fuzz.draw import Range
from hitproof.fuzz.search import Slice, SliceResult, search
from hitproof.model import ModelTarget, Trace
from hitproof.properties.mutants import Mutant, mutated
from hitproof.properties.registry import PROPERTIES, property_of
from hitproof.properties.story import Story
from hitproof.properties.verdict import Check, Finding


def with_and_without(mutant: Mutant, trace: Trace, property_id: str) -> tuple[Check, Check]:
    """What one property says of a trace on the mutated model, and on the model."""
    prop, bent, straight = property_of(property_id), mutated(mutant), ModelTarget(mutant.semantics).run
    return prop.check(Story(bent(trace), bent)), prop.check(Story(straight(trace), straight))


def caught(mutant: Mutant, trace: Trace, property_id: str) -> Finding | None:
    """The finding, if the mutated model breaks the property and the model keeps it with evidence."""
    bent, straight = with_and_without(mutant, trace, property_id)
    return bent.finding if straight.finding is None and straight.evidence else None


def fires(mutant: Mutant, trace: Trace) -> dict[str, Finding]:
    """All properties that catch the bug on this trace."""
    found = {prop.id: caught(mutant, trace, prop.id) for prop in PROPERTIES}
    return {name: finding for name, finding in found.items() if finding is not None}


def find(mutant: Mutant, wide: Range, *, seed: int, examples: int) -> SliceResult:
    """Search for a trace on which the property that the bug is to break catches it."""
    work = Slice(wide=wide, properties=(mutant.breaks,), seed=seed, seconds=float("inf"), examples=examples)
    return search(
        work, mutated(mutant), lambda trace, finding: caught(mutant, trace, finding.property_id) is not None
    )
