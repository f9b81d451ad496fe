"""How fast the search finds public reports again on the release that had them, against random traces.

    python benchmarks/history.py [--seeds N] [--budget S] [--case REPORT] [--json FILE]

Each hunt drives the bad release's own KVCacheManager, knows the promise and the release that keeps it,
and draws configs from the usual range. It counts when the shrunk trace breaks the promise on the bad
release and not on the good one, each run twice on its own code. Random traces (those of the agreement
test) get the same budget and the same demand, without shrinking. One process for each search.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hitproof.fuzz.hunt import Plan, Real, Unlike, hunt
from hitproof.fuzz.random_traces import random_trace
from hitproof.model import BadInput, Trace, under
from hitproof.properties.registry import BY_ID
from hitproof.properties.story import Story
from hitproof.replay import store
from hitproof.replay.confirm import sight
from hitproof.replay.manager_target import ManagerTarget


@attrs.frozen(kw_only=True, slots=True)
class Past:
    """A public report: the release that had it, the one that does not, and the promise."""

    report: str
    bad: str
    good: str
    promise: str
    retention: Any = "keep"


HISTORY = (
    Past(report="vllm#32802", bad="0.14.1", good="0.15.1", promise="hit-survives-half-pool"),
    Past(report="vllm#39734", bad="0.19.1", good="0.20.2", promise="fits-alone-runs"),
    Past(report="vllm#44082", bad="0.22.1", good="0.23.0", promise="resend-hits"),
    Past(report="vllm#43447", bad="0.22.1", good="0.23.0", promise="hit-survives-half-pool", retention=0),
    Past(report="vllm#48435", bad="0.28.0", good="0.29.0", promise="hit-survives-half-pool"),
    Past(report="vllm#49125", bad="0.26.0", good="0.25.1", promise="events-self-consistent"),
)


def searched(past: Past, seed: int, budget_s: float) -> dict[str, Any]:
    """One hunt: seconds and traces to the find, its size, and whether the boundary is the public one."""
    bad, good = store.add(past.bad), store.add(past.good)
    plan = Plan(
        semantics=(past.bad,),
        properties=(past.promise,),
        budget_s=budget_s,
        seed=seed,
        workers=1,
        target="manager",
        unlike=Unlike(release=past.good, retention=past.retention, real=Real(tree=good)),
        trees={past.bad: bad},
    )
    report = hunt(plan)
    row: dict[str, Any] = {"found": bool(report.finds)}
    row["traces"] = max(judged.runs for judged in report.judgements[past.bad])
    if report.finds:
        find = report.finds[0]
        trace = find.counterexample.trace
        row |= {
            "seconds": find.seconds,
            "known": find.known.report if find.known else None,
            "ops": len(trace.ops),
            "blocks": trace.config.num_blocks,
            "boundary": separates(past, trace),
        }
    return row


def separates(past: Past, trace: Trace) -> bool:
    """Whether each of the two releases' own code says, twice, what the public report says of it."""
    with ManagerTarget(store.find(past.bad)) as bad, ManagerTarget(store.find(past.good)) as good:
        there = under(trace, past.good, past.retention)
        verdicts = sight(trace, past.promise, bad).verdict, sight(there, past.promise, good).verdict
    return verdicts == ("reproduced", "not reproduced")


def random_search(past: Past, seed: int, budget_s: float) -> dict[str, Any]:
    """The same demand on plain random traces of one seed range."""
    prop = BY_ID[past.promise]
    started = time.monotonic()
    with ManagerTarget(store.find(past.bad)) as bad, ManagerTarget(store.find(past.good)) as good:
        for n in range(10**9):
            elapsed = time.monotonic() - started
            if elapsed > budget_s:
                return {"found": False, "traces": n}
            trace = random_trace(seed * 1_000_003 + n, past.bad)
            if prop.check(Story(bad.run(trace), bad.run)).finding is None:
                continue
            try:
                there = under(trace, past.good, past.retention)
            except BadInput:
                continue
            kept = prop.check(Story(good.run(there), good.run))
            if kept.finding is None and kept.evidence:
                return {"found": True, "traces": n + 1, "seconds": time.monotonic() - started}
    raise AssertionError


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="seeds per report (default 20)")
    parser.add_argument("--budget", type=float, default=60, help="seconds per search (default 60)")
    parser.add_argument("--case", action="append", help="one report only, such as vllm#32802")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, as they come")
    options = parser.parse_args()
    chosen = [past for past in HISTORY if not options.case or past.report in options.case]
    console = Console()
    rows: list[dict[str, Any]] = []
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("searches", total=len(chosen) * options.seeds * 2)
            for seed in range(options.seeds):
                for past in chosen:
                    for how, search in (("search", searched), ("random", random_search)):
                        row = search(past, seed, options.budget)
                        rows.append({"report": past.report, "how": how, "seed": seed, **row})
                        progress.advance(task)
                        if options.json:
                            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        console.print("interrupted: what was measured before")
    console.print(table(chosen, rows))


def table(chosen: list[Past], rows: list[dict[str, Any]]) -> Table:
    """Found of all seeds, then medians over those found."""
    shown = Table(title="Public reports found again")
    for name in (
        "report",
        "bad",
        "good",
        "promise",
        "how",
        "found",
        "seconds",
        "traces",
        "boundary",
        "blocks",
    ):
        shown.add_column(name)
    for past in chosen:
        for how in ("search", "random"):
            mine = [r for r in rows if r["report"] == past.report and r["how"] == how]
            hits = [r for r in mine if r["found"]]
            seconds = f"{statistics.median(r['seconds'] for r in hits):.0f}" if hits else "-"
            traces = f"{statistics.median(r['traces'] for r in hits):.0f}" if hits else "-"
            sized = how == "search" and hits
            boundary = f"{sum(r['boundary'] for r in hits)}/{len(hits)}" if sized else "-"
            blocks = f"{statistics.median(r['blocks'] for r in hits):.0f}" if sized else "-"
            found = f"{len(hits)}/{len(mine)}"
            shown.add_row(
                past.report, past.bad, past.good, past.promise, how, found, seconds, traces, boundary, blocks
            )
    return shown


if __name__ == "__main__":
    main()
