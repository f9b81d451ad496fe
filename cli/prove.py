"""``hitproof prove``."""

from __future__ import annotations

import json

import click
from rich.console import Console

from hitproof.cli.common import errors, plain, retention_option, spinner
from hitproof.cli.hunt import seconds
from hitproof.fuzz.bounded.answer import Answer, Done
from hitproof.fuzz.bounded.questions import RUN_LEVEL, Question, Reach, answer
from hitproof.fuzz.bounded.run_level import Fixed
from hitproof.fuzz.bounded.solver import Limits
from hitproof.model import NEWEST, BadInput, Semantics, shown
from hitproof.model.config import DEFAULT
from hitproof.properties.registry import property_of
from hitproof.properties.verdict import Verdict


@click.command("prove")
@click.argument("property_id", metavar="PROPERTY")
@click.option("--semantics", default=NEWEST, show_default=True, help="vLLM release.")
@click.option("--turns", type=click.IntRange(2, 64), help="Requests at most [default: the promise's].")
@click.option("--sessions", type=click.IntRange(1, 32), help="Sessions at most [default: the promise's].")
@click.option(
    "--groups",
    type=click.IntRange(1, 8),
    help="Sliding-window groups beside the full one [default: any, 1 to 8].",
)
@click.option("--pool", type=click.IntRange(2), help="Blocks, the null block counted [default: any].")
@click.option("--window", type=click.IntRange(1), help="Blocks of a window [default: any].")
@click.option(
    "--chunk", default="one", show_default=True, help="Blocks per prefill step, any, or one step for all."
)
@click.option("--retention", default="default", show_default=True, help="default, dense or 0.")
@click.option("--budget", default="60s", show_default=True, help="Time in all.")
@click.option("--memory", type=click.IntRange(1), default=4000, show_default=True, help="MB for the solver.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The solver's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prove_command(
    property_id: str,
    semantics: str,
    turns: int | None,
    sessions: int | None,
    groups: int | None,
    pool: int | None,
    window: int | None,
    chunk: str,
    retention: str,
    budget: str,
    memory: int,
    seed: int,
    as_json: bool,
) -> None:
    """Prove a promise within bounds, or find its smallest counterexample, with Z3.

    Bounds are asked in order: fewest turns, then fewest sessions, then fewest blocks. Ctrl-C keeps
    the largest bound done. Exit code 1 if the promise is violated, 3 if encoding and model differ.
    """
    question = _question(property_id, semantics, turns, sessions, groups, pool, window, chunk, retention)
    with spinner(f"proving {question.property_id}") as say:

        def tell(done: Done) -> None:
            say(done.line)
            if not as_json:
                errors.print(done.line, markup=False)

        found = answer(question, Limits.of(seconds(budget), memory_mb=memory, seed=seed), tell)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        show(found)
    if found.interrupted:
        raise click.exceptions.Exit(130)
    if found.fault:
        raise click.exceptions.Exit(3)
    if found.verdict is Verdict.VIOLATED:
        raise click.exceptions.Exit(1)


def _question(
    property_id: str,
    semantics: str,
    turns: int | None,
    sessions: int | None,
    groups: int | None,
    pool: int | None,
    window: int | None,
    chunk: str,
    retention: str,
) -> Question:
    name = property_of(property_id).id
    if chunk not in ("one", "any") and not (chunk.isdecimal() and 0 < int(chunk) < 1_000_000):
        raise click.BadParameter(f"{shown(chunk)}: write one, any or blocks", param_hint="--chunk")
    kept = retention_option(retention, ("default", "dense"))
    question = Question(
        property_id=name,
        release=Semantics.of(semantics).release,
        retention=DEFAULT if kept == "default" else None if kept == "dense" else int(kept),
        chunked=chunk != "one",
        fixed=Fixed(blocks=pool, windows=groups, m=window, chunk=int(chunk) if chunk.isdecimal() else None),
    )
    if name not in RUN_LEVEL:
        raise BadInput(f"{name}: no encoding states this promise; provable: {', '.join(RUN_LEVEL)}")
    usual = question.in_reach
    reach = Reach(turns=turns or usual.turns, sessions=sessions or usual.sessions)
    return Question(
        property_id=name,
        release=question.release,
        retention=question.retention,
        chunked=question.chunked,
        fixed=question.fixed,
        reach=reach,
    )


def show(found: Answer) -> None:
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
    for name, text in (("Minimal", found.minimal), ("Reason", found.reason), ("Fault", found.fault)):
        if text:
            lines.append(f"{name:10}{text}")
    shown_stats = ", ".join(f"{key} {value:,.0f}" for key, value in found.statistics.items())
    lines.append(f"Solver    {found.seconds:.1f} s; {shown_stats or 'nothing asked'}")
    out.print(plain("\n".join(lines)), markup=False)
