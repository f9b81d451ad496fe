"""Verdicts cannot be made without what they rest on."""

import pytest

from hitproof.properties.known import KNOWN
from hitproof.properties.registry import BY_ID, PROPERTIES
from hitproof.properties.verdict import Judgement, Verdict


@pytest.mark.parametrize(
    ("violated", "runs", "evidence", "verdict"),
    [
        (True, 9, 0, Verdict.VIOLATED),
        (False, 0, 0, Verdict.UNKNOWN),
        (False, 9, 0, Verdict.VACUOUS),
        (False, 9, 3, Verdict.HOLDS),
    ],
)
def test_counts_decide_the_verdict(violated, runs, evidence, verdict):
    """No runs is UNKNOWN, no evidence is VACUOUS, and a violation outweighs both."""
    judged = Judgement.of("progress", violated=violated, runs=runs, evidence=evidence, bound="9 traces")
    assert judged.verdict is verdict


@pytest.mark.parametrize(("evidence", "bound"), [(0, "9 traces"), (3, "")])
def test_holds_needs_a_bound_and_evidence(evidence, bound):
    """HOLDS without either cannot be built."""
    with pytest.raises(ValueError, match="HOLDS needs a bound and evidence"):
        Judgement(property_id="progress", verdict=Verdict.HOLDS, evidence=evidence, runs=9, bound=bound)


def test_verdicts_are_ordered_from_worst_to_best():
    """VIOLATED < UNKNOWN < VACUOUS < HOLDS."""
    assert sorted(Verdict) == [Verdict.VIOLATED, Verdict.UNKNOWN, Verdict.VACUOUS, Verdict.HOLDS]


def test_every_property_says_what_it_promises():
    """Ids are unique, and each has a promise, a reason, a source and a formal statement."""
    assert len(BY_ID) == len(PROPERTIES) == 27
    for p in PROPERTIES:
        assert p.promise.endswith(".")
        assert all((p.why, p.source, p.statement))


def test_every_known_violation_is_of_a_property():
    """The table speaks of promises that exist, and gives a reason."""
    for known in KNOWN:
        assert known.property_id in BY_ID
        assert known.because
