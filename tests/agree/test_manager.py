"""vLLM's own KVCacheManager in a worker process, under the core loader."""

import os

import attrs
import pytest

from hitproof.fuzz.random_traces import random_trace
from hitproof.model import (
    BadInput,
    CacheConfig,
    Group,
    HarnessFault,
    ModelTarget,
    Semantics,
    Trace,
    parse_op,
    under,
)
from hitproof.model.semantics import parse_release
from hitproof.replay import env, store
from hitproof.replay.adapter import ARGUMENTS, METHODS
from hitproof.replay.lockstep import canonical
from hitproof.replay.manager_target import HEIGHTS, ManagerTarget

pytestmark = pytest.mark.vllm

WINDOW = Group(kind="sliding_window", block_size=4, window=8)
FULL = Group(kind="full", block_size=8)
CHAT = (
    "submit a S:24 out=5 salt=x",
    "step 2",
    "submit b S:24 u:9 out=3",
    "drain",
    "submit c S:24 u:9 @b v:3 out=2 lora=x@p",
    "submit d S:24 u:9 @b out=9",
    "step",
    "abort d",
    "drain",
    "reset",
    "submit e S:24 out=1",
    "drain",
)


def trace(*ops, groups=(WINDOW, WINDOW, FULL), **settings):
    settings = {"num_blocks": 40, "max_num_batched_tokens": 16, "semantics": "0.32.0", **settings}
    return Trace(config=CacheConfig(groups=groups, **settings), ops=tuple(map(parse_op, ops)))


def groups_of(release):
    """Two block sizes, where the release has more than one."""
    one_size = Semantics.of(release).group_mix == "one_block_size"
    return (WINDOW, WINDOW, attrs.evolve(FULL, block_size=4) if one_size else FULL)


