"""``hitproof replay`` and ``hitproof report``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hitproof.cli.common import open_target, target_options
from hitproof.model import BadInput, ModelTarget, Semantics
from hitproof.replay import report
from hitproof.replay.confirm import sight
from hitproof.replay.counterexample import Counterexample


@click.command("replay")
@click.argument("case", type=click.Path(path_type=Path))
@target_options("manager")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay_command(
    case: Path, target: str, vllm: str | None, vllm_python: Path | None, device: str, as_json: bool
) -> None:
    """Replay a counterexample twice and say whether it happens there.

    Exit code 0 if it is reproduced (a target that shows hits only: if its hits are those of the
    model), 1 if it is not, 3 for a harness fault.
    """
    loaded = Counterexample.load(case)
    with open_target(target, loaded.trace.config.semantics, vllm, vllm_python, device) as chosen:
        seen = sight(loaded.trace, loaded.finding.property_id, chosen)
        expected = sight(loaded.trace, loaded.finding.property_id, _model(seen.version))
    if seen.verdict == "shown":
        same = seen.detail == expected.detail
        verdict = "reproduced" if same and expected.verdict == "reproduced" else "not reproduced"
    else:
        verdict = seen.verdict
    if as_json:
        out = {"case": loaded.name, "target": seen.target, "version": seen.version, "verdict": verdict}
        click.echo(json.dumps({**out, "seen": seen.detail, "expected": expected.detail}, indent=2))
    else:
        click.echo(f"{loaded.name} ({loaded.finding.property_id}) on {seen.target} {seen.version}: {verdict}")
        click.echo(f"  model:  {expected.detail}\n  target: {seen.detail}")
    raise click.exceptions.Exit({"reproduced": 0, "refused": 2, "fault": 3}.get(verdict, 1))


def _model(version: str) -> ModelTarget:
    """The model under the rules of ``version``; of a tree's own version, under the trace's."""
    try:
        return ModelTarget(Semantics.of(version).release)
    except BadInput:
        return ModelTarget()


@click.command("report")
@click.argument("case", type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["text", "markdown", "svg"]), default="text", show_default=True
)
def report_command(case: Path, form: str) -> None:
    """Print a counterexample's report: as text, as Markdown, or its timeline as SVG."""
    loaded = Counterexample.load(case)
    click.echo({"text": report.text, "markdown": report.markdown, "svg": report.svg}[form](loaded))
