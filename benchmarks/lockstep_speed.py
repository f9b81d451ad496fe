"""How many small random traces a second one core compares with vLLM's manager, call by call.

    python benchmarks/lockstep_speed.py [--traces N] [--rounds N] [--json FILE]

The traces are those of the agreement test (``hitproof.fuzz.random_traces``), seeds 0 to N - 1. After
every call results, events and the whole state of both managers are read and compared. Times are CPU
time of the one thread, of the fastest round.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hitproof.fuzz.random_traces import random_trace
from hitproof.replay import store
from hitproof.replay.adapter import load
from hitproof.replay.lockstep import conform
from hitproof.replay.real_manager import RealManager

RELEASES = ("0.32.0", "0.25.0")


def measure(release: str, traces: int, rounds: int) -> dict[str, Any]:
    """One release, in this process."""
    vllm = load(store.add(release).root, "core")
    ready = [random_trace(seed, release) for seed in range(traces)]
    best, calls = float("inf"), 0
    for _ in range(rounds):
        start = time.thread_time()
        found = [conform(trace, RealManager(vllm, trace.config)) for trace in ready]
        best = min(best, time.thread_time() - start)
        assert not any(result.divergence for result in found), "the model and vLLM differ"
        calls = sum(result.calls for result in found)
    return {
        "release": release,
        "traces": traces,
        "calls": calls,
        "traces_per_s": traces / best,
        "calls_per_s": calls / best,
    }


def main() -> None:
    """Measure every release and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=int, default=200, help="traces (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    console = Console()
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("releases", total=len(RELEASES))
        for release in RELEASES:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                rows.append(pool.submit(measure, release, options.traces, options.rounds).result())
            progress.advance(task)
    shown = Table(title="Lockstep, one core")
    for name in ("release", "traces", "calls", "traces/s", "calls/s"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row["release"],
            str(row["traces"]),
            f"{row['calls']:,}",
            f"{row['traces_per_s']:,.0f}",
            f"{row['calls_per_s']:,.0f}",
        )
    console.print(shown)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
