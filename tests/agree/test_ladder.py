"""The first rung that disagrees is the find: a fork whose scheduler, or manager, decides otherwise."""

from contextlib import nullcontext
from functools import partial

import pytest

from hitproof.model import CacheConfig, Group, ModelTarget, Trace, parse_op
from hitproof.replay.ladder import climb
from hitproof.replay.manager_target import ManagerTarget, SchedulerTarget

pytestmark = pytest.mark.vllm

TRACE = Trace(
    config=CacheConfig(
        groups=(Group(kind="full", block_size=2), Group(kind="sliding_window", block_size=2, window=3)),
        num_blocks=40,
        semantics="0.32.0",
    ),
    ops=tuple(map(parse_op, ("submit a S:9 out=2", "drain", "submit b S:9", "drain"))),
)


@pytest.mark.parametrize(
    ("file", "old", "new", "verdicts"),
    [
        (
            "v1/core/kv_cache_manager.py",
            "max_cache_hit_length = request.num_tokens - 1",
            "max_cache_hit_length = request.num_tokens - 2 + 1",
            ["as expected", "as expected", "as expected"],
        ),
        (
            "v1/core/kv_cache_manager.py",
            "max_cache_hit_length = request.num_tokens - 1",
            "max_cache_hit_length = request.num_tokens - 3",
            ["as expected", "differs"],
        ),
        (
            "v1/core/sched/scheduler.py",
            "return blocks, num_local, shared_prefix_boundary, False",
            "return self.kv_cache_manager.empty_kv_cache_blocks, 0, shared_prefix_boundary, False",
            ["as expected", "as expected", "differs"],
        ),
    ],
    ids=["nothing", "manager", "scheduler"],
)
def test_climb_stops_where_the_fork_differs(fork, file, old, new, verdicts):
    """A change of the manager shows at the manager, one of the scheduler only there; the request is named."""
    tree = fork((file, old, new))
    rungs = [
        ("model", lambda: nullcontext(ModelTarget())),
        ("manager", partial(ManagerTarget, tree)),
        ("scheduler", partial(SchedulerTarget, tree)),
    ]
    found = list(climb(TRACE, rungs))
    assert [said.verdict for said in found] == verdicts
    if verdicts[-1] == "differs":
        assert found[-1].reason.startswith("request 1 of 2, b (ops[2]): expected hit 8, observed ")
