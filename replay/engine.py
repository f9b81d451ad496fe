"""``EngineTarget``: runs traces on vLLM's real engine, with a tiny model of random weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from hitproof.model import CacheConfig, HarnessFault, Run, Submit, Trace, under
from hitproof.model.semantics import parse_release
from hitproof.replay import env, tiny_model
from hitproof.replay.content import Content
from hitproof.replay.process import Worker

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
"""The worker's own environment variables: the engine in one process, one thread, no network."""


def environment(release: str) -> dict[str, str]:
    """``ENVIRONMENT`` for one release: 0.20 fails on an executor that binds no core, so it is given one."""
    if parse_release(release)[:2] != (0, 20):
        return dict(ENVIRONMENT)
    return ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}


class EngineTarget:
    """Runs traces on the engine of the vLLM that ``python`` has.

    The engine is started for the first trace of a config and serves the following traces of the same
    config; another config, or the first adapter, ends it and starts its own. ``device``: "cpu", or "cuda" with an
    interpreter that has the CUDA build. ``timeout_s`` bounds a start and a run. ``version``: of a vLLM
    that is no package there. ``arguments`` and ``variables`` are further arguments of ``LLM`` and environment variables of the worker.
    """

    sees = frozenset({"hits"})

    def __init__(
        self,
        python: Path,
        *,
        device: str = "cpu",
        timeout_s: float = 300,
        version: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = "engine" if device == "cpu" else f"engine ({device})"
        self.python = python
        self.device = device
        self.timeout_s = timeout_s
        self.version = version or env.release_of(python)
        self._arguments = json.dumps(dict(arguments or {}))
        self._variables = environment(self.version) | dict(variables or {})
        self._serves: tuple[CacheConfig, bool] | None = None
        self._worker: Worker | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, trace: Trace) -> Run:
        """Run one trace from an empty cache, under the rules of the engine's release."""
        trace = under(trace, self.version)
        worker = self._serving(trace)
        try:
            requests, stuck, fault = worker.call("run", trace.dumps())
        except HarnessFault:
            self.close()
            raise
        if fault:
            self.close()
        return Run(
            trace=trace, target=self.name, version=self.version, requests=requests, stuck=stuck, fault=fault
        )

    def content(self, trace: Trace, *, bug: str = "") -> Content:
        """Compare the answers of requests with hits with cold ones. ``bug`` seeds one that the check must
        find: "noise" over the KV cache before each request, or cold runs with "no adapter".
        """
        trace = under(trace, self.version)
        try:
            return cast("Content", self._serving(trace).call("content", trace.dumps(), bug))
        except HarnessFault:
            self.close()
            raise

    def _serving(self, trace: Trace) -> Worker:
        """The worker whose engine has the trace's config, and adapters if the trace names some."""
        adapters = any(isinstance(op, Submit) and op.identity.lora is not None for op in trace.ops)
        tiny_model.check(trace, self.device)
        if self._worker is not None and self._serves in ((trace.config, adapters), (trace.config, True)):
            return self._worker
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="hitproof-model-")
        place = Path(self._folder.name)
        try:
            tiny_model.write(trace.config, place)
            self._worker = Worker(
                "hitproof.replay.engine_worker",
                (json.dumps(trace.config.to_json()), str(place), self.device, adapters, self._arguments),
                name=f"vLLM {self.version} engine",
                python=self.python,
                env=self._variables | tiny_model.variables(place, {**os.environ, **self._variables}),
                timeout_s=self.timeout_s,
            )
        except BaseException:
            self.close()
            raise
        self._serves = (trace.config, adapters)
        return self._worker

    def close(self) -> None:
        """End the engine, if one runs."""
        if self._worker is not None:
            self._worker.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._worker = self._serves = self._folder = None

    def __enter__(self) -> EngineTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()
