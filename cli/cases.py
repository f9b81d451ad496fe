"""``hitproof report`` and ``hitproof adopt``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hitproof.cli.common import fetch, load_trace, open_target, plain
from hitproof.fuzz.explain import explain
from hitproof.model import BadInput, ModelTarget
from hitproof.properties.known import known_for
from hitproof.properties.registry import property_of
from hitproof.properties.story import Story
from hitproof.replay import report
from hitproof.replay.confirm import sight, status_of
from hitproof.replay.counterexample import Counterexample, stored, write_new
from hitproof.replay.manager_target import ManagerTarget


@click.command("report")
@click.argument("case", type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["text", "markdown", "svg"]), default="text", show_default=True
)
def report_command(case: Path, form: str) -> None:
    """Print a counterexample's report: as text, as Markdown, or its timeline as SVG."""
    loaded = Counterexample.load(case)
    click.echo(plain({"text": report.text, "markdown": report.markdown, "svg": report.svg}[form](loaded)))


@click.command("adopt")
@click.argument("case", type=click.Path(path_type=Path))
@click.option("--release", multiple=True, help="vLLM release(s) to replay it on [default: the trace's].")
@click.option("--property", "name", help="For a plain trace file: the promise that it breaks.")
@click.option("--engine", is_flag=True, help="Replay it on vLLM's engine on CPU too.")
@click.option("--into", type=click.Path(path_type=Path), default=Path("counterexamples"), show_default=True)
def adopt_command(case: Path, release: tuple[str, ...], name: str | None, engine: bool, into: Path) -> None:
    """Give a find or a trace that breaks a promise the next number (CE-0001, ...), with its verdict on
    each release's own manager.

    A release that refuses the config is recorded as such. Run `hitproof docs write` afterwards.
    """
    if name is None:
        found = Counterexample.load(case)
        trace, prop = found.trace, property_of(found.finding.property_id)
        found_by, minimality = found.found_by, found.minimality
    else:
        trace, prop = load_trace(case), property_of(name)
        found_by, minimality = trace.note or "by hand", "written by hand, not minimal"
    model = ModelTarget()
    finding = prop.check(Story(model.run(trace), model.run)).finding
    if finding is None:
        raise BadInput(f"{case}: the model keeps {prop.id} on this trace; there is nothing to adopt")
    sightings = [sight(trace, prop.id, model)]
    for version in release or (trace.config.semantics,):
        with ManagerTarget(fetch(version)) as target:
            sightings.append(sight(trace, prop.id, target))
    if engine:
        with open_target("engine", trace.config.semantics, None, None, "cpu") as shown:
            sightings.append(sight(trace, prop.id, shown))
    known = known_for(finding, trace)
    adopted = Counterexample(
        name=f"CE-{len(stored(into)) + 1:04d}",
        trace=trace,
        finding=finding,
        status=status_of([s for s in sightings if s.version == trace.config.semantics]),
        report=known.report if known else "",
        found_by=found_by,
        minimality=minimality,
        sightings=tuple(sightings),
        counterfactuals=tuple(c.text for c in explain(trace, prop)),
    )
    path = into / f"{adopted.name}.json"
    write_new(path, json.dumps(adopted.to_json(), indent=2) + "\n")
    click.echo(str(path))