def four_seats(prefix, retention, release):
    """The configuration of a public report: 4 seats in turn, 3 rounds, 5 windows beside 1 full group."""
    ops = []
    for turn in range(3):
        for seat in range(4):
            ops += [f"submit r{turn}.{seat} s{seat}:{prefix} f{turn}.{seat}:8 out=2", "drain"]
    window = Group(kind="sliding_window", block_size=32, window=64)
    settings = {"num_blocks": 400, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    groups = (window,) * 5 + (Group(kind="full", block_size=32),)
    return trace(*ops, groups=groups, semantics=release, retention_interval=retention, **settings)


def test_core_loader_executes_the_trees_own_files(target, release):
    """The worker drives the manager of the release's own tree, on the standard library."""
    probe = target.probe()
    assert probe["loader"] == "core"
    assert probe["manager"] == str(store.find(release).root / "vllm/v1/core/kv_cache_manager.py")


def test_model_agrees_with_the_manager_call_by_call(target):
    """A chat with aborts, a reset, a salt and a LoRA of one name shows no difference."""
    (found,) = target.conform([trace(*CHAT, groups=groups_of(target.version))])
    assert found.divergence is None
    assert found.calls > 40


def test_run_shows_what_the_model_shows(target):
    """All observations of a run are the model's, but for the order of removal events."""
    chat = trace(*CHAT, groups=groups_of(target.version))
    real = target.run(chat)
    model = ModelTarget().run(under(chat, target.tree.semantics))
    assert real.target == "manager (core)"
    assert [tidy(seen) for seen in real.observations] == [tidy(seen) for seen in model.observations]
    assert real.requests == model.requests


def tidy(observation):
    return attrs.evolve(observation, events=tuple(canonical(observation.events)))


def test_refused_admission_agrees_with_the_gate_off_and_on(target):
    """A prompt that never fits is refused the same way with and without the full-sequence gate."""
    for gate in (True, False):
        groups = groups_of(target.version)
        settings = {"num_blocks": 12, "scheduler_reserve_full_isl": gate}
        big = trace("submit a S:70 out=1", "step 6", groups=groups, **settings)
        (found,) = target.conform([big])
        assert found.divergence is None


@pytest.mark.parametrize(("retention", "last_full", "first_zero"), [(None, 640, 672), (0, 1280, 1312)])
def test_cliff_is_where_it_was_measured(target, retention, last_full, first_zero):
    """Hits of rounds 2 and 3 are full at one prefix length and 0 one block later."""
    if retention == 0 and parse_release(target.version) < (0, 23, 0):
        pytest.skip("no retention interval in this release")
    if retention is None and parse_release(target.version) < (0, 23, 0):
        last_full, first_zero = 608, 640
    semantics = target.tree.semantics
    assert set(target.run(four_seats(last_full, retention, semantics)).hits[4:]) == {last_full}
    assert set(target.run(four_seats(first_zero, retention, semantics)).hits[4:]) == {0}


def test_argument_table_is_what_the_trees_have(release):
    """The releases named in ``ARGUMENTS`` are those whose functions have the argument."""
    text = {
        "KVCacheManager": ("v1/core/kv_cache_manager.py", "class KVCacheManager:"),
        "KVCacheManager.allocate_slots": ("v1/core/kv_cache_manager.py", "def allocate_slots("),
        "Scheduler": ("v1/core/sched/scheduler.py", "class Scheduler("),
        "Request": ("v1/request.py", "class Request"),
        "KVCacheConfig": ("v1/kv_cache_interface.py", "class KVCacheConfig:"),
        "SlidingWindowSpec": ("v1/kv_cache_interface.py", "class SlidingWindowSpec("),
    }
    root = store.add(release).root / "vllm"
    for row in ARGUMENTS:
        file, start = text[row.api]
        body = (root / file).read_text().partition(start)[2].partition("\n    def ")
        if row.api in ("KVCacheManager", "Scheduler", "Request"):
            body = body[2].partition(") -> None:")
        has = f"{row.name}:" in body[0].partition("->")[0]
        assert has == named(row.releases, release), (row.name, release)


def test_method_table_is_what_the_trees_have(release):
    """The releases named in ``METHODS`` are those whose files have it."""
    text = {
        "KVCacheManager.new_step_starts": ("v1/core/kv_cache_manager.py", "def new_step_starts("),
        "ModelRunnerOutput.sampled_token_ids": ("v1/outputs.py", "sampled_token_ids: list[np.ndarray]"),
        "BlockStored.lora_name": ("distributed/kv_events.py", "lora_name: str | None"),
        "BlockStored.extra_keys": ("distributed/kv_events.py", "extra_keys: list[tuple["),
        "KVCacheManager.can_fit_full_sequence": ("v1/core/kv_cache_manager.py", "def can_fit_full_sequence("),
        "KVCacheManager.get_computed_blocks": (
            "v1/core/kv_cache_manager.py",
            "tuple[KVCacheBlocks, int, int]",
        ),
        "Request.shared_prefix_boundary": ("v1/request.py", "self.shared_prefix_boundary ="),
        "BlockPool.cached_block_hashes_by_block": (
            "v1/core/block_pool.py",
            "self.cached_block_hashes_by_block",
        ),
        "envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL": (
            "v1/core/kv_cache_coordinator.py",
            "envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL",
        ),
        "BlockHashListWithBlockSize": ("v1/core/kv_cache_utils.py", "base = idx * self.scale_factor"),
        "Scheduler.block_size": ("v1/core/sched/scheduler.py", "hash_block_size=self.block_size"),
        "BlockStored.group_idx": ("distributed/kv_events.py", "group_idx: int | None"),
    }
    root = store.add(release).root / "vllm"
    for name, releases, _ in METHODS:
        file, sign = text[name]
        assert (sign in (root / file).read_text()) == named(releases, release), (name, release)


def named(releases, release):
    first, _, last = releases.removesuffix("+").partition("-")
    newest = last or ("99.0.0" if releases.endswith("+") else first)
    return parse_release(first) <= parse_release(release) <= parse_release(newest)


def test_config_that_vllm_refuses_is_bad_input(fork):
    """What the tree asserts while it is built comes back as one message, not as a crash."""
    tree = fork(
        (
            "v1/core/kv_cache_manager.py",
            'assert watermark >= 0.0, "watermark must be non-negative"',
            "assert watermark > 0.5, 'too small'",
        )
    )
    with (
        ManagerTarget(tree) as target,
        pytest.raises(BadInput, match=r"vLLM refuses this config.*watermark > 0"),
    ):
        target.run(trace("submit a S:8", "drain"))


LOOKUP = ("v1/core/kv_cache_manager.py", "        max_cache_hit_length = request.num_tokens - 1\n")


@pytest.mark.parametrize(
    ("touch", "named_as"),
    [
        ("import torch; torch.cuda.is_available()", "torch.cuda"),
        ("from vllm.platforms import current_platform; bool(current_platform)", "current_platform.__bool__"),
        ("from vllm.config import VllmConfig", "vllm.config.VllmConfig"),
        (
            "\n        try:\n            import torch; torch.ones(1)\n        except Exception: pass",
            "torch.ones",
        ),
    ],
)
def test_stand_in_touched_at_run_time_is_a_harness_fault(fork, touch, named_as):
    """A fork that uses something outside the core files is stopped by name, even if it hides it."""
    tree = fork((*LOOKUP, f"{LOOKUP[1]}        {touch}\n"))
    with ManagerTarget(tree) as target, pytest.raises(HarnessFault, match=named_as):
        target.run(trace("submit a S:8", "drain"))


def test_crash_of_the_tree_is_a_harness_fault(fork):
    """An exception that vLLM does not raise on purpose is never taken for an observation."""
    tree = fork((*LOOKUP, "        raise RuntimeError('bent')\n"))
    with ManagerTarget(tree) as target, pytest.raises(HarnessFault, match="RuntimeError: bent"):
        target.run(trace("submit a S:8", "drain"))


def test_changed_rule_of_a_fork_is_found(fork):
    """A fork that frees its blocks head first diverges at the first free, in the free queue."""
    tree = fork(
        (
            "v1/core/block_pool.py",
            "        self.free_block_queue.append_n(blocks_to_evict_last)\n",
            "        self.free_block_queue.append_n(blocks_to_evict_last[::-1])\n",
        )
    )
    with ManagerTarget(tree) as target:
        (found,) = target.conform([trace("submit a S:40 out=1", "drain", num_blocks=60)])
    assert found.divergence is not None
    assert (found.divergence.call, found.divergence.field) == ("free", "free_queue")
    assert found.calls == found.divergence.call_index


@pytest.mark.engine
@pytest.mark.parametrize("height", HEIGHTS)
def test_core_loader_equals_the_full_import(height):
    """The stand-ins change nothing: runs under both loaders are equal, observation by observation."""
    given = os.environ.get("HITPROOF_VLLM_PYTHON")
    python = env.python(given=given) if given else env.make(progress=print)
    tree = store.add(env.NEWEST_CPU)
    kind = HEIGHTS[height]
    with kind(tree) as core, kind(tree, "env", python, timeout_s=300) as full:
        assert full.probe()["loader"] == "env"
        varied = [random_trace(seed, tree.semantics) for seed in range(40)]
        for chat in (trace(*CHAT), trace(*CHAT, use_eagle=True), trace(*CHAT, num_blocks=24), *varied):
            if height == "scheduler" and chat.config.use_eagle:
                continue
            assert attrs.evolve(core.run(chat), target="") == attrs.evolve(full.run(chat), target="")
