"""Every seeded bug is found by search, starting from nothing.

The search is cut into slices by number of traces, one seed each, so that what is found depends on no
clock. A bug that needs a rare kind of config is looked for among those.
"""

import pytest

from hitproof.fuzz.draw import Range
from hitproof.fuzz.seeded import caught, find
from hitproof.properties.mutants import MUTANTS

pytestmark = pytest.mark.fuzz

SLICES = 12
EXAMPLES = 200

WINDOWS = {"hybrid": True}
RARE = {
    "eagle-drops-every-pass": WINDOWS,
    "mask-without-eagle": WINDOWS,
    "junction-not-kept": {"hybrid": True, "retention": "0", "most_groups": 2, "odd": False},
    "evicts-one-more": {"most_groups": 1, "most_blocks": 16, "odd": False},
}


def searched(mutant):
    """The first slice that ends with a trace on which the bug is caught."""
    wide = Range(**{"semantics": mutant.semantics, "retention": "any", **RARE.get(mutant.id, {})})
    slices = (find(mutant, wide, seed=seed, examples=EXAMPLES) for seed in range(SLICES))
    return next(found for found in slices if found.trace is not None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_search_finds_the_bug(mutant):
    """Some slice ends with a trace that breaks the bug's property, with the bug alone."""
    found = searched(mutant)
    assert [finding.property_id for finding in found.findings] == [mutant.breaks]
    assert caught(mutant, found.trace, mutant.breaks)
