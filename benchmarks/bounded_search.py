"""Hypothesis against Z3: time to the first find, and its size after shrinking.

    python benchmarks/bounded_search.py [--seeds N] [--budget SECONDS] [--json FILE]

The same promises on the same release. Hypothesis draws from the hunt's range for hybrid configs, in
one thread, and the reducer shrinks what it finds; Z3 is asked bound by bound and makes its
counterexample as small as it can be within its class. Both are judged by the same property on the
same model. "not found" is after the whole budget.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hitproof.fuzz.bounded.questions import Question, answer
from hitproof.fuzz.bounded.solver import Limits
from hitproof.fuzz.draw import Range
from hitproof.fuzz.hunt import shrink
from hitproof.fuzz.search import Slice, search
from hitproof.model import Submit, Trace

ASKED: tuple[tuple[str, str, Any], ...] = (
    ("hit-survives-half-pool", "0.25.0", None),
    ("hit-survives-half-pool", "0.33.0", 0),
    ("hit-survives-fit", "0.25.0", None),
    ("hit-survives-fit", "0.33.0", 0),
    ("mask-covers-lookup", "0.22.1", None),
    ("mask-covers-lookup", "0.33.0", "any"),
)


def size(trace: Trace) -> str:
    """Requests and blocks."""
    return f"{sum(isinstance(op, Submit) for op in trace.ops)} requests, {trace.config.num_blocks} blocks"


def by_hypothesis(name: str, release: str, seed: int, budget: float) -> dict[str, Any]:
    """Search, then shrink."""
    start = time.monotonic()
    wide = Range(semantics=release, hybrid=name.startswith("hit-survives"), odd=name == "mask-covers-lookup")
    found = search(Slice(wide=wide, properties=(name,), seed=seed, seconds=budget))
    first = time.monotonic() - start
    if found.trace is None:
        return {"first": None, "total": first, "size": "not found"}
    small = shrink(found.trace, found.findings[0], most_runs=3000).trace
    return {"first": first, "total": time.monotonic() - start, "size": size(small)}


def by_z3(name: str, release: str, retention: Any, seed: int, budget: float) -> dict[str, Any]:
    """Ask bound by bound."""
    start = time.monotonic()
    more = {"eagle": True} if name == "mask-covers-lookup" else {}
    question = Question(property_id=name, release=release, retention=retention, **more)
    firsts: list[float] = []

    def tell(done: Any) -> None:
        if done.reply.status == "sat":
            firsts.append(time.monotonic() - start)

    found = answer(question, Limits.of(budget, seed=seed), tell)
    return {
        "first": firsts[0] if firsts else None,
        "total": time.monotonic() - start,
        "size": size(found.trace) if found.trace else f"{found.word}: {found.bound.partition('; vLLM')[0]}",
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--budget", type=float, default=60, help="seconds each (default 60)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    console, rows = Console(width=150), []
    table = Table("promise", "release", "by", "seed", "first find (s)", "with shrinking (s)", "size")
    for name, release, retention in ASKED:
        for seed in range(options.seeds):
            for by, result in (
                ("Hypothesis", by_hypothesis(name, release, seed, options.budget)),
                ("Z3", by_z3(name, release, retention, seed, options.budget)),
            ):
                rows.append({"promise": name, "release": release, "by": by, "seed": seed, **result})
                first = "-" if result["first"] is None else f"{result['first']:.1f}"
                table.add_row(name, release, by, str(seed), first, f"{result['total']:.1f}", result["size"])
                console.print(rows[-1])
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
