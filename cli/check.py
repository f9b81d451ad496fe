"""``hitproof check``: a tree, a fork or a release against the rules that it follows."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitproof.cli.common import fetch, plain, seconds, spinner
from hitproof.fuzz.checkup import Checkup, checkup, nearest
from hitproof.model import BadInput, NotModelled
from hitproof.properties.registry import BY_ID, property_of
from hitproof.replay import counterexample, report, store
from hitproof.replay.counterexample import check_file, check_folder, write_whole
from hitproof.replay.store import Tree

KINDS = {
    "lockstep": "Same calls, same results",
    "counterexample": "Stored counterexamples",
    "property": "Promises",
}
CASES = Path(counterexample.__file__).resolve().parent.parent / "counterexamples"


@click.command("check")
@click.argument("spec", metavar="TREE|RELEASE")
@click.option(
    "--semantics", metavar="R", help="The release whose rules a tree follows [default: the nearest]."
)
@click.option("--property", "properties", multiple=True, help="Promise(s) to search [default: all].")
@click.option("--budget", default="4m", show_default=True, help="Time in all, about.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--junit", type=click.Path(path_type=Path), help="Write a JUnit file too.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the tables as Markdown too.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("counterexamples/found"), show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(
    spec: str,
    semantics: str | None,
    properties: tuple[str, ...],
    budget: str,
    seed: int,
    junit: Path | None,
    markdown: Path | None,
    out: Path,
    as_json: bool,
) -> None:
    """Check a source tree, a fork or a release: lockstep, promises, stored counterexamples.

    The tree's own manager and scheduler run beside the model of a release. Exit code 1 if a call differs, if
    the tree breaks a promise that the release keeps, or if something could not be asked within the budget.
    """
    budget_s = seconds(budget)
    names = tuple(property_of(name).id for name in dict.fromkeys(properties)) or tuple(BY_ID)
    for file in (junit, markdown):
        if file is not None:
            check_file(file)
    check_folder(out)
    with spinner(f"vLLM {spec}") as say:
        tree = _tree(spec, semantics, say)
    cases = counterexample.stored(CASES)
    with spinner(f"vLLM {tree.version}, rules of {tree.semantics}") as say:
        found = checkup(tree, cases, budget_s, promises=names, seed=seed, out=out, say=say)
    if junit is not None:
        write_whole(junit, _junit(found))
    if markdown is not None:
        write_whole(markdown, _markdown(found))
    if as_json:
        click.echo(json.dumps(_json(found), indent=2))
    else:
        _show(found)
    if found.interrupted:
        raise click.exceptions.Exit(130)
    if any(row.bad for row in found.rows):
        raise click.exceptions.Exit(1)


def _tree(spec: str, semantics: str | None, say: store.Progress) -> Tree:
    """The tree under the rules named, its own version's, or those of the nearest release."""
    if store.is_release(spec):
        if semantics is not None:
            raise BadInput(
                f"--semantics {semantics}: for a source tree only; release {spec} has its own rules"
            )
        return fetch(spec)
    if semantics is not None:
        return store.find(spec, semantics=semantics)
    try:
        return store.find(spec)
    except (NotModelled, store.UnknownVersion):
        return nearest(spec, say)


def _title(found: Checkup) -> str:
    return f"vLLM {found.tree.version} against the rules of {found.tree.semantics}"


def _summary(found: Checkup) -> str:
    bad = [row.name for row in found.rows if row.bad]
    said = f"{len(found.rows)} asked, {len(bad)} bad" + (f": {', '.join(bad)}" if bad else "")
    return f"interrupted, not all was asked; {said}" if found.interrupted else said


def _show(found: Checkup) -> None:
    screen = Console(highlight=False)
    screen.print(Text(_title(found)))
    for kind, title in KINDS.items():
        rows = [row for row in found.rows if row.kind == kind]
        if not rows:
            continue
        table = Table(title=title, title_justify="left")
        for column in ("", "outcome", "detail"):
            table.add_column(column, overflow="fold")
        for row in rows:
            mark = "!" if row.bad else ""
            table.add_row(Text(f"{mark}{row.name}"), row.outcome, Text(plain(row.detail)))
        screen.print(table)
    for comparison in found.comparisons:
        if comparison.first is not None:
            trace, difference = comparison.first
            click.echo(plain(f"first difference, {comparison.height}: {difference}\n{trace.dumps()}"))
    for find in found.finds:
        click.echo(plain(report.text(find.counterexample)))
    click.echo(_summary(found))


def _json(found: Checkup) -> dict[str, object]:
    return {
        "tree": str(found.tree.root),
        "version": found.tree.version,
        "semantics": found.tree.semantics,
        "interrupted": found.interrupted,
        "rows": [
            {"kind": r.kind, "name": r.name, "outcome": r.outcome, "bad": r.bad, "detail": r.detail}
            for r in found.rows
        ],
        "violations": [find.counterexample.to_json() for find in found.finds],
    }


def _markdown(found: Checkup) -> str:
    out = [f"# {_title(found)}", "", _summary(found), ""]
    for kind, title in KINDS.items():
        out += [f"## {title}", "", "| | outcome | detail |", "|---|---|---|"]
        for row in found.rows:
            if row.kind == kind:
                detail = plain(row.detail).replace("|", "\\|").replace("\n", " ")
                out.append(
                    f"| {row.name} | {'**' if row.bad else ''}{row.outcome}{'**' if row.bad else ''} | {detail} |"
                )
        out.append("")
    return "\n".join(out)


def _junit(found: Checkup) -> str:
    bad = sum(row.bad for row in found.rows)
    suite = ElementTree.Element(
        "testsuite", name=_title(found), tests=str(len(found.rows)), failures=str(bad)
    )
    for row in found.rows:
        case = ElementTree.SubElement(suite, "testcase", classname=f"hitproof.{row.kind}", name=row.name)
        if row.bad:
            ElementTree.SubElement(case, "failure", message=row.outcome).text = plain(row.detail)
        elif row.outcome == "refused":
            ElementTree.SubElement(case, "skipped", message=plain(row.detail))
    if found.interrupted:
        case = ElementTree.SubElement(suite, "testcase", classname="hitproof", name="complete")
        ElementTree.SubElement(case, "error", message="interrupted, not all was asked")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
