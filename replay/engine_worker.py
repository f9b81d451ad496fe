"""vLLM's engine in a worker process: the real ``LLM`` with the tiny model, one step at a time.

Everything is set by public arguments; vLLM's own objects are only read, to check that the engine is
the one that the trace asks for.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from hitproof.model import (
    BadInput,
    CacheConfig,
    Group,
    HarnessFault,
    Identity,
    ManagerFault,
    RequestResult,
    Trace,
)
from hitproof.model.ops import Abort, Drain, Op, Reset, Step, Submit
from hitproof.replay.content import TOP, Content, Heard, compare
from hitproof.replay.tiny_model import DTYPE, MOST_ADAPTERS, block_size, model_config
from hitproof.replay.token_ids import RequestTokens, tokens_of

RETENTION = "prefix_cache_retention_interval"
"""The argument from 0.29; before, it is an environment variable."""

RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"

ADAPTERS = {"enable_lora": True, "max_loras": MOST_ADAPTERS}
"""Arguments for traces that name LoRA adapters: requests of more at once would wait for one another."""

_KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
}


def handlers(
    config: str, model: str, device: str, adapters: bool, extra: str
) -> dict[str, Callable[..., Any]]:
    """Start the engine that ``config`` (JSON) asks for, with ``extra`` (JSON) arguments of ``LLM``.

    ``run`` runs a trace of that config on it, ``content`` compares its answers with cold ones. ``adapters``:
    its traces name LoRA adapters.
    """
    further = (ADAPTERS if adapters else {}) | json.loads(extra)
    engine = Engine(CacheConfig.from_json(json.loads(config)), model, device, further)
    return {
        "run": lambda text: engine.run(Trace.loads(text)),
        "content": lambda text, bug: engine.content(Trace.loads(text), bug),
    }


def engine_arguments(config: CacheConfig, model: str, device: str, release: str) -> dict[str, Any]:
    """The arguments of that release's ``LLM`` that make one engine step one step of the trace."""
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "dtype": DTYPE,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "async_scheduling": False,
        "enable_chunked_prefill": True,
        "disable_hybrid_kv_cache_manager": False,
        "num_gpu_blocks_override": config.num_blocks,
        "block_size": block_size(config, release),
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "enable_prefix_caching": config.enable_prefix_caching,
        "scheduler_reserve_full_isl": config.scheduler_reserve_full_isl,
        RETENTION: config.retention,
    }
    if config.watermark:
        arguments["watermark"] = config.watermark
    if device == "cuda":
        arguments["gpu_memory_utilization"] = 0.2
    return arguments


