"""``mask-covers-lookup`` as arithmetic: random runs are models of it, and what Z3 says of each release."""

import random

import pytest

from hitproof.fuzz.bounded.masks import BUGS, UNITS, cases, decode, lookup, promised
from hitproof.fuzz.bounded.questions import DEFAULT_REACH, Question, Reach, answer
from hitproof.fuzz.bounded.solver import Limits
from hitproof.fuzz.bounded.terms import STATED
from hitproof.fuzz.seeded import with_and_without
from hitproof.model import ModelTarget
from hitproof.properties.mutants import MUTANTS, mutated
from hitproof.properties.story import Story
from hitproof.properties.verdict import Verdict
from hitproof.replay import store
from hitproof.replay.confirm import sight
from hitproof.replay.manager_target import ManagerTarget

SECONDS = 60


@pytest.mark.parametrize("seed", range(2))
def test_random_runs_are_models_of_the_arithmetic(seed):
    """1,000 runs each: the second request's hit, and what a resend is promised."""
    rng, hits = random.Random(seed), 0
    for _ in range(1000):
        case = rng.choice(cases(rng.choice(STATED), rng.randint(1, 6), rng.randint(1, 6)))
        q, length = rng.randint(0, 6), rng.randint(1, UNITS * case.unit)
        again = length + rng.choice((0, 0, rng.randint(1, case.unit)))
        trace = decode("extension-hits", case, q, length, again)
        run = ModelTarget(record=False).run(trace)
        assert lookup(case, q, length, again, (UNITS + 2) * case.unit) == run.hits[1]
        assert promised(case, length) == Story(run).promised(length)
        hits += run.hits[1] > 0
    assert hits > 400


def asked(release, name="mask-covers-lookup", size=2, **more):
    question = Question(property_id=name, release=release, reach=Reach(block_size=size), **more)
    return answer(question, Limits.of(SECONDS))


@pytest.mark.parametrize("release", ["0.19.1", "0.22.1", "0.23.0", "0.33.0"])
def test_masks_cover_lookup_without_eagle(release):
    """Whatever the block sizes, the window, the length and the retention."""
    assert asked(release, eagle=False).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("release", "retention", "verdict"),
    [
        ("0.19.1", None, Verdict.VIOLATED),
        ("0.20.0", None, Verdict.HOLDS),
        ("0.23.0", 0, Verdict.VIOLATED),
        ("0.29.0", 0, Verdict.VIOLATED),
        ("0.30.0", 0, Verdict.HOLDS),
        ("0.33.0", "any", Verdict.HOLDS),
    ],
)
def test_masks_under_eagle_with_one_block_size(release, retention, verdict):
    """vllm#32802 to 0.19; vllm#53945 from 0.23 to 0.29, under retention; none after."""
    assert asked(release, eagle=True, equal=True, retention=retention).verdict is verdict


def test_the_known_violations_are_found_again():
    """CE-0005's (0.22.1) and CE-0016's (every release), each with a smaller prompt than the stored one."""
    forgotten, aligned_twice = asked("0.22.1", eagle=True), asked("0.33.0", eagle=True)
    assert [str(op) for op in forgotten.trace.ops] == ["submit r0 A:5 out=1", "drain"]
    assert forgotten.finding.cause == "not written"
    assert [group.label for group in aligned_twice.trace.config.groups] == ["window:1/4", "full:2"]
    assert aligned_twice.finding.cause == "all cached"
    assert aligned_twice.minimal == (
        "no earlier bound is broken; prompt 5, none smaller; window blocks 3, none smaller"
    )


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found_at_the_default_reach(bug):
    """With EAGLE off if that shows it, in the smallest block sizes; without the bug nothing is found there."""
    mutant = next(mutant for mutant in MUTANTS if mutant.id == bug)
    question = Question(
        property_id=mutant.breaks,
        release=mutant.semantics,
        eagle=bug == "mask-without-eagle",
        equal=True,
        retention=0,
    )
    found = answer(question, Limits.of(SECONDS), run=mutated(mutant), **{BUGS[bug]: True})
    assert found.verdict is Verdict.VIOLATED
    bent, straight = with_and_without(mutant, found.trace, mutant.breaks)
    assert bent.finding is not None
    assert straight.finding is None
    largest = max(group.block_size for group in found.trace.config.groups)
    assert DEFAULT_REACH[mutant.breaks].block_size >= largest


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("0.22.1", "mask-covers-lookup"),
        ("0.25.0", "extension-hits"),
        ("0.33.0", "mask-covers-lookup"),
    ],
)
def test_real_vllm_reproduces_what_is_found(release, name):
    """The release's own manager breaks the promise on the decoded trace, twice."""
    found = asked(release, name, eagle=True)
    with ManagerTarget(store.add(release)) as manager:
        assert sight(found.trace, name, manager).verdict == "reproduced"


def test_a_window_of_one_token_is_never_written():
    """Below the asked range: with a window of 1 token nothing is needed, nothing kept, nothing found."""
    run = ModelTarget(record=False).run(decode("resend-hits", cases("0.33.0", 2, 2)[0], 0, 9, 9))
    assert run.hits == (0, 0)
