"""Loading a vLLM tree and building its manager and scheduler, whatever its release.

Runs only in a worker process. Everything that differs between releases is a row of ``ARGUMENTS`` or
``METHODS``; which form a tree has is read from the signatures of its own functions, so a fork needs no
version number.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs

from hitproof.model import BadInput, CacheConfig, Group, HarnessFault, NotModelled
from hitproof.replay import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ANY = object()
"""A value that an older form, which lacks the argument, works out by itself."""


@attrs.frozen(slots=True)
class Argument:
    """An argument that only some releases have. ``neutral``: the value that means "not passed"."""

    api: str
    name: str
    releases: str
    neutral: object


ARGUMENTS = (
    Argument("KVCacheManager", "hash_block_size", "0.12.0+", ANY),
    Argument("KVCacheManager", "scheduler_block_size", "0.23.0+", ANY),
    Argument("KVCacheManager", "max_num_batched_tokens", "0.20.0-0.25.1", ANY),
    Argument("KVCacheManager", "max_in_flight_tokens", "0.26.0+", ANY),
    Argument("KVCacheManager", "watermark", "0.24.0+", 0.0),
    Argument("KVCacheManager.allocate_slots", "full_sequence_must_fit", "0.21.0+", False),
    Argument("KVCacheManager.allocate_slots", "has_scheduled_reqs", "0.24.0+", ANY),
    Argument("Request", "eos_token_id", "0.11.1-0.16.0", None),
    Argument("Scheduler", "hash_block_size", "0.20.0+", ANY),
    Argument("KVCacheConfig", "prefix_cache_retention_interval", "0.29.0+", None),
    Argument("SlidingWindowSpec", "extra_retained_tokens", "0.28.0+", 0),
)
"""Arguments passed where the tree's own function has them. Dropping one that is not neutral is a fault."""

METHODS = (
    ("KVCacheManager.new_step_starts", "0.17.0+", "called as each step starts"),
    ("KVCacheManager.can_fit_full_sequence", "0.19.0-0.20.2", "the admission gate, called before"),
    ("KVCacheManager.get_computed_blocks", "0.26.0+", "a third value: the shared-prefix junction"),
    ("Request.shared_prefix_boundary", "0.26.0+", "set to that value before allocate_slots"),
    ("BlockPool.cached_block_hashes_by_block", "0.24.0+", "the further keys of a block"),
    ("envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0.23.0-0.28.0", "read when the coordinator is built"),
    ("BlockHashListWithBlockSize", "0.12.0-0.23.0", "a large block's hash is those of its parts in a row"),
    ("Scheduler.block_size", "0.12.0-0.19.1", "the hash block size; from 0.20.0 the scheduler block size"),
    ("ModelRunnerOutput.sampled_token_ids", "0.11.1-0.11.2", "arrays, not lists"),
    ("BlockStored.lora_name", "0.14.0+", "the LoRA of an event"),
    ("BlockStored.extra_keys", "0.17.0+", "salt and LoRA of each block of an event"),
    ("BlockStored.group_idx", "0.20.0+", "the group of an event"),
)
"""Differences that are not arguments: what, which releases have it, how it is used."""

RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


@attrs.frozen(kw_only=True, slots=True)
class LoadedVllm:
    """The parts of a loaded vLLM that the adapter uses. ``touched``: forbidden stand-ins used.
    ``scheduler`` and ``outputs`` only where they were asked for.
    """

    loader: str
    manager: Any
    utils: Any
    interface: Any
    request: Any
    lora: Any
    sampling: Any
    envs: Any
    sha256: Any
    dtype: Any
    scheduler: Any = None
    outputs: Any = None
    touched: list[str] = attrs.field(factory=list)


