"""Which name of the model is which name of vLLM, and where it is read: the data of
``docs/correspondence.md``. A test finds every name in the model and in vLLM's source.
"""

from __future__ import annotations

from typing import Literal

import attrs

from hitproof.model import ModelTarget
from hitproof.replay.engine import EngineTarget
from hitproof.replay.ladder import RUNGS
from hitproof.replay.manager_target import ManagerTarget, SchedulerTarget
from hitproof.replay.server import ServerTarget

SEES = {
    "model": ModelTarget().sees,
    "manager": ManagerTarget.sees,
    "scheduler": SchedulerTarget.sees,
    "engine": EngineTarget.sees,
    "server": ServerTarget.sees,
}
"""What the runs of each rung show."""

Kind = Literal["hits", "calls", "state", "settings"]


@attrs.frozen(kw_only=True, slots=True)
class Name:
    """One row. ``model``: a name in ``hitproof.model``; ``vllm``: a file under ``vllm/`` and a name in it.

    ``kind``: what a run must show; "settings" are given to or read back from the rungs in ``rungs``.
    """

    model: str
    vllm: str
    kind: Kind
    how: str
    rungs: tuple[str, ...] = ()

    @property
    def seen_by(self) -> tuple[str, ...]:
        """The rungs that see it, lowest first."""
        return self.rungs or tuple(rung for rung in RUNGS if self.kind in SEES[rung])


MANAGER = "v1/core/kv_cache_manager.py:KVCacheManager"
POOL = "v1/core/block_pool.py:BlockPool"
CACHE = "config/cache.py:CacheConfig"
SCHEDULER = "config/scheduler.py:SchedulerConfig"
READ_BACK = ("manager", "scheduler", "engine")
ALL = ("manager", "scheduler", "engine", "server")

