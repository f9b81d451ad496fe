"""``hitproof run`` and ``hitproof scenario``."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hitproof.cli.common import load_trace, open_target, plain, retention_option, target_options
from hitproof.model import BadInput, CacheConfig, Drain, Group, Op, Run, Span, Submit, Trace
from hitproof.model.config import DEFAULT
from hitproof.model.semantics import NEWEST
from hitproof.model.trace import MOST_OPS
from hitproof.replay.counterexample import write_new


@click.command("run")
@click.argument("trace", type=click.Path(path_type=Path))
@target_options("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run_command(
    trace: Path,
    target: str,
    vllm: str | None,
    vllm_python: Path | None,
    device: str,
    url: str | None,
    as_json: bool,
) -> None:
    """Run TRACE (a trace or counterexample file) and print what became of each request."""
    loaded = load_trace(trace)
    with open_target(target, loaded.config.semantics, vllm, vllm_python, device, url, record=False) as chosen:
        run = chosen.run(loaded)
    if as_json:
        click.echo(json.dumps(run_json(run), indent=2))
    else:
        Console(highlight=False).print(_table(run))
        for line in _remarks(run):
            click.echo(line)


def run_json(run: Run) -> dict[str, object]:
    """A run as JSON: per request id, prompt_tokens, hit_tokens, preemptions, finished."""
    return {
        "target": run.target,
        "version": run.version,
        "requests": [result.to_json() for result in run.requests],
        "stuck_at_op": run.stuck,
        "fault": run.fault or None,
    }


def _table(run: Run) -> Table:
    table = Table(title=f"{run.target}, vLLM {run.version}")
    for name in ("request", "prompt tokens", "hit tokens", "preemptions", "finished"):
        table.add_column(name, justify="left" if name == "request" else "right")
    for result in run.requests:
        hit = "-" if result.hit_tokens is None else str(result.hit_tokens)
        done = "aborted" if result.aborted else "yes" if result.finished else "no"
        table.add_row(result.id, str(result.prompt_tokens), hit, str(result.preemptions), done)
    return table


def _remarks(run: Run) -> list[str]:
    out = []
    if run.stuck is not None:
        out.append(f"no progress is possible at op {run.stuck} ({run.trace.ops[run.stuck]})")
    if run.fault:
        out.append(f"the manager failed: {plain(run.fault)}")
    return out


@click.group("scenario")
def scenario_command() -> None:
    """Write traces of common workloads."""


@scenario_command.command("round-robin")
@click.option(
    "--seats", type=click.IntRange(1, 1000), default=4, show_default=True, help="Conversations in turn."
)
@click.option("--tokens", type=click.IntRange(1), default=512, show_default=True, help="Prefix of each seat.")
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Turns of each seat."
)
@click.option("--suffix", type=click.IntRange(0), default=8, show_default=True, help="Fresh tokens per turn.")
@click.option(
    "--output-tokens", type=click.IntRange(1), default=2, show_default=True, help="Generated per turn."
)
@click.option(
    "--num-blocks", type=click.IntRange(2), default=400, show_default=True, help="Pool, null block counted."
)
@click.option("--block-size", type=click.IntRange(1), default=32, show_default=True, help="Tokens per block.")
@click.option(
    "--window", type=click.IntRange(1), default=64, show_default=True, help="Sliding window in tokens."
)
@click.option(
    "--window-groups", type=click.IntRange(0, 63), default=5, show_default=True, help="Sliding-window groups."
)
@click.option(
    "--full-groups", type=click.IntRange(0, 63), default=1, show_default=True, help="Full-attention groups."
)
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True, help="Step budget."
)
@click.option(
    "--max-model-len", type=click.IntRange(1), default=2048, show_default=True, help="Longest sequence."
)
@click.option(
    "--retention", default="default", show_default=True, help="default, dense, 0 or a number of tokens."
)
@click.option("--semantics", default=NEWEST, show_default=True, help="vLLM release.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write here instead of standard output."
)
def round_robin(
    seats: int,
    tokens: int,
    rounds: int,
    suffix: int,
    output_tokens: int,
    num_blocks: int,
    block_size: int,
    window: int,
    window_groups: int,
    full_groups: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    retention: str,
    semantics: str,
    output: Path | None,
) -> None:
    """Seats in turn re-send their prefix with a fresh suffix: the workload of vllm#48435."""
    groups = (
        *(Group(kind="sliding_window", block_size=block_size, window=window),) * window_groups,
        *(Group(kind="full", block_size=block_size),) * full_groups,
    )
    if 2 * seats * rounds > MOST_OPS:
        raise BadInput(f"--seats {seats} --rounds {rounds}: {2 * seats * rounds} ops; the most is {MOST_OPS}")
    chosen = retention_option(retention, ("default", "dense"))
    interval = {"default": DEFAULT, "dense": None}.get(chosen, chosen)
    config = CacheConfig(
        num_blocks=num_blocks,
        groups=groups,
        semantics=semantics,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        retention_interval=int(chosen) if chosen.isdecimal() else interval,
    )
    trace = Trace(
        config=config,
        ops=tuple(round_robin_ops(seats, tokens, rounds, suffix, output_tokens)),
        note=f"round robin: {seats} seats x {tokens} tokens, {rounds} rounds, suffix {suffix}",
    )
    if output is None:
        click.echo(trace.dumps(), nl=False)
    else:
        write_new(output, trace.dumps())


def round_robin_ops(seats: int, tokens: int, rounds: int, suffix: int, output_tokens: int) -> list[Op]:
    """The ops of a round robin, drained after every request."""
    ops: list[Op] = []
    for turn in range(rounds):
        for seat in range(seats):
            prompt = [Span(f"S{seat}", 0, tokens)]
            if suffix:
                prompt.append(Span(f"u{turn}_{seat}", 0, suffix))
            ops += [
                Submit(request=f"r{turn}_{seat}", prompt=tuple(prompt), output_tokens=output_tokens),
                Drain(),
            ]
    return ops
