"""vLLM's own Scheduler, with its manager inside, against the model's: same decisions, same state."""

from collections import Counter

import pytest

from hitproof.fuzz.conformance import outcomes
from hitproof.fuzz.random_traces import random_trace
from hitproof.model import CacheConfig, Group, NotModelled, Trace, parse_op
from hitproof.replay import store
from hitproof.replay.manager_target import SchedulerTarget

pytestmark = pytest.mark.vllm

GROUPS = (Group(kind="full", block_size=2), Group(kind="sliding_window", block_size=2, window=5))


def trace(*ops, **settings):
    settings = {"num_blocks": 14, "max_num_batched_tokens": 6, "semantics": "0.32.0", **settings}
    return Trace(config=CacheConfig(groups=GROUPS, **settings), ops=tuple(map(parse_op, ops)))


CROWDED = trace(
    "submit a S:7 out=6",
    "submit b S:4 u:3 out=6",
    "step 3",
    "submit c v:5 out=2",
    "drain",
    scheduler_reserve_full_isl=False,
)
"""Two requests that outgrow the pool: one is preempted and admitted again."""


@pytest.fixture(scope="module")
def scheduler(release):
    with SchedulerTarget(store.add(release)) as started:
        yield started


def test_the_schedulers_decisions_are_the_models(scheduler):
    """Admissions, tokens, preemptions, hits and every state are equal on random traces."""
    drawn = [random_trace(seed, scheduler.tree.semantics) for seed in range(90)]
    traces = [one for one in drawn if not one.config.use_eagle]
    compared = scheduler.conform(traces)
    for one, found in zip(traces, compared, strict=True):
        assert found.divergence is None, f"{found.divergence}\n{one.dumps()}"
    assert sum(found.calls for found in compared) > 3000
    seen = Counter(word for one in traces for word in outcomes(one))
    assert {"preemption", "refused allocation", "eviction", "hit"} <= set(seen)


def test_a_preemption_is_seen_and_counted(scheduler):
    """The victim is the model's, and its first hit stays the one that is shown."""
    run = scheduler.run(CROWDED)
    assert sum(result.preemptions for result in run.requests) > 0
    assert all(result.finished for result in run.requests)
    assert scheduler.conform([CROWDED])[0].divergence is None


def test_eagle_is_refused_by_name(scheduler):
    """A real scheduler would schedule drafts, which are not modelled."""
    with pytest.raises(NotModelled, match="schedules draft tokens"):
        scheduler.run(trace("submit a S:7", "drain", use_eagle=True))


@pytest.mark.parametrize(
    ("old", "new", "call", "field"),
    [
        ("preempted_req = self.running.pop()", "preempted_req = self.running.pop(0)", "free", "request"),
        (
            "while token_budget > 0:\n                # Requests holding",
            "while token_budget > 3:\n                # Requests holding",
            "lookup",
            "call",
        ),
        (
            "full_sequence_must_fit=self.scheduler_reserve_full_isl,",
            "full_sequence_must_fit=not self.scheduler_reserve_full_isl,",
            "allocate",
            "must_fit",
        ),
    ],
    ids=["victim", "admission", "gate"],
)
def test_changed_decision_of_a_fork_is_found(fork, old, new, call, field):
    """Another victim, a later admission, another gate: the first call that differs is named."""
    with SchedulerTarget(fork(("v1/core/sched/scheduler.py", old, new))) as target:
        (found,) = target.conform([CROWDED])
    assert found.divergence is not None
    assert (found.divergence.call, found.divergence.field) == (call, field)
