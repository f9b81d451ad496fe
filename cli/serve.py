"""``hitproof serve-tiny``."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from hitproof.cli.common import load_trace, spinner
from hitproof.cli.scaling import at_scale, scale_option
from hitproof.model import CacheConfig, Group, HarnessFault
from hitproof.replay import env
from hitproof.replay.serve_tiny import TinyServer

DEFAULT = CacheConfig(
    num_blocks=400,
    groups=(
        *(Group(kind="sliding_window", block_size=32, window=64),) * 5,
        Group(kind="full", block_size=32),
    ),
    semantics=env.NEWEST_CPU,
)
"""What is served without a trace: the config of CE-0003."""


@click.command("serve-tiny")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@scale_option
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one."
)
@click.option("--vllm", metavar="RELEASE", default=env.NEWEST_CPU, show_default=True, help="vLLM release.")
@click.option(
    "--vllm-python", type=click.Path(path_type=Path), help="An interpreter that has vLLM installed."
)
@click.option("--no-reset", is_flag=True, help="Do not offer /reset_prefix_cache (no development mode).")
def serve_tiny_command(
    trace: Path | None, scale: str, port: int, vllm: str, vllm_python: Path | None, no_reset: bool
) -> None:
    """Serve the tiny model with TRACE's settings on this machine's CPU, until Ctrl-C.

    It is vLLM's own API server with random weights: for trying `replay --target server` and `probe`.
    Without TRACE: 5 sliding-window groups and 1 full group, blocks of 32, 400 of them.
    """
    python = env.python(vllm, vllm_python)
    config, words = DEFAULT, "TRACE"
    if trace is not None:
        loaded, factor = at_scale(load_trace(trace), scale)
        config, words = loaded.config, f"{trace}" + ("" if factor == 1 else f" --scale {factor}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with spinner("starting the server") as say:
        server = TinyServer(config, python, port=port, resettable=not no_reset, progress=say)
    with server:
        click.echo(f"vLLM {server.version} with a tiny model at {server.url}; Ctrl-C ends it")
        click.echo(f"  hitproof replay {words} --target server --url {server.url}")
        click.echo(f"  hitproof probe --url {server.url} --seats 4 --tokens 512")
        try:
            status = server.wait()
        except KeyboardInterrupt:
            click.echo("stopped")
            return
    raise HarnessFault(f"the server ended by itself (exit status {status})")
