"""The model's manager and vLLM's own KVCacheManager side by side: one workload, one scheduler, one thread.

    python benchmarks/manager_speed.py [--rounds N] [--json FILE]

Four seats take turns, each sending its own prefix of 4,096 tokens and 8 fresh ones and generating 2.
Each row is measured in a process of its own that loads the release's core files; in it the model and
vLLM take turns, round by round, so that the machine's noise hits both. Snapshots and events are off.
Times are CPU time of the one thread, garbage collection off, of each side's fastest round; "times" is
the median over the rounds of vLLM's time divided by the model's.
Only the manager's calls count, not the scheduler between them, and of vLLM only the time inside its own
functions: translating token ids and block ids to and from the model's words is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hitproof.model import CacheConfig, Group, ModelManager, Scheduler, Trace, parse_op
from hitproof.replay import store
from hitproof.replay.adapter import load
from hitproof.replay.real_manager import RealManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from hitproof.model import Lookup, Manager, Request
    from hitproof.model.observation import Tables

PREFIX, FRESH, OUT, SEATS, REQUESTS = 4096, 8, 2, 4, 160
WINDOW = Group(kind="sliding_window", block_size=16, window=1024)
FULL = Group(kind="full", block_size=16)
CALLS = ("add", "append", "lookup", "allocate", "free")
RELEASES = ("0.32.0", "0.25.0")


@attrs.frozen(kw_only=True, slots=True)
class Row:
    """One configuration on one release."""

    release: str
    groups: tuple[Group, ...]
    num_blocks: int
    retention: int | None
    full_hits: bool

    def trace(self) -> Trace:
        """The workload."""
        ops = []
        for i in range(REQUESTS):
            ops += [f"submit r{i} s{i % SEATS}:{PREFIX} f{i}:{FRESH} out={OUT}", "drain"]
        config = CacheConfig(
            num_blocks=self.num_blocks,
            groups=self.groups,
            semantics=self.release,
            max_num_batched_tokens=2048,
            max_model_len=8192,
            retention_interval=self.retention,
        )
        return Trace(config=config, ops=tuple(map(parse_op, ops)))


ROWS = tuple(
    Row(release=release, groups=groups, num_blocks=blocks, retention=retention, full_hits=full)
    for release in RELEASES
    for groups, blocks, retention, full in (
        ((*[WINDOW] * 5, FULL), 10_000, 0, True),
        ((*[WINDOW] * 5, FULL), 2_000, None, False),
        ((*[WINDOW] * 5, FULL), 2_000, 0, False),
        ((FULL,), 10_000, None, True),
    )
)


class Clock:
    """Seconds per call name, and how often it was called."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*CALLS, "step"), 0.0)
        self.calls = dict.fromkeys((*CALLS, "step"), 0)
        self.inside = 0.0


class TimedReal(RealManager):
    """vLLM's manager, its own functions timed: every call into the tree goes through ``_guard``."""

    clock: Clock | None = None

    def _guard(self, function: Callable[..., Any], *args: Any, **values: Any) -> Any:
        start = time.thread_time()
        try:
            return super()._guard(function, *args, **values)
        finally:
            if self.clock is not None:
                self.clock.inside += time.thread_time() - start