NAMES = (
    Name(
        model="RequestResult.hit_tokens",
        vllm="outputs.py:RequestOutput.num_cached_tokens",
        kind="hits",
        how="manager: second value of the first `get_computed_blocks`; engine: this attribute; server: "
        "`usage.prompt_tokens_details.cached_tokens`, equal to the growth of `vllm:prefix_cache_hits_total`",
    ),
    Name(
        model="RequestResult.prompt_tokens",
        vllm="v1/request.py:Request.num_prompt_tokens",
        kind="hits",
        how="server: `usage.prompt_tokens`, compared with what was sent",
    ),
    Name(
        model="RequestResult.finished",
        vllm="outputs.py:RequestOutput.finished",
        kind="hits",
        how="engine: this attribute; server: every request is waited for",
    ),
    Name(
        model="Manager.lookup",
        vllm=f"{MANAGER}.get_computed_blocks",
        kind="calls",
        how="called by the adapter, or by vLLM's scheduler; `Lookup.junction` is its third value from 0.26",
    ),
    Name(
        model="Lookup.blocks",
        vllm="v1/core/kv_cache_manager.py:KVCacheBlocks.blocks",
        kind="calls",
        how="`block_id` of each, per group",
    ),
    Name(
        model="Manager.allocate",
        vllm=f"{MANAGER}.allocate_slots",
        kind="calls",
        how="called by the adapter, or by vLLM's scheduler; None is a refusal",
    ),
    Name(
        model="Manager.free",
        vllm=f"{MANAGER}.free",
        kind="calls",
        how="called by the adapter, or by vLLM's scheduler",
    ),
    Name(
        model="Manager.reset",
        vllm=f"{MANAGER}.reset_prefix_cache",
        kind="calls",
        how="called by the adapter; engine: `LLMEngine.reset_prefix_cache`; server: `POST /reset_prefix_cache`",
        rungs=("model", *ALL),
    ),
    Name(
        model="Manager.step",
        vllm=f"{MANAGER}.new_step_starts",
        kind="calls",
        how="called by the adapter, or by vLLM's scheduler; engine: inside `LLMEngine.step`",
    ),
    Name(
        model="Observation.events",
        vllm=f"{MANAGER}.take_events",
        kind="calls",
        how="after each call; hashes interned to keys",
    ),
    Name(
        model="Request.computed",
        vllm="v1/request.py:Request.num_computed_tokens",
        kind="calls",
        how="manager: written by the adapter before each call, as vLLM's scheduler would",
    ),
    Name(
        model="Snapshot.ref_count",
        vllm="v1/core/kv_cache_utils.py:KVCacheBlock.ref_cnt",
        kind="state",
        how="of every block of `BlockPool.blocks`",
    ),
    Name(
        model="Snapshot.free_queue",
        vllm="v1/core/kv_cache_utils.py:FreeKVCacheBlockQueue.get_all_free_blocks",
        kind="state",
        how="called; the count is compared with `get_num_free_blocks`",
    ),
    Name(
        model="Snapshot.keys",
        vllm="v1/core/kv_cache_utils.py:KVCacheBlock.block_hash",
        kind="state",
        how="hash and group id, interned; aliases from `BlockPool.cached_block_hashes_by_block`",
    ),
    Name(
        model="Snapshot.index",
        vllm=f"{POOL}.cached_block_hash_to_block",
        kind="state",
        how="its `_cache`, per group",
    ),
    Name(
        model="Snapshot.tables",
        vllm="v1/core/single_type_kv_cache_manager.py:SingleTypeKVCacheManager.req_to_blocks",
        kind="state",
        how="of every group's manager",
    ),
    Name(model="NULL", vllm=f"{POOL}.null_block", kind="state", how="block 0 in every table"),
    Name(
        model="CacheConfig.num_blocks",
        vllm=f"{CACHE}.num_gpu_blocks_override",
        kind="settings",
        how="given; engine: read back from `KVCacheConfig.num_blocks`; server: `num_gpu_blocks` of "
        "`vllm:cache_config_info`",
        rungs=ALL,
    ),
    Name(
        model="Group.block_size",
        vllm="v1/kv_cache_interface.py:KVCacheSpec.block_size",
        kind="settings",
        how="engine: read back group by group; server: the smallest, `block_size` of `vllm:cache_config_info`",
        rungs=ALL,
    ),
    Name(
        model="Group.window",
        vllm="v1/kv_cache_interface.py:SlidingWindowSpec.sliding_window",
        kind="settings",
        how="given by the tiny model's `config.json`; engine: read back",
        rungs=READ_BACK,
    ),
    Name(
        model="Group.chunk",
        vllm="v1/kv_cache_interface.py:ChunkedLocalAttentionSpec.attention_chunk_size",
        kind="settings",
        how="given by the tiny model's `config.json`; engine: read back",
        rungs=READ_BACK,
    ),
    Name(
        model="CacheConfig.key_block_size",
        vllm=f"{POOL}.hash_block_size",
        kind="settings",
        how="engine: read back",
        rungs=READ_BACK,
    ),
    Name(
        model="CacheConfig.retention",
        vllm="v1/core/kv_cache_coordinator.py:KVCacheCoordinator.retention_interval",
        kind="settings",
        how="engine: read back; server: `prefix_cache_retention_interval` of `vllm:cache_config_info` from 0.29",
        rungs=ALL,
    ),
    Name(
        model="CacheConfig.max_num_batched_tokens",
        vllm=f"{SCHEDULER}.max_num_batched_tokens",
        kind="settings",
        how="engine: read back; server: `/server_info`, where it is offered",
        rungs=ALL,
    ),
    Name(
        model="CacheConfig.max_num_seqs",
        vllm=f"{SCHEDULER}.max_num_seqs",
        kind="settings",
        how="engine: read back; server: `/server_info`, where it is offered",
        rungs=("scheduler", "engine", "server"),
    ),
    Name(
        model="CacheConfig.max_model_len",
        vllm="config/model.py:ModelConfig.max_model_len",
        kind="settings",
        how="engine: read back; server: `/v1/models`",
        rungs=ALL,
    ),
)
