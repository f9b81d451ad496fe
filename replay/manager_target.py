"""``ManagerTarget`` and ``SchedulerTarget``: run traces on vLLM's real ``KVCacheManager``, or on its
real ``Scheduler`` with the manager inside, in a worker process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self, cast

from hitproof.model import Run, Trace, under
from hitproof.replay.lockstep import Conformance
from hitproof.replay.process import Worker
from hitproof.replay.store import Tree

BATCH = 20
"""Traces per call to the worker, so that its time limit is one for a batch."""


class ManagerTarget:
    """One tree, loaded once, for any number of traces.

    ``loader``: "core" executes the tree's core files on the standard library; "env" imports the whole
    vLLM that ``python`` has, with the tree's Python files in front of it. (The tree may be that
    vLLM's own: ``store.find`` accepts its site-packages folder.) ``record``: as ``ModelTarget``.
    """

    sees = frozenset({"hits", "calls", "state"})
    height: ClassVar[str] = "manager"

    def __init__(
        self,
        tree: Tree,
        loader: Literal["core", "env"] = "core",
        python: Path | None = None,
        *,
        timeout_s: float = 120,
        record: bool = True,
    ) -> None:
        self.tree = tree
        self.record = record
        self.name = f"{self.height} ({loader})"
        self.version = tree.version
        self._worker = Worker(
            "hitproof.replay.manager_worker",
            (str(tree.root), loader, self.height, self.name, self.version),
            name=f"{self.name} {self.version}",
            python=python or sys.executable,
            timeout_s=timeout_s,
        )

    def run(self, trace: Trace) -> Run:
        """Run one trace from an empty cache, under the rules of the tree's release."""
        return cast("Run", self._worker.call("run", under(trace, self.tree.semantics), self.record))

    def conform(self, traces: Sequence[Trace]) -> list[Conformance]:
        """Compare the model with the tree on each trace, call by call."""
        ready = [under(trace, self.tree.semantics) for trace in traces]
        found: list[Conformance] = []
        for start in range(0, len(ready), BATCH):
            found += self._worker.call("conform", ready[start : start + BATCH])
        return found

    def probe(self) -> dict[str, str]:
        """Which loader, Python and file of vLLM's manager the worker uses."""
        return cast("dict[str, str]", self._worker.call("probe"))

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SchedulerTarget(ManagerTarget):
    """The same, with vLLM's own ``Scheduler`` deciding who runs and for how many tokens.

    EAGLE is refused: a real scheduler would schedule draft tokens.
    """

    height = "scheduler"


HEIGHTS: dict[str, type[ManagerTarget]] = {"manager": ManagerTarget, "scheduler": SchedulerTarget}