class Timed:
    """A ``Manager`` that times the calls to ``inner``."""

    def __init__(self, inner: Manager, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self.translation = 0.0

    def _time(self, call: str, function: Callable[..., Any], *args: Any, **values: Any) -> Any:
        clock = self._clock
        clock.inside = 0.0
        start = time.thread_time()
        result = function(*args, **values)
        spent = time.thread_time() - start
        if isinstance(self._inner, TimedReal):
            self.translation += spent - clock.inside
            spent = clock.inside
        clock.seconds[call] += spent
        clock.calls[call] += 1
        return result

    def add(self, request: Request) -> tuple[int, ...]:
        """See ``Manager``."""
        keys: tuple[int, ...] = self._time("add", self._inner.add, request)
        return keys

    def append(self, request: Request) -> tuple[int, ...]:
        """See ``Manager``."""
        keys: tuple[int, ...] = self._time("append", self._inner.append, request)
        return keys

    def step(self) -> None:
        """See ``Manager``."""
        self._time("step", self._inner.step)

    def lookup(self, request: Request) -> Lookup:
        """See ``Manager``."""
        found: Lookup = self._time("lookup", self._inner.lookup, request)
        return found

    def allocate(
        self, request: Request, new_tokens: int, hit: Lookup | None, *, must_fit: bool, beside: bool
    ) -> Tables | None:
        """See ``Manager``."""
        blocks: Tables | None = self._time(
            "allocate", self._inner.allocate, request, new_tokens, hit, must_fit=must_fit, beside=beside
        )
        return blocks

    def free(self, request: Request) -> None:
        """See ``Manager``."""
        self._time("free", self._inner.free, request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@attrs.frozen(kw_only=True, slots=True)
class Measured:
    """One side in one round. ``seconds``: in the manager; ``run``: with the scheduler."""

    seconds: float
    run: float
    clock: Clock
    hits: tuple[int | None, ...]


def once(trace: Trace, manager: Manager) -> Measured:
    """Run the workload once from an empty cache."""
    clock = Clock()
    timed = Timed(manager, clock)
    if isinstance(manager, TimedReal):
        manager.clock = clock
    scheduler = Scheduler(trace, timed, record=False)
    gc.collect()
    gc.disable()
    start = time.thread_time()
    run = scheduler.run()
    spent = time.thread_time() - start - timed.translation
    gc.enable()
    assert not run.fault, run.fault
    return Measured(seconds=sum(clock.seconds.values()), run=spent, clock=clock, hits=run.hits)


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Both sides in this process, in turns, after one round that does not count."""
    vllm = load(store.add(row.release).root, "core")
    trace = row.trace()
    sides: dict[str, list[Measured]] = {"model": [], "vllm": []}
    for _ in range(rounds + 1):
        sides["model"].append(once(trace, ModelManager(trace.config, record_events=False)))
        sides["vllm"].append(once(trace, TimedReal(vllm, trace.config, record_events=False)))
    first = sides["vllm"][0]
    for measured in (*sides["model"], *sides["vllm"]):
        assert measured.hits == first.hits, "the model and vLLM differ in hits"
        assert measured.clock.calls == first.clock.calls, "the model and vLLM differ in manager calls"
    warm = first.hits[SEATS:]
    assert set(warm) == {PREFIX if row.full_hits else 0}, f"not the expected hits: {set(warm)}"
    out: dict[str, Any] = {
        "release": row.release,
        "groups": len(row.groups),
        "num_blocks": row.num_blocks,
        "retention": row.retention,
        "requests": REQUESTS,
        "calls": sum(first.clock.calls.values()),
        "hits": "full" if row.full_hits else "0",
    }
    for side, measured_rounds in sides.items():
        best = min(measured_rounds[1:], key=lambda measured: measured.seconds)
        seconds, calls = best.clock.seconds, best.clock.calls
        out[side] = {
            "requests_per_s": REQUESTS / best.seconds,
            "with_scheduler_requests_per_s": REQUESTS / best.run,
            "mean_us": {call: 1e6 * seconds[call] / calls[call] for call in CALLS},
        }
    out["ratio"] = statistics.median(
        real.seconds / model.seconds for model, real in zip(*sides.values(), strict=True)
    )
    return out


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal; microseconds per call as model / vLLM."""
    shown = Table(title="Requests per second, and mean microseconds per call (model / vLLM)")
    for name in ("release", "groups", "blocks", "retention", "hits", "model", "vLLM", "times", *CALLS):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        model, real = row["model"], row["vllm"]
        shown.add_row(
            row["release"],
            str(row["groups"]),
            f"{row['num_blocks']:,}",
            "dense" if row["retention"] is None else str(row["retention"]),
            row["hits"],
            f"{model['requests_per_s']:,.0f}",
            f"{real['requests_per_s']:,.0f}",
            f"{row['ratio']:.1f}",
            *(f"{model['mean_us'][call]:.0f} / {real['mean_us'][call]:.0f}" for call in CALLS),
        )
    return shown


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count (default 20)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    console = Console()
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("rows", total=len(ROWS))
        for row in ROWS:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                rows.append(pool.submit(measure, row, options.rounds).result())
            progress.advance(task)
    console.print(table(rows))
    least = min(rows, key=lambda row: row["ratio"])
    console.print(
        f"Hits and the number of manager calls equal in all {len(rows)} rows. "
        f"The model is {least['ratio']:.1f} times as fast as vLLM's manager, or more."
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
