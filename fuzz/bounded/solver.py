"""Asking Z3: every answer, time-outs, memory limits and ``unknown`` included, is a ``Reply``."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import z3

SHOWN = ("conflicts", "decisions", "propagations", "arith-pivots", "rlimit count", "memory")
"""The statistics that are kept, by Z3's names; "memory" is in MB."""


@attrs.frozen(kw_only=True, slots=True)
class Limits:
    """What one question may cost: seconds until ``deadline`` (``time.monotonic``), MB, and the seed."""

    deadline: float
    memory_mb: int = 4000
    seed: int = 0

    @classmethod
    def of(cls, seconds: float, *, memory_mb: int = 4000, seed: int = 0) -> Limits:
        """Limits that start to run now."""
        return cls(deadline=time.monotonic() + seconds, memory_mb=memory_mb, seed=seed)

    @property
    def left_ms(self) -> int:
        """Milliseconds left; at least 1, since 0 means no limit to Z3."""
        return max(1, int((self.deadline - time.monotonic()) * 1000))

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.deadline


@attrs.frozen(kw_only=True, slots=True)
class Reply:
    """Z3's answer. ``reason``: why it is unknown. ``model``: the assignment of a sat answer."""

    status: Literal["sat", "unsat", "unknown"]
    reason: str = ""
    model: Any = None
    seconds: float = 0.0
    statistics: dict[str, float] = attrs.Factory(dict)

    def value(self, term: Any) -> Any:
        """What ``term`` is in the model, as a Python value."""
        if not z3.is_expr(term):
            return term
        found = self.model.eval(term, model_completion=True)
        return z3.is_true(found) if z3.is_bool(found) else found.as_long()


def ask(formulas: Sequence[Any], limits: Limits, logic: str | None = "QF_LIA") -> Reply:
    """Whether all ``formulas`` can hold together; ``logic`` as SMT-LIB names it. KeyboardInterrupt
    passes through.
    """
    solver = z3.Solver() if logic is None else z3.SolverFor(logic)
    solver.set("random_seed", limits.seed)
    solver.set("max_memory", limits.memory_mb)
    solver.add([f if z3.is_expr(f) else z3.BoolVal(bool(f)) for f in formulas])
    return run(solver.check, solver, limits)


def run(check: Callable[[], Any], solver: Any, limits: Limits) -> Reply:
    """``check`` within ``limits``; ``solver`` is asked for the model, reason and statistics."""
    start = time.monotonic()
    if limits.over:
        return Reply(status="unknown", reason="no time left")
    solver.set("timeout", limits.left_ms)
    try:
        found = _interruptible(check, solver)
    except z3.Z3Exception as error:
        return Reply(status="unknown", reason=str(error), seconds=time.monotonic() - start)
    status: Literal["sat", "unsat", "unknown"] = (
        "sat" if found == z3.sat else "unsat" if found == z3.unsat else "unknown"
    )
    reason = solver.reason_unknown() if status == "unknown" else ""
    return Reply(
        status=status,
        reason=reason,
        model=solver.model() if status == "sat" and isinstance(solver, z3.Solver) else None,
        seconds=time.monotonic() - start,
        statistics=_statistics(solver),
    )


_stopped = threading.Event()


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, Ctrl-C ends the question under way, or the next one, with KeyboardInterrupt.

    Z3 would take the signal for itself, and loses one that comes as a check ends; Python loses one that
    comes while a z3 term is deleted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: _stopped.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _stopped.clear()


def _interruptible(check: Callable[[], Any], solver: Any) -> Any:
    """``check`` in a thread, so that this one can watch for Ctrl-C."""
    solver.set("ctrl_c", False)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(check)
        while not wait((asked,), timeout=0.05).done:
            if _stopped.is_set():
                z3.main_ctx().interrupt()
    if _stopped.is_set():
        raise KeyboardInterrupt
    return asked.result()


def _statistics(solver: Any) -> dict[str, float]:
    seen = solver.statistics()
    found = {key: seen.get_key_value(key) for key in seen.keys()}  # noqa: SIM118
    return {key: float(found[key]) for key in SHOWN if key in found}
