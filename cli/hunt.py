"""``hitproof hunt``."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from hitproof.cli.common import bar, errors, fetch, interval_option, plain, retention_option, seconds
from hitproof.fuzz.hunt import Find, Plan, Real, Report, Unlike, Watcher, hunt
from hitproof.model import BadInput, Semantics
from hitproof.model.semantics import NEWEST
from hitproof.properties.known import Known
from hitproof.properties.registry import BY_ID, property_of
from hitproof.properties.verdict import Finding, Verdict
from hitproof.replay.counterexample import check_folder
from hitproof.replay.manager_target import HEIGHTS
from hitproof.replay.report import text
from hitproof.replay.store import Tree

DENSE = "0.25.0"
"""The release that stands for dense retention: vllm#48435 was reported against it."""


@click.command("hunt")
@click.option(
    "--semantics", multiple=True, help=f"vLLM release(s) to search [default: {NEWEST} and {DENSE}]."
)
@click.option("--property", "properties", multiple=True, help="Property id(s) [default: all].")
@click.option("--budget", default="60s", show_default=True, help="Search time in all.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--target",
    type=click.Choice(["model", *HEIGHTS]),
    default="model",
    show_default=True,
    help="What is searched.",
)
@click.option("--unlike", metavar="R", help="Count only what release R keeps: what R fixed, or broke since.")
@click.option(
    "--unlike-retention", metavar="N", help="There with this retention: dense or a number of tokens."
)
@click.option(
    "--for-engine",
    is_flag=True,
    help="Count only traces that vLLM's engine takes (--scale fit): a pool for one request.",
)
@click.option(
    "--retention", default="default", show_default=True, help="default, any, dense or a number of tokens."
)
@click.option("--workers", type=click.IntRange(1, 64), help="Processes [default: one per core].")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("counterexamples/found"), show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def hunt_command(
    semantics: tuple[str, ...],
    properties: tuple[str, ...],
    budget: str,
    seed: int,
    target: str,
    unlike: str | None,
    unlike_retention: str | None,
    for_engine: bool,
    retention: str,
    workers: int | None,
    out: Path,
    as_json: bool,
) -> None:
    """Search for violated promises, shrink them, confirm them on real vLLM, explain and store them.

    Exit code 1 if a violation was found, known or new. Ctrl-C keeps what was found.
    """
    names = tuple(property_of(name).id for name in dict.fromkeys(properties)) or tuple(BY_ID)
    releases = tuple(dict.fromkeys(Semantics.of(release).release for release in semantics or (NEWEST, DENSE)))
    if retention_option(retention, ("default", "any", "dense")).isdecimal():
        for release in releases:
            if not Semantics.of(release).retention:
                raise BadInput(
                    f"--retention {retention}: needs vLLM 0.23.0 or newer, not {release}; "
                    "remove it or name other releases with --semantics"
                )
    search_s = seconds(budget)
    if unlike is not None and unlike_retention is None and Semantics.of(unlike).release in releases:
        raise BadInput(f"--unlike {unlike}: a release keeps and breaks what it does itself; name another one")
    check_folder(out)
    plan = Plan(
        semantics=releases,
        properties=names,
        budget_s=search_s,
        seed=seed,
        target=target,
        retention=retention,
        unlike=_unlike(unlike, unlike_retention, target),
        for_engine=for_engine,
        trees=_trees(releases, required=target != "model"),
        out=out,
        **({"workers": workers} if workers else {}),
    )
    watcher = _Shown(quiet=as_json)
    with watcher.progress:
        report = hunt(plan, watcher)
    if as_json:
        click.echo(json.dumps(_json(report), indent=2))
    else:
        _show(report)
    if report.interrupted:
        errors.print("interrupted: what was found before is kept")
        raise click.exceptions.Exit(130)
    if report.finds:
        raise click.exceptions.Exit(1)


def _unlike(release: str | None, retention: str | None, target: str) -> Unlike | None:
    if release is None:
        if retention is not None:
            raise BadInput("--unlike-retention: needs --unlike, the release to set it in")
        return None
    real = None if target == "model" else Real(tree=fetch(release), height=target)
    interval = interval_option(retention, "--unlike-retention")
    return Unlike(release=Semantics.of(release).release, retention=interval, real=real)


def _trees(releases: tuple[str, ...], *, required: bool) -> dict[str, Tree]:
    """Real vLLM for each release; without network the hunt goes on with the model alone."""
    found = {}
    for release in releases:
        try:
            found[release] = fetch(release)
        except BadInput as error:
            if required:
                raise
            errors.print(f"without real vLLM {release} (finds stay unconfirmed): {error}", markup=False)
    return found


class _Shown(Watcher):
    """Progress on standard error, reports on standard output as they come."""

    def __init__(self, *, quiet: bool) -> None:
        self.progress = bar()
        self.quiet = quiet
        self.tasks: dict[str, TaskID] = {}

    def searching(self, semantics: str, elapsed_s: float, budget_s: float, runs: int) -> None:
        if semantics not in self.tasks:
            self.tasks[semantics] = self.progress.add_task(f"searching {semantics}", total=budget_s, note="")
        self.progress.update(self.tasks[semantics], completed=elapsed_s, note=f"{runs} traces")

    def shrinking(self, finding: Finding) -> None:
        self.progress.console.print(
            f"{finding.property_id}: {finding.seen}, expected {finding.expected}; shrinking", markup=False
        )

    def found(self, find: Find) -> None:
        if self.quiet:
            return
        Console(highlight=False, soft_wrap=True).print(plain(text(find.counterexample)), markup=False)
        if find.path is not None:
            click.echo(f"stored in {find.path}\n")


def _show(report: Report) -> None:
    """One table per release: every property with its verdict, checks and traces, and the bound."""
    for semantics, judgements in report.judgements.items():
        bound = next((j.bound.partition("; ")[2] for j in judgements if j.bound), "nothing was run")
        table = Table(title=f"vLLM {semantics}", caption=f"within: {bound}", caption_justify="left")
        for column in ("property", "verdict", "checks", "traces"):
            table.add_column(column, justify="right" if column in ("checks", "traces") else "left")
        for judgement in judgements:
            verdict = judgement.verdict.name
            if judgement.verdict is Verdict.VIOLATED:
                known = _known(report, semantics, judgement.property_id)
                verdict += f" (known: {known.report})" if known else " (NEW)"
            table.add_row(judgement.property_id, verdict, str(judgement.evidence), str(judgement.runs))
        Console(highlight=False).print(table)


def _known(report: Report, semantics: str, property_id: str) -> Known | None:
    for find in report.finds:
        case = find.counterexample
        if (case.finding.property_id, case.trace.config.semantics) == (property_id, semantics):
            return find.known
    return None


def _json(report: Report) -> dict[str, object]:
    return {
        "interrupted": report.interrupted,
        "finds": [
            {
                "path": None if find.path is None else str(find.path),
                "seconds": round(find.seconds, 1),
                "known": None if find.known is None else find.known.report,
                "counterexample": find.counterexample.to_json(),
            }
            for find in report.finds
        ],
        "verdicts": {
            semantics: {
                j.property_id: {
                    "verdict": j.verdict.name,
                    "evidence": j.evidence,
                    "runs": j.runs,
                    "bound": j.bound,
                }
                for j in judgements
            }
            for semantics, judgements in report.judgements.items()
        },
    }
