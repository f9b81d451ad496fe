"""``hitproof prove``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hitproof.cli.common import errors, fetch, plain, retention_option, seconds, spinner
from hitproof.fuzz.bounded.answer import Answer, Done
from hitproof.fuzz.bounded.questions import DEFAULT_REACH, LEVELS, Question, Reach, answer
from hitproof.fuzz.bounded.run_level import Fixed
from hitproof.fuzz.bounded.solver import Limits
from hitproof.model import NEWEST, BadInput, Semantics, shown
from hitproof.model.config import DEFAULT
from hitproof.properties.registry import property_of
from hitproof.properties.verdict import Verdict
from hitproof.replay.confirm import sight
from hitproof.replay.counterexample import Sighting, write_new
from hitproof.replay.manager_target import ManagerTarget


@click.command("prove")
@click.argument("property_id", metavar="PROPERTY")
@click.option("--semantics", default=NEWEST, show_default=True, help="vLLM release.")
@click.option(
    "--level", type=click.Choice(LEVELS), help="Encoding: runs, masks or blocks [default: the promise's]."
)
@click.option("--turns", type=click.IntRange(2, 64), help="Requests at most.")
@click.option("--sessions", type=click.IntRange(1, 32), help="Sessions at most.")
@click.option(
    "--groups",
    type=click.IntRange(1, 8),
    help="Sliding-window groups beside the full one [default: any, 1 to 8].",
)
@click.option("--pool", type=click.IntRange(2), help="Blocks, the null block counted [default: any].")
@click.option("--pool-from", type=click.IntRange(2), help="Any pool of at least so many blocks.")
@click.option("--window", type=click.IntRange(1), help="Blocks of a window [default: any].")
@click.option(
    "--outputs", type=click.Choice(["1", "2"]), help="Output tokens of each request [default: any]."
)
@click.option(
    "--chunk", default="one", show_default=True, help="Blocks per prefill step, any, or one step for all."
)
@click.option(
    "--retention", default="default", show_default=True, help="default, dense or 0; for masks also any."
)
@click.option("--eagle", type=click.Choice(["on", "off"]), help="For masks [default: both].")
@click.option(
    "--sizes", type=click.Choice(["equal", "different"]), help="Block sizes, for masks [default: any]."
)
@click.option("--block-size", type=click.IntRange(1, 16), help="Largest block size, for masks (tokens).")
@click.option("--budget", default="60s", show_default=True, help="Time in all.")
@click.option("--memory", type=click.IntRange(1), default=4000, show_default=True, help="MB for the solver.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The solver's.")
@click.option("--vllm", is_flag=True, help="Run a counterexample on the release's own manager too, twice.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the counterexample's trace here."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prove_command(
    property_id: str,
    semantics: str,
    budget: str,
    memory: int,
    seed: int,
    vllm: bool,
    output: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Prove a promise within bounds, or find its smallest counterexample, with Z3.

    Bounds are asked in order: fewest turns, then fewest sessions, then fewest blocks (for masks:
    smallest block sizes, then shortest prompt, then smallest window). Ctrl-C keeps the largest bound
    done. Exit code 0 only if it holds; 1 if it is violated, unknown or there is nothing to check; 3 if encoding
    and model differ.
    """
    question = question_of(property_of(property_id).id, Semantics.of(semantics).release, given)
    with spinner(f"proving {question.property_id}") as say:

        def tell(done: Done) -> None:
            say(done.line)
            if not as_json:
                errors.print(done.line, markup=False)

        found = answer(question, Limits.of(seconds(budget), memory_mb=memory, seed=seed), tell)
    sighting = None
    if found.trace is not None and vllm and not found.fault:
        with ManagerTarget(fetch(question.release)) as manager:
            sighting = sight(found.trace, question.property_id, manager)
    if output is not None and found.trace is not None:
        write_new(output, found.trace.dumps())
    if as_json:
        seen = None if sighting is None else sighting.text
        click.echo(json.dumps({**found.to_json(), "vllm": seen}, indent=2))
    else:
        show(found, sighting)
    if found.interrupted:
        raise click.exceptions.Exit(130)
    if found.fault:
        raise click.exceptions.Exit(3)
    if found.verdict is not Verdict.HOLDS:
        raise click.exceptions.Exit(1)


def question_of(name: str, release: str, given: dict[str, Any]) -> Question:
    """The question that the options ask."""
    chunk, retention = given["chunk"], given["retention"]
    if chunk not in ("one", "any") and not (chunk.isdecimal() and 0 < int(chunk) < 1_000_000):
        raise click.BadParameter(f"{shown(chunk)}: write one, any or blocks", param_hint="--chunk")
    if given["pool"] is not None and given["pool_from"] is not None:
        raise BadInput("--pool and --pool-from: give one of the two")
    kept = retention_option(retention, ("default", "dense", "any"))
    usual = DEFAULT_REACH.get(name, Reach())
    outputs = {"1": True, "2": False, None: None}[given["outputs"]]
    reach = Reach(
        turns=given["turns"] or usual.turns,
        sessions=given["sessions"] or usual.sessions,
        block_size=given["block_size"] or usual.block_size,
    )
    return Question(
        property_id=name,
        release=release,
        retention={"default": DEFAULT, "dense": None, "any": "any"}.get(kept, kept)
        if not kept.isdecimal()
        else int(kept),
        chunked=chunk != "one",
        eagle={"on": True, "off": False, None: None}[given["eagle"]],
        equal={"equal": True, "different": False, None: None}[given["sizes"]],
        fixed=Fixed(
            blocks=given["pool"],
            least_blocks=given["pool_from"],
            windows=given["groups"],
            m=given["window"],
            chunk=int(chunk) if chunk.isdecimal() else None,
            single=outputs,
        ),
        reach=reach,
        level=given["level"],
    )


def show(found: Answer, sighting: Sighting | None = None) -> None:
    """One answer as text."""
    out = Console(highlight=False, soft_wrap=True)
    lines = [f"{found.word}  {found.property_id}", f"Bound     {found.bound}"]
    if found.trace is not None:
        config = found.trace.config
        groups = ", ".join(group.label for group in config.groups)
        lines.append(f"Config    vLLM {config.semantics}; {config.num_blocks} blocks; {groups}")
        lines += [f"{'Steps' if i == 0 else '':10}{op}" for i, op in enumerate(found.trace.ops)]
    if found.finding is not None:
        lines += [f"Expected  {found.finding.expected}", f"Seen      {found.finding.seen}"]
        lines += [f"{'Because' if i == 0 else '':10}{r}" for i, r in enumerate(found.finding.reasons)]
    minimal = f"{found.minimal} (in this class of runs)" if found.minimal else ""
    for name, text in (("Minimal", minimal), ("Reason", found.reason), ("Fault", found.fault)):
        if text:
            lines.append(f"{name:10}{text}")
    if sighting is not None:
        lines.append(f"Targets   {sighting.text}")
    shown_stats = ", ".join(f"{key} {value:,.0f}" for key, value in found.statistics.items())
    lines.append(f"Solver    {found.seconds:.1f} s; {shown_stats or 'nothing asked'}")
    out.print(plain("\n".join(lines)), markup=False)
