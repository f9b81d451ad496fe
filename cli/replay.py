"""``hitproof replay``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import attrs
import click

from hitproof.cli.common import ENVIRONMENT, load_case, open_target, plain, spinner, target_options
from hitproof.cli.scaling import at_scale, scale_option
from hitproof.model import BadInput, Target, Trace
from hitproof.replay import store
from hitproof.replay.counterexample import write_whole
from hitproof.replay.ladder import RUNGS, Replayed, climb, replayed
from hitproof.replay.manager_target import HEIGHTS

CODES = (1, 3, 2, 0)
"""Of several replays: a finding says more than a fault, and a fault more than a refusal."""


@attrs.frozen(slots=True)
class _Case:
    """A trace to replay; of a counterexample also the promise that it breaks."""

    name: str
    trace: Trace
    property_id: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.property_id})" if self.property_id else self.name


@click.command("replay")
@click.argument("cases", metavar="CASE|TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@target_options("manager")
@click.option("--until-rung", type=click.Choice(RUNGS), help="Climb from the model up to this rung instead.")
@scale_option
@click.option(
    "--times", type=click.IntRange(1, 1000), default=2, show_default=True, help="Runs, which must be equal."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write a JUnit file, too.")
def replay_command(
    cases: tuple[Path, ...],
    target: str,
    vllm: str | None,
    vllm_python: Path | None,
    device: str,
    url: str | None,
    until_rung: str | None,
    scale: str,
    times: int,
    as_json: bool,
    junit: Path | None,
) -> None:
    """Replay counterexamples or traces, beside the model, and say whether it happens there.

    With --until-rung, climb the ladder and stop at the first rung that disagrees.

    Exit code 0 if all is as expected (a counterexample: its promise is broken there), 1 if it is not
    reproduced, if hits or contents differ or two runs do, 2 if it is refused, 3 for a harness fault.
    """
    loaded = [_load(case, scale) for case in cases]
    options = {"vllm": vllm, "python": vllm_python, "device": device, "url": url}
    done: list[tuple[_Case, Replayed]] = []
    try:
        with ExitStack() as stack:
            held: dict[tuple[str, str], Target] = {}

            @contextmanager
            def chosen(rung: str, case: _Case) -> Iterator[Target]:
                """The rung's target, which serves every case that it fits."""
                at = (rung, case.trace.config.semantics if rung in HEIGHTS and vllm is None else "")
                if at not in held:
                    settings = _meant_for(rung, options) if until_rung else options
                    held[at] = stack.enter_context(open_target(rung, case.trace.config.semantics, **settings))
                yield held[at]

            for case in loaded:
                for said in _replays(case, target, until_rung, chosen, times):
                    done.append((case, said))
                    if not as_json:
                        _print(case, said)
    finally:
        if as_json:
            click.echo(json.dumps({"replays": [_json(*each) for each in done]}, indent=2))
        if junit is not None:
            write_whole(junit, _junit(done))
    codes = {said.exit_code for _, said in done}
    raise click.exceptions.Exit(next(code for code in CODES if code in codes))


def _meant_for(rung: str, options: dict[str, Any]) -> dict[str, Any]:
    """Of a climb's options those that this rung understands."""
    out = {"vllm": None, "python": None, "device": "cpu", "url": None}
    vllm = options["vllm"]
    if rung in HEIGHTS or rung == "engine":
        out |= {"vllm": vllm, "python": options["python"]}
    if rung == "model" and vllm is not None and (vllm == ENVIRONMENT or store.is_release(vllm)):
        out["vllm"] = vllm
    if rung == "engine":
        out["device"] = options["device"]
    if rung == "server":
        out["url"] = options["url"]
    return out


def _load(path: Path, scale: str) -> _Case:
    trace, found = load_case(path)
    case = _Case(path.stem, trace) if found is None else _Case(found.name, trace, found.finding.property_id)
    try:
        longer, factor = at_scale(case.trace, scale)
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from None
    return attrs.evolve(case, trace=longer, name=case.name if factor == 1 else f"{case.name} x{factor}")


def _replays(case: _Case, target: str, until_rung: str | None, chosen: Any, times: int) -> Iterator[Replayed]:
    if until_rung is None:
        with chosen(target, case) as opened, spinner(f"{case.name} on {opened.name}"):
            said = replayed(case.trace, opened, target, case.property_id, times=times)
        yield said
        return
    rungs = RUNGS[: RUNGS.index(until_rung) + 1]
    openers = [(rung, partial(chosen, rung, case)) for rung in rungs]
    yield from climb(case.trace, openers, case.property_id, times=times)


def _print(case: _Case, said: Replayed) -> None:
    click.echo(plain(f"{case.title} on {said.headline}"))
    for line in said.lines():
        click.echo(plain(line))


def _json(case: _Case, said: Replayed) -> dict[str, Any]:
    return {"case": case.name, "property": case.property_id or None, **said.to_json()}


def _junit(done: list[tuple[_Case, Replayed]]) -> str:
    """One test case per replay: refused ones are skipped, harness faults are errors."""
    words = {0: "", 1: "failure", 2: "skipped", 3: "error"}
    codes = [said.exit_code for _, said in done]
    suite = ElementTree.Element(
        "testsuite",
        name="hitproof replay",
        tests=str(len(done)),
        failures=str(codes.count(1)),
        errors=str(codes.count(3)),
        skipped=str(codes.count(2)),
    )
    for case, said in done:
        where = f"{said.target} {said.version}".strip()
        test = ElementTree.SubElement(suite, "testcase", classname=case.title, name=where)
        if said.exit_code:
            child = ElementTree.SubElement(test, words[said.exit_code], message=plain(said.headline))
            child.text = plain("\n".join(said.lines()))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
