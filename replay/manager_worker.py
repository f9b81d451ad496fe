"""The worker module that drives vLLM's manager, or its scheduler: see ``manager_target.py``."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hitproof.model import ModelTarget, Run, Scheduler, Trace
from hitproof.replay.adapter import load
from hitproof.replay.lockstep import Conformance, compare, conform
from hitproof.replay.real_manager import RealManager
from hitproof.replay.real_scheduler import RealScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def handlers(root: str, loader: str, height: str, name: str, version: str) -> dict[str, Callable[..., Any]]:
    """Load vLLM once; ``root`` is the folder that contains ``vllm/``; ``height``: "manager", called
    by the model's scheduler, or "scheduler".
    """
    vllm = load(Path(root), loader, scheduler=height == "scheduler")

    def run(trace: Trace, record: bool) -> Run:
        if height == "scheduler":
            return RealScheduler(vllm, trace, record=record).run(name, version)
        manager = RealManager(vllm, trace.config, record_events=record)
        return Scheduler(trace, manager, record=record).run(name, version)

    def conform_one(trace: Trace) -> Conformance:
        if height == "scheduler":
            return compare(ModelTarget().run(trace), run(trace, True))
        return conform(trace, RealManager(vllm, trace.config))

    def conform_all(traces: Sequence[Trace]) -> list[Conformance]:
        return [conform_one(trace) for trace in traces]

    def probe() -> dict[str, str]:
        return {
            "loader": loader,
            "version": version,
            "python": platform.python_version(),
            "manager": str(vllm.manager.__file__),
        }

    return {"run": run, "conform": conform_all, "probe": probe}