def load(root: Path, loader: str, *, scheduler: bool = False) -> LoadedVllm:
    """Load vLLM into this process: ``core`` from the tree at ``root`` alone; ``env`` the installed
    one with the tree in front of it.
    """
    if not __debug__:
        raise HarnessFault("worker: Python runs without assertions; unset PYTHONOPTIMIZE")
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        del os.environ[name]
    # Events then carry block hashes as bytes, not their low 64 bits.
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    core_loader = None
    if loader == "core":
        core_loader = core.install(root)
    else:
        sys.path.insert(0, str(root))
    module = importlib.import_module
    loaded = LoadedVllm(
        loader=loader,
        manager=module("vllm.v1.core.kv_cache_manager"),
        utils=module("vllm.v1.core.kv_cache_utils"),
        interface=module("vllm.v1.kv_cache_interface"),
        request=module("vllm.v1.request"),
        lora=module("vllm.lora.request"),
        sampling=module("vllm.sampling_params").SamplingParams,
        envs=module("vllm.envs"),
        sha256=module("vllm.utils.hashing").sha256,
        dtype=module("torch").bfloat16,
        scheduler=module("vllm.v1.core.sched.scheduler") if scheduler else None,
        outputs=module("vllm.v1.outputs") if scheduler else None,
        touched=core_loader.touched if core_loader else [],
    )
    if core_loader:
        core_loader.seal()
    loaded.utils.init_none_hash(loaded.sha256)
    return loaded


def call(api: str, function: Callable[..., Any], *args: Any, **values: Any) -> Any:
    """Call ``function`` with those of ``values`` that it has, by the rules of ``ARGUMENTS``."""
    for row in _lacking(api, getattr(function, "__func__", function)):
        value = values.pop(row.name, row.neutral)
        if row.neutral is not ANY and value != row.neutral:
            raise HarnessFault(f"{api} of this tree has no argument {row.name!r}, which {value!r} needs")
    return function(*args, **values)


@functools.cache
def _lacking(api: str, function: Callable[..., Any]) -> tuple[Argument, ...]:
    """The rows of ``ARGUMENTS`` that ``function`` does not have."""
    has = inspect.signature(function).parameters
    return tuple(row for row in ARGUMENTS if row.api == api and row.name not in has)


def kv_cache_config(vllm: LoadedVllm, config: CacheConfig) -> Any:
    """The ``KVCacheConfig`` of a config."""
    interface = vllm.interface
    groups = [
        interface.KVCacheGroupSpec([f"layer.{i}"], _spec(vllm, group))
        for i, group in enumerate(config.groups)
    ]
    return call(
        "KVCacheConfig",
        interface.KVCacheConfig,
        num_blocks=config.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=None if _retention_by_variable(vllm) else config.retention,
    )


def _spec(vllm: LoadedVllm, group: Group) -> Any:
    """One head of size 1: page sizes in bytes play no part at this height."""
    interface = vllm.interface
    shape = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": vllm.dtype}
    if group.kind == "full":
        return interface.FullAttentionSpec(**shape)
    if group.kind == "chunked_local":
        return interface.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.chunk)
    return call(
        "SlidingWindowSpec",
        interface.SlidingWindowSpec,
        **shape,
        sliding_window=group.window,
        extra_retained_tokens=group.extra_retained_tokens,
    )


def _retention_by_variable(vllm: LoadedVllm) -> bool:
    field = "prefix_cache_retention_interval"
    return hasattr(vllm.envs, RETENTION_VARIABLE) and (
        field not in inspect.signature(vllm.interface.KVCacheConfig).parameters
    )


@contextmanager
def building(vllm: LoadedVllm, config: CacheConfig) -> Iterator[None]:
    """While vLLM builds its manager: retention where it is a variable, its refusals as BadInput."""
    if _retention_by_variable(vllm) and config.retention is not None:
        os.environ[RETENTION_VARIABLE] = str(config.retention)
    try:
        yield
    except AssertionError as error:
        raise BadInput(f"vLLM refuses this config: {where(error)}") from error
    except ValueError as error:
        raise BadInput(f"vLLM refuses this config: {error}") from error
    finally:
        os.environ.pop(RETENTION_VARIABLE, None)


