"""``hitproof bisect``: one counterexample on every release, and where its verdict changes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitproof.cli.common import bar, errors, fetch, interval_option, load_case, plain
from hitproof.model import RELEASES, BadInput, Semantics, Trace, under
from hitproof.properties.registry import property_of
from hitproof.replay import store
from hitproof.replay.confirm import sight, spans
from hitproof.replay.counterexample import Sighting, rewrite
from hitproof.replay.manager_target import HEIGHTS


@click.command("bisect")
@click.argument("case", type=click.Path(path_type=Path))
@click.option(
    "--property", "name", help="The promise to judge [default: the counterexample's; a plain trace needs it]."
)
@click.option("--good", metavar="R", help="A release where it is not reproduced [default: tried on all].")
@click.option("--bad", metavar="R", help="A release where it is reproduced.")
@click.option("--target", type=click.Choice([*HEIGHTS]), default="manager", show_default=True)
@click.option("--retention", metavar="N", help="Set where a release has it: dense or a number of tokens.")
@click.option("--keep", is_flag=True, help="Keep the verdicts in CASE, in the place of earlier ones.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bisect_command(
    case: Path,
    name: str | None,
    good: str | None,
    bad: str | None,
    target: str,
    retention: str | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Run CASE twice on each release's own code, oldest first, and say where the verdict changes.

    With --good and --bad only from one to the other, whichever is older, both included. Exit code 1 if the
    two releases do not have these verdicts, 2 if one refuses the trace, 3 after a harness fault.
    """
    trace, loaded = load_case(case)
    if name is None and loaded is None:
        raise BadInput(f"{case}: not a counterexample; name the promise to judge with --property")
    if name is not None:
        loaded = None
    if keep and (loaded is None or retention is not None):
        raise BadInput("--keep: for a counterexample file as it is, without --property and --retention")
    interval = interval_option(retention, "--retention")
    prop = loaded.finding.property_id if loaded is not None else property_of(str(name)).id
    releases = _between(good, bad)
    trees = [fetch(release) for release in releases]
    found = _sightings(trace, prop, trees, target, interval)
    if keep and loaded is not None and len(found) == len(trees):
        others = [s for s in loaded.sightings if s.target != f"{target} (core)" or s.version not in releases]
        rewrite(case, attrs.evolve(loaded, sightings=(*others, *found)))
    title = f"{loaded.name if loaded else case.name} ({prop})"
    if as_json:
        rows = [{"release": s.version, "verdict": s.verdict, "detail": s.detail} for s in found]
        out = {"case": title, "target": f"{target} (core)", "releases": rows, "spans": _spans(found)}
        click.echo(json.dumps(out, indent=2))
    else:
        _show(title, found)
    if len(found) < len(trees):
        raise click.exceptions.Exit(130)
    if any(s.verdict == "fault" for s in found):
        raise click.exceptions.Exit(3)
    verdicts = {s.version: s.verdict for s in found}
    for release, wanted in ((good, "not reproduced"), (bad, "reproduced")):
        if release is not None and verdicts[Semantics.of(release).release] != wanted:
            verdict = verdicts[Semantics.of(release).release]
            click.echo(f"{release}: {verdict}, not '{wanted}' as it was said")
            raise click.exceptions.Exit(2 if verdict == "refused" else 1)


def _between(good: str | None, bad: str | None) -> list[str]:
    """The releases to try; BadInput if an end is not one of those that are modelled."""
    ends = []
    for option, text in (("--good", good), ("--bad", bad)):
        if text is None:
            continue
        release = Semantics.of(text).release
        if release not in RELEASES:
            raise BadInput(f"{option} {text}: no such release; known: {', '.join(RELEASES)}")
        ends.append(RELEASES.index(release))
    if len(ends) == 2:
        return list(RELEASES[min(ends) : max(ends) + 1])
    return list(RELEASES)


def _sightings(
    trace: Trace, prop: str, trees: list[store.Tree], target: str, retention: int | Literal["keep"] | None
) -> list[Sighting]:
    def one(tree: store.Tree) -> Sighting:
        with HEIGHTS[target](tree) as real:
            try:
                there = under(trace, tree.semantics, retention)
            except BadInput as refusal:
                return Sighting(
                    target=real.name, version=real.version, verdict="refused", detail=str(refusal)
                )
            return sight(there, prop, real)

    found: list[Sighting] = []
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    with bar() as progress:
        task = progress.add_task("releases", total=len(trees), note="")
        try:
            for sighting in pool.map(one, trees):
                found.append(sighting)
                progress.update(task, advance=1, note=sighting.version)
        except KeyboardInterrupt:
            errors.print("interrupted: what is below was tried")
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def _spans(found: list[Sighting]) -> list[str]:
    return spans(found, found[0].target) if found else []


def _show(title: str, found: list[Sighting]) -> None:
    if not found:
        return
    table = Table(title=Text(f"{title} on {found[0].target}"))
    for column in ("vLLM", "verdict", "hits, or why"):
        table.add_column(column, overflow="fold")
    for s in found:
        table.add_row(s.version, s.verdict, Text(plain(s.detail)))
    out = Console(highlight=False)
    out.print(table)
    out.print("boundary: " + "; ".join(_spans(found)))