class Engine:
    """One engine. Each trace runs from an empty cache."""

    def __init__(self, config: CacheConfig, model: str, device: str, extra: dict[str, Any]) -> None:
        self.config = config
        try:
            from vllm import LLM, SamplingParams
            from vllm.engine.arg_utils import EngineArgs
            from vllm.lora.request import LoRARequest
            from vllm.platforms import current_platform
        except Exception as error:
            raise BadInput(
                f"engine: this interpreter cannot import vLLM: {error}; `hitproof vllm env` makes one that can "
                "(torchvision, torchaudio and torchcodec are not needed: remove one that does not match torch)"
            ) from None
        if current_platform.device_type != device:
            raise BadInput(
                f"--device {device}: this interpreter's vLLM runs on {current_platform.device_type or 'no device here'}; "
                "give one that runs there with --vllm-python"
            )
        self._sampling, self._lora_request = SamplingParams, LoRARequest
        self._adapters: dict[tuple[str, str], Any] = {}
        self._model = Path(model)
        arguments = engine_arguments(config, model, device, config.semantics) | extra
        if RETENTION not in {field.name for field in dataclasses.fields(EngineArgs)}:
            retention = arguments.pop(RETENTION)
            if retention is not None:
                os.environ[RETENTION_VARIABLE] = str(retention)
        try:
            self._llm = LLM(**arguments)
        except ValueError as error:
            raise BadInput(f"config: the engine refuses it: {error}") from None
        self._engine: Any = self._llm.llm_engine
        self._results: dict[str, RequestResult] = {}
        self._heard: dict[str, Heard] = {}
        self._logprobs: int | None = None
        self._check()

    def _check(self) -> None:
        """Compare what the engine made of its arguments with what the trace asks for."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        made = scheduler.kv_cache_config
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        settings = scheduler.scheduler_config
        groups = ", ".join(_group(group.kv_cache_spec) for group in made.kv_cache_groups)
        for what, asked, got in (
            ("groups", ", ".join(group.label for group in self.config.groups), groups),
            ("num_blocks", self.config.num_blocks, made.num_blocks),
            ("num_blocks beside the null block", self.config.num_blocks - 1, pool.get_num_free_blocks()),
            ("max_num_batched_tokens", self.config.max_num_batched_tokens, settings.max_num_batched_tokens),
            ("max_num_seqs", self.config.max_num_seqs, settings.max_num_seqs),
            ("max_model_len", self.config.max_model_len, scheduler.max_model_len),
            ("enable_prefix_caching", self.config.enable_prefix_caching, pool.enable_caching),
            ("asynchronous scheduling", False, bool(settings.async_scheduling)),
            (
                "retention_interval",
                self.config.retention,
                getattr(manager.coordinator, "retention_interval", None),
            ),
            ("watermark blocks", self.config.watermark_blocks, getattr(manager, "watermark_blocks", 0)),
            *self._keys(pool),
            ("policy", "fcfs", settings.policy),
        ):
            if asked != got:
                raise BadInput(f"{what}: the engine has {got}; the trace asks for {asked}")

    def _keys(self, pool: Any) -> list[tuple[str, object, object]]:
        """Without caching there are no keys, and vLLM sets their size otherwise."""
        if not self.config.enable_prefix_caching:
            return []
        return [("hash block size", self.config.key_block_size, pool.hash_block_size)]

    def run(self, trace: Trace, overwrite: bool = False) -> tuple[tuple[RequestResult, ...], int | None, str]:
        """The requests' results, the op at which a drain was stuck, and what vLLM raised, if anything."""
        self._empty()
        self._results = {}
        self._heard = {}
        self._tokens = tokens_of(trace)
        self._stuck: int | None = None
        fault = ""
        for i, op in enumerate(trace.ops):
            if overwrite and isinstance(op, Submit):
                self._overwrite()
            try:
                self._do(i, op)
            except AssertionError as error:
                if not _of_the_manager(error):
                    raise
                fault = str(ManagerFault("assertion", str(error)))
            except ValueError as error:
                if "free blocks" not in str(error):
                    raise
                fault = str(ManagerFault("pool exhausted", str(error)))
            if fault:
                break
        return tuple(self._results.values()), self._stuck, fault

    def content(self, trace: Trace, bug: str) -> Content:
        """Compare each finished request that had a hit with the same request on an empty cache.

        ``bug``: a seeded one, which the check must find (``EngineTarget.content``).
        """
        self._logprobs = TOP
        try:
            results, _, _ = self.run(trace, overwrite=bug == "noise")
            warm = self._heard
            submits = {op.request: op for op in trace.ops if isinstance(op, Submit)}
            return Content(
                answers=tuple(
                    compare(result, warm[result.id], self._cold(submits[result.id], bug))
                    for result in results
                    if result.finished and result.hit_tokens
                )
            )
        finally:
            self._logprobs = None

    def _cold(self, op: Submit, bug: str) -> Heard:
        """What the engine says to the request alone, with nothing cached."""
        if bug == "no adapter":
            op = attrs.evolve(op, identity=Identity(salt=op.identity.salt))
        self._empty()
        self._results, self._heard = {}, {}
        self._add(op, self._tokens[op.request])
        while self._engine.has_unfinished_requests():
            self._step()
        if self._results[op.request].hit_tokens != 0:
            raise HarnessFault(f"engine: {op.request}: a hit on an empty cache")
        return self._heard[op.request]

    def _overwrite(self) -> None:
        runner = self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        for cache in runner.kv_caches:
            cache.uniform_(-1, 1)

    def _do(self, i: int, op: Op) -> None:
        match op:
            case Submit():
                self._add(op, self._tokens[op.request])
            case Step(count=count):
                for _ in range(count):
                    self._step()
            case Drain():
                self._drain(i)
            case Abort(request=name):
                result = self._results[name]
                if not result.finished and not result.aborted:
                    self._engine.abort_request([name])
                    result.aborted = True
            case Reset():
                self._engine.reset_prefix_cache()

    def _add(self, op: Submit, tokens: RequestTokens) -> None:
        self._results[op.request] = RequestResult(id=op.request, prompt_tokens=len(tokens.prompt))
        prompt: dict[str, Any] = {"prompt_token_ids": list(tokens.prompt)}
        if op.identity.salt is not None:
            prompt["cache_salt"] = op.identity.salt
        parameters = self._sampling(
            max_tokens=op.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            allowed_token_ids=[tokens.output_token],
            logprobs=self._logprobs,
        )
        self._engine.add_request(op.request, prompt, parameters, lora_request=self._adapter(op))

    def _adapter(self, op: Submit) -> Any:
        """The adapter that a request names, made when it is first named: one for each name and path."""
        name, path = op.identity.lora, op.identity.lora_path
        if name is None or path is None:
            return None
        if (name, path) not in self._adapters:
            from hitproof.replay.tiny_layers import write_adapter

            number = len(self._adapters) + 1
            place = self._model / f"adapter{number}"
            shape = model_config(self.config)
            write_adapter(place, f"{name}@{path}", shape["num_hidden_layers"], shape["hidden_size"])
            self._adapters[name, path] = self._lora_request(name, number, str(place))
        return self._adapters[name, path]

    def _step(self) -> bool:
        """One step; True if it gave any request a token."""
        outputs = self._engine.step()
        for output in outputs:
            result = self._results[output.request_id]
            result.hit_tokens = output.num_cached_tokens
            result.finished = output.finished
            said = output.outputs[0]
            asked = self._tokens[output.request_id].output
            if tuple(said.token_ids) != asked[: len(said.token_ids)]:
                raise HarnessFault(f"engine: {output.request_id} generated {said.token_ids}, not {asked}")
            if said.logprobs is not None:
                self._heard[output.request_id] = [
                    {token: heard.logprob for token, heard in at.items()} for at in said.logprobs
                ]
        return bool(outputs)

    def _drain(self, i: int) -> None:
        """Step until idle. Stuck: no new token in more steps than prefilling everything ten times takes."""
        idle_steps = 0
        while self._engine.has_unfinished_requests():
            idle_steps = 0 if self._step() else idle_steps + 1
            lengths = [r.prompt_tokens for r in self._results.values() if not r.finished and not r.aborted]
            if idle_steps > 10 * sum(2 + n // self.config.max_num_batched_tokens for n in lengths):
                self._stuck = i
                return

    def _empty(self) -> None:
        """Drop what an earlier trace left behind."""
        if self._engine.has_unfinished_requests():
            left = [r.id for r in self._results.values() if not r.finished and not r.aborted]
            self._engine.abort_request(left)
        self._engine.step()
        if not self._engine.reset_prefix_cache():
            raise HarnessFault("engine: the prefix cache cannot be emptied between traces")


def _of_the_manager(error: BaseException) -> bool:
    """Whether vLLM's scheduler or cache manager raised it: an observation. Kernels' complaints are not."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and "/v1/core/" in at.tb_frame.f_code.co_filename.replace(os.sep, "/")


def _group(spec: Any) -> str:
    """A group's label, in the trace's words; the spec's own name if the trace has none for it."""
    kind = _KINDS.get(type(spec).__name__)
    if kind is None:
        return f"{type(spec).__name__}:{spec.block_size}"
    window = spec.sliding_window if kind == "sliding_window" else None
    chunk = spec.attention_chunk_size if kind == "chunked_local" else None
    return Group(kind=kind, block_size=spec.block_size, window=window, chunk=chunk).label