def build_manager(vllm: LoadedVllm, config: CacheConfig, *, record_events: bool) -> Any:
    """A ``KVCacheManager``; BadInput if vLLM refuses the config."""
    with building(vllm, config):
        return call(
            "KVCacheManager",
            vllm.manager.KVCacheManager,
            kv_cache_config=kv_cache_config(vllm, config),
            max_model_len=config.max_model_len,
            scheduler_block_size=config.scheduler_block_size,
            hash_block_size=config.key_block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_in_flight_tokens=config.max_num_batched_tokens,
            enable_caching=config.enable_prefix_caching,
            use_eagle=config.use_eagle,
            enable_kv_cache_events=record_events,
            watermark=config.watermark,
        )


def build_scheduler(vllm: LoadedVllm, config: CacheConfig, *, record_events: bool) -> Any:
    """A ``Scheduler`` with its ``KVCacheManager`` inside; BadInput if vLLM refuses the config,
    NotModelled with EAGLE, whose drafts a real scheduler would schedule.
    """
    if config.use_eagle:
        raise NotModelled("scheduler: with EAGLE vLLM schedules draft tokens, which are not modelled")
    init = vllm.scheduler.Scheduler.__init__
    one_size = "hash_block_size" not in inspect.signature(init).parameters
    with building(vllm, config):
        return call(
            "Scheduler",
            vllm.scheduler.Scheduler,
            vllm_config=_made_up(config, record_events),
            kv_cache_config=kv_cache_config(vllm, config),
            structured_output_manager=SimpleNamespace(
                should_advance=lambda *_, **__: False, accept_tokens=lambda *_: True
            ),
            block_size=config.key_block_size if one_size else config.scheduler_block_size,
            hash_block_size=config.key_block_size,
            mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda _: False),
        )


def _made_up(config: CacheConfig, record_events: bool) -> Any:
    """What a ``Scheduler`` reads of its ``VllmConfig``: a text model without drafts, connectors or
    parallelism, first come first served, one step at a time. A field that is not here is an
    AttributeError, so a harness fault.
    """
    budget = config.max_num_batched_tokens
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            policy="fcfs",
            max_num_seqs=config.max_num_seqs,
            max_num_active_seqs=None,
            max_num_batched_tokens=budget,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            enable_chunked_prefill=True,
            disable_chunked_mm_input=False,
            async_scheduling=False,
            scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
            watermark=config.watermark,
            prefill_schedule_interval=1,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=config.num_blocks,
            block_size=config.scheduler_block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            mamba_cache_mode="none",
            enable_mamba_fine_grained_prefix_cache=False,
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        model_config=SimpleNamespace(
            max_model_len=config.max_model_len,
            runner_type="generate",
            is_diffusion=False,
            is_encoder_decoder=False,
            supports_multimodal_inputs=False,
            enable_return_routed_experts=False,
            return_sampling_mask=False,
            uses_mrope=False,
            uses_xdrope=False,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_index=0,
        ),
        observability_config=SimpleNamespace(
            kv_cache_metrics=False,
            enable_mfu_metrics=False,
            enable_logging_iteration_details=False,
            per_request_spec_decode_metrics="none",
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=record_events, publisher="null"),
        aux_output_config=SimpleNamespace(enabled=False),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        is_encoder_only=False,
        is_mm_encoder_only=False,
        use_v2_model_runner=False,
        max_concurrent_batches=1,
        max_in_flight_tokens=budget,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
    )


def block_hasher(vllm: LoadedVllm, config: CacheConfig) -> Any:
    """What gives a vLLM ``Request`` its block hashes; None with caching off."""
    if not config.enable_prefix_caching:
        return None
    return vllm.utils.get_request_block_hasher(config.key_block_size, vllm.sha256)


def where(error: AssertionError) -> str:
    """The innermost frame of an assertion, as file:line and its source."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}: {frame.line}"


class _Sampled(list[int]):
    """Token ids as the list of most releases and, as far as asked for, the array of 0.11."""

    def tolist(self) -> list[int]:
        """A plain list."""
        return list(self)


def model_output(vllm: LoadedVllm, names: list[str], tokens: list[list[int]]) -> Any:
    """The ``ModelRunnerOutput`` of a forward pass: the tokens that each request got."""
    return vllm.outputs.ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[_Sampled(ids) for ids in tokens],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
