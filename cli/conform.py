"""``hitproof conform``: the model and real vLLM side by side on random traces."""

from __future__ import annotations

import json
from collections import Counter

import click
from rich.console import Console
from rich.table import Table

from hitproof.cli.common import bar, fetch
from hitproof.fuzz.random_traces import coverage, random_trace
from hitproof.model import RELEASES
from hitproof.replay.lockstep import Divergence
from hitproof.replay.manager_target import ManagerTarget

BATCH = 50


@click.command("conform")
@click.option("--release", multiple=True, help="vLLM release or tree, or 'all' [default: 0.25.0 and 0.32.0].")
@click.option(
    "--traces", type=click.IntRange(1), default=1000, show_default=True, help="Random traces per release."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def conform_command(release: tuple[str, ...], traces: int, seed: int, as_json: bool) -> None:
    """Drive the model's manager and vLLM's with the same calls and compare every field after each.

    Compared: results, faults, events, ref counts, free-queue order, keys, index and block tables.
    Exit code 1 at the first difference of a release, which is printed with its trace.
    """
    chosen = RELEASES if "all" in release else release or ("0.25.0", "0.32.0")
    trees = [fetch(name) for name in chosen]
    rows: list[dict[str, object]] = []
    broken: list[Divergence] = []
    with bar() as progress:
        for tree in trees:
            task = progress.add_task(f"vLLM {tree.version}", total=traces, note="")
            calls, done = 0, 0
            seen: Counter[str] = Counter()
            first: Divergence | None = None
            with ManagerTarget(tree) as target:
                while done < traces and first is None:
                    count = min(BATCH, traces - done)
                    batch = [random_trace(seed + done + i, tree.semantics) for i in range(count)]
                    for trace, result in zip(batch, target.conform(batch), strict=True):
                        calls += result.calls
                        done += 1
                        seen.update(coverage(trace))
                        if result.divergence is not None:
                            first = result.divergence
                            broken.append(first)
                            click.echo(f"vLLM {tree.version}: {first}\n{trace.dumps()}")
                            break
                    progress.update(task, completed=done, note=f"{calls} calls")
            differences = int(first is not None)
            rows.append(
                {
                    "release": tree.version,
                    "traces": done,
                    "calls": calls,
                    "differences": differences,
                    "covered": dict(seen),
                }
            )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _show(rows)
    if broken:
        raise click.exceptions.Exit(1)


def _show(rows: list[dict[str, object]]) -> None:
    table = Table(title="model against vLLM's own manager (core loader)")
    for column in ("vLLM", "traces", "calls compared", "differences", "covered (traces)"):
        table.add_column(column, overflow="fold")
    for row in rows:
        covered = row["covered"]
        assert isinstance(covered, dict)
        text = ", ".join(f"{name} {count}" for name, count in sorted(covered.items()))
        table.add_row(
            str(row["release"]), str(row["traces"]), str(row["calls"]), str(row["differences"]), text
        )
    Console(highlight=False).print(table)
