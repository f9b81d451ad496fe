"""``hitproof probe``."""

from __future__ import annotations

import json

import attrs
import click

from hitproof.cli.common import plain, spinner
from hitproof.replay.probe import Plan, Probe, Round, probe
from hitproof.replay.server_client import Client

MEANING = {
    "full": "every later round hits what a prompt sent twice in a row hits",
    "partial": "later rounds hit less than a prompt sent twice in a row",
    "collapsed": "no request of a later round hits anything, though a prompt sent twice in a row does",
    "no hits at all": "not even a prompt sent twice in a row hits: prefix caching is off, or --tokens is too short",
}
CODES = {"full": 0, "no hits at all": 2}
"""Exit codes; 1 for the rest."""


@click.command("probe")
@click.option("--url", required=True, help="Where the server listens, as http://127.0.0.1:8000.")
@click.option("--seats", type=click.IntRange(1), required=True, help="Conversations in turn.")
@click.option("--tokens", type=click.IntRange(1), required=True, help="Prefix of each seat.")
@click.option("--rounds", type=click.IntRange(2), default=3, show_default=True, help="Turns of each seat.")
@click.option("--suffix", type=click.IntRange(1), default=8, show_default=True, help="Fresh tokens per turn.")
@click.option(
    "--most-tokens",
    type=click.IntRange(1),
    default=4_000_000,
    show_default=True,
    help="Prompt tokens in all.",
)
@click.option(
    "--timeout", type=click.FloatRange(1), default=300, show_default=True, help="Seconds per request."
)
@click.option("--in-use", is_flag=True, help="Probe a server that others use or have used.")
@click.option("--plan", "plan_only", is_flag=True, help="Say what would be sent, and send nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe_command(
    url: str,
    seats: int,
    tokens: int,
    rounds: int,
    suffix: int,
    most_tokens: int,
    timeout: float,
    in_use: bool,
    plan_only: bool,
    as_json: bool,
) -> None:
    """Ask one's own server for the cliff of vllm#48435: seats in turn re-send their prefix.

    Sends one request at a time, at most 500, and says first what it sends. A server that has served
    requests is left alone unless --in-use is given: a probe evicts what others have cached.

    Exit code 0 if later rounds hit in full, 1 if in part or not at all, 2 if nothing can be said.
    """
    plan = Plan(seats=seats, tokens=tokens, rounds=rounds, suffix=suffix, most_tokens=most_tokens)
    if not as_json or plan_only:
        click.echo(f"To send to {plain(url)}: {plan.text}")
    if plan_only:
        return
    with spinner("probe") as say:
        done = probe(Client(url, timeout_s=timeout), plan, in_use=in_use, progress=say)
    if as_json:
        out = attrs.asdict(done) | {"verdict": done.verdict, "meaning": MEANING[done.verdict]}
        click.echo(json.dumps(out, indent=2))
    else:
        for line in lines(done):
            click.echo(plain(line))
    raise click.exceptions.Exit(CODES.get(done.verdict, 1))


def lines(done: Probe) -> list[str]:
    """The table and the verdict."""
    out = [
        f"vLLM {done.version}, {done.model}: {done.pool}",
        "Times are medians; hit tokens are the least and the most of a round.",
    ]
    out.append(f"  {'':12}  {'first token':>14}  {'hit tokens':>16}  {'full hits':>9}")
    out += [_row(done, each) for each in (*done.alone, *done.rounds)]
    return [*out, f"{done.verdict.upper()}: {MEANING[done.verdict]}"]


def _row(done: Probe, each: Round) -> str:
    low, high = min(each.hits), max(each.hits)
    hits = str(low) if low == high else f"{low} to {high}"
    full = sum(hit >= done.best > 0 for hit in each.hits)
    return f"  {each.name:12}  {each.median_ms:>11.1f} ms  {hits:>16}  {f'{full} of {len(each.hits)}':>9}"
