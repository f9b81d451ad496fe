"""The worker module that drives vLLM's ``KVCacheManager``: see ``manager_target.py``."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hitproof.model import Run, Scheduler, Trace
from hitproof.replay.adapter import RealManager, load
from hitproof.replay.lockstep import Conformance, conform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def handlers(root: str, loader: str, name: str, version: str) -> dict[str, Callable[..., Any]]:
    """Load vLLM once; ``root`` is the folder that contains ``vllm/``."""
    vllm = load(Path(root), loader)

    def run(trace: Trace, record: bool) -> Run:
        manager = RealManager(vllm, trace.config, record_events=record)
        return Scheduler(trace, manager, record=record).run(name, version)

    def conform_all(traces: Sequence[Trace]) -> list[Conformance]:
        return [conform(trace, RealManager(vllm, trace.config)) for trace in traces]

    def probe() -> dict[str, str]:
        return {
            "loader": loader,
            "version": version,
            "python": platform.python_version(),
            "manager": str(vllm.manager.__file__),
        }

    return {"run": run, "conform": conform_all, "probe": probe}
