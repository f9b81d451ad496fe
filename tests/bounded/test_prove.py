"""Answers of ``prove``: smallest counterexamples, proofs, bounds, and verdicts that say what is not known."""

import pytest

from hitproof.fuzz.bounded import questions
from hitproof.fuzz.bounded.answer import ENCODING_FAULT, Answer, Bound, prove
from hitproof.fuzz.bounded.questions import Question, Reach, answer
from hitproof.fuzz.bounded.run_level import Fixed
from hitproof.fuzz.bounded.solver import Limits
from hitproof.fuzz.seeded import caught
from hitproof.model import ModelTarget, Trace
from hitproof.properties.mutants import MUTANTS, mutated
from hitproof.properties.verdict import Verdict

SECONDS = 60
BUG = {mutant.id: mutant for mutant in MUTANTS}


def asked(name, release="0.33.0", **more):
    return answer(Question(property_id=name, release=release, **more), Limits.of(SECONDS))


def hits(trace):
    return ModelTarget().run(trace).hits


def test_the_smallest_cliff():
    """Half the pool: 3 turns of 2 sessions in 21 blocks, and nothing smaller."""
    found = asked("hit-survives-half-pool")
    assert (found.verdict, found.bound.partition(";")[0]) == (Verdict.VIOLATED, "3 turns x 2 sessions")
    assert found.minimal == "no earlier bound is broken; blocks 21, none smaller"
    assert found.trace.config.num_blocks == 21
    assert hits(found.trace) == (0, 0, 0)


@pytest.mark.parametrize(("windows", "blocks"), [(5, 29), (2, 21)])
def test_the_smallest_cliff_by_number_of_window_groups(windows, blocks):
    """With as many window groups, the fewest blocks."""
    found = asked("hit-survives-half-pool", fixed=Fixed(windows=windows, m=1, single=False), retention=None)
    assert found.trace.config.num_blocks == blocks
    assert hits(found.trace)[-1] == 0


def test_no_cliff_with_one_window_group():
    """With one window group half the pool is enough, within the default reach."""
    found = asked("hit-survives-half-pool", fixed=Fixed(windows=1))
    assert found.verdict is Verdict.HOLDS
    assert "5 turns x 3 sessions" in found.bound


@pytest.mark.parametrize(
    ("release", "retention", "verdict"),
    [
        ("0.33.0", 0, Verdict.HOLDS),
        ("0.24.0", 0, Verdict.HOLDS),
        ("0.33.0", None, Verdict.VIOLATED),
        ("0.23.0", 0, Verdict.VIOLATED),
        ("0.22.0", None, Verdict.VIOLATED),
    ],
)
def test_what_fits_survives(release, retention, verdict):
    """It holds where nothing but live blocks joins the tail of the queue: retention 0 from 0.24 on."""
    found = asked("hit-survives-fit", release, retention=retention)
    assert found.verdict is verdict
    if verdict is Verdict.HOLDS:
        assert "by induction any number of turns x 3 sessions" in found.bound
        assert found.statistics["conflicts"] > 0


def test_a_seeded_bug_is_found_in_reach():
    """A pool that evicts one block more than it takes breaks what holds without the bug."""
    bug = BUG["evicts-one-more"]
    question = Question(property_id=bug.breaks, release=bug.semantics)
    found = answer(question, Limits.of(SECONDS), run=mutated(bug), evicts_more=1)
    assert found.verdict is Verdict.VIOLATED
    assert caught(bug, found.trace, bug.breaks)
    assert answer(question, Limits.of(SECONDS)).verdict is Verdict.HOLDS


def test_another_claim_about_the_pool_is_an_encoding_fault():
    """A counterexample that the model does not reproduce is neither a violation nor hidden."""
    question = Question(property_id="hit-survives-fit", release="0.33.0")
    found = answer(question, Limits.of(SECONDS), evicts_more=1)
    assert found.word == ENCODING_FAULT
    assert found.verdict is Verdict.UNKNOWN
    assert found.fault.startswith("the model keeps the promise")


@pytest.mark.parametrize("name", ["hit-survives-half-pool", "hit-survives-fit"])
def test_the_seed_changes_nothing_but_time(name):
    """Three seeds: the same verdict, bound, counterexample and minimality."""
    question = Question(property_id=name, release="0.25.0", reach=Reach(turns=4, sessions=3))
    seen = [answer(question, Limits.of(SECONDS, seed=seed)) for seed in (0, 1, 2)]
    assert len({(x.word, x.bound, x.minimal, x.trace.dumps()) for x in seen}) == 1


def test_a_time_out_is_unknown_with_what_is_done():
    """Too little time: UNKNOWN, the reason, and the bounds that were done."""
    question = Question(property_id="hit-survives-fit", release="0.33.0", reach=Reach(turns=40, sessions=8))
    found = answer(question, Limits.of(3))
    assert found.verdict is Verdict.UNKNOWN
    assert "timeout" in found.reason or "no time left" in found.reason or "canceled" in found.reason
    assert found.bound.startswith("2 turns x 1 sessions to ")


def test_a_memory_limit_is_unknown():
    """Too little memory is a verdict, not a crash."""
    question = Question(property_id="hit-survives-fit", release="0.33.0")
    found = answer(question, Limits.of(SECONDS, memory_mb=1))
    assert found.verdict is Verdict.UNKNOWN
    assert "memory" in found.reason


def test_holds_without_a_proof_cannot_be_said():
    """HOLDS needs a bound that was proven with evidence."""
    with pytest.raises(ValueError, match="HOLDS needs a bound"):
        Answer(property_id="hit-survives-fit", verdict=Verdict.HOLDS, bound="all", seconds=0)


def test_nothing_to_check_is_vacuous():
    """A bound whose premise no run meets is no evidence."""

    def never(_):
        raise AssertionError

    empty = Bound(text="nobody", premise=[False], broken=[True], decode=never)
    assert prove("hit-survives-fit", [empty], Limits.of(SECONDS)).verdict is Verdict.VACUOUS


def test_every_promise_that_can_be_asked_has_a_reach():
    """Default bounds are data."""
    assert set(questions.DEFAULT_REACH) == set(questions.PROVABLE)


def test_a_counterexample_reads_back():
    """A decoded trace is a trace file like any other."""
    found = asked("hit-survives-half-pool")
    assert Trace.loads(found.trace.dumps()) == found.trace
