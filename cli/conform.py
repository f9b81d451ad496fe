"""``hitproof conform``: the model and real vLLM side by side on random traces."""

from __future__ import annotations

import json
import threading
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hitproof.cli.common import bar, errors, fetch, plain
from hitproof.fuzz.conformance import Aim, Comparison, compare_tree
from hitproof.model import RELEASES
from hitproof.replay.manager_target import HEIGHTS


@click.command("conform")
@click.option("--release", multiple=True, help="vLLM release or tree, or 'all' [default: 0.25.0 and 0.32.0].")
@click.option(
    "--target",
    type=click.Choice([*HEIGHTS]),
    default="manager",
    show_default=True,
    help="vLLM's manager, called by the model's scheduler, or vLLM's scheduler with its manager inside.",
)
@click.option("--traces", type=click.IntRange(1), help="Random traces per release [default: 1000].")
@click.option("--steps", type=click.IntRange(1), help="Instead: manager calls to compare per release.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def conform_command(
    release: tuple[str, ...], target: str, traces: int | None, steps: int | None, seed: int, as_json: bool
) -> None:
    """Drive the model and vLLM with the same calls and compare every field after each.

    Compared: results, faults, events, ref counts, free-queue order, keys, index and block tables; with
    --target scheduler also who is admitted, for how many tokens, and who is preempted. Exit code 1 if a
    release differs: its first difference is printed with its trace.
    """
    if traces is not None and steps is not None:
        raise click.UsageError("--traces and --steps: give one of the two")
    chosen = RELEASES if "all" in release else release or ("0.25.0", "0.32.0")
    trees = [fetch(name) for name in chosen]
    aim = Aim(traces=traces or (None if steps else 1000), calls=steps, seed=seed)
    found: list[Comparison] = []
    stop = threading.Event()
    with bar() as progress:
        for tree in trees:
            task = progress.add_task(f"vLLM {tree.version}", total=aim.traces or aim.calls, note="")

            def show(so_far: Comparison, task: Any = task) -> None:
                done = so_far.calls if aim.traces is None else so_far.traces + so_far.refused
                progress.update(task, completed=done, note=f"{so_far.calls} calls")

            try:
                result = compare_tree(tree, target, aim, show, stop)
            except KeyboardInterrupt:
                stop.set()
                break
            found.append(result)
            if result.first is not None:
                trace, difference = result.first
                click.echo(plain(f"vLLM {tree.version}: {difference}\n{trace.dumps()}"))
    if as_json:
        click.echo(json.dumps([_json(row) for row in found], indent=2))
    else:
        show_table(found)
    if stop.is_set():
        errors.print("interrupted: the releases above were compared")
        raise click.exceptions.Exit(130)
    if any(row.first for row in found):
        raise click.exceptions.Exit(1)


def _json(row: Comparison) -> dict[str, object]:
    return {
        "release": row.tree.version,
        "target": row.height,
        "traces": row.traces,
        "refused": row.refused,
        "calls": row.calls,
        "differences": int(row.first is not None),
        "seconds": round(row.seconds, 1),
        "covered": dict(row.covered),
        "sampled": row.sampled,
        "seen": dict(row.seen),
    }


def show_table(rows: list[Comparison]) -> None:
    """One row per release, then what the traces covered, all releases together."""
    if not rows:
        return
    table = Table(title=f"model against vLLM's own {rows[0].height} (core loader)")
    for column in ("vLLM", "traces", "refused", "calls compared", "differences", "traces/s"):
        table.add_column(column, justify="left" if column == "vLLM" else "right")
    for row in rows:
        table.add_row(
            row.tree.version,
            str(row.traces),
            str(row.refused),
            str(row.calls),
            str(int(row.first is not None)),
            f"{row.traces / row.seconds:.0f}" if row.seconds else "-",
        )
    out = Console(highlight=False)
    out.print(table)
    total = sum(row.traces for row in rows)
    out.print(f"covered (of {total} traces): {_counts(rows, 'covered')}")
    sampled = sum(row.sampled for row in rows)
    out.print(f"seen (in {sampled} of them, looked into): {_counts(rows, 'seen')}")
    if any(row.refused for row in rows):
        out.print(
            "refused: EAGLE, with which vLLM's scheduler schedules draft tokens, which are not modelled"
        )


def _counts(rows: list[Comparison], name: str) -> str:
    words = sorted({word for row in rows for word in getattr(row, name)})
    return ", ".join(f"{word} {sum(getattr(row, name)[word] for row in rows)}" for word in words)
