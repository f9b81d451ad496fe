"""What several commands share: targets by name, and progress on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hitproof.model import BadInput, ModelTarget, Semantics, Target, Trace
from hitproof.replay import env, store
from hitproof.replay.counterexample import Counterexample, read_text
from hitproof.replay.engine import EngineTarget
from hitproof.replay.manager_target import ManagerTarget

errors = Console(stderr=True, highlight=False)

TARGETS = ("model", "manager", "engine")


def target_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that choose a target."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option(
                "--device",
                type=click.Choice(["cpu", "cuda"]),
                default="cpu",
                show_default=True,
                help="For --target engine.",
            ),
            click.option(
                "--vllm-python",
                type=click.Path(path_type=Path),
                help="An interpreter that has vLLM installed.",
            ),
            click.option(
                "--vllm",
                "vllm",
                metavar="RELEASE|PATH",
                help="vLLM release or source tree [default: the trace's release].",
            ),
            click.option(
                "--target",
                type=click.Choice(TARGETS),
                default=default,
                show_default=True,
                help="What runs it.",
            ),
        ):
            command = option(command)
        return command

    return add


@contextmanager
def open_target(
    name: str, semantics: str, vllm: str | None, python: Path | None, device: str
) -> Iterator[Target]:
    """The chosen target; what it needs is fetched first."""
    if name == "model":
        if vllm is not None:
            Semantics.of(vllm)
        yield ModelTarget(vllm)
    elif name == "manager":
        tree = fetch(vllm or semantics)
        with ManagerTarget(tree, "core" if python is None else "env", python) as manager:
            yield manager
    else:
        interpreter = env.python(vllm or env.NEWEST_CPU, python)
        with EngineTarget(interpreter, device=device) as engine:
            yield engine


def fetch(spec: str) -> store.Tree:
    """The tree of a release or path; a release that is not there yet is downloaded, with progress."""
    try:
        return store.find(spec)
    except BadInput:
        if Path(spec).exists():
            raise
    with spinner(f"fetching vLLM {spec}") as say:
        return store.add(spec, progress=say)


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error with the last line of progress."""
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=errors, transient=True
    ) as progress:
        task = progress.add_task(title)
        yield lambda line: progress.update(task, description=f"{title}: {line.strip()[:80]}")


def bar() -> Progress:
    """A progress bar on standard error."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=errors,
    )


def load_trace(path: Path) -> Trace:
    """The trace of a trace file or of a counterexample file."""
    text = read_text(path)
    if '"finding"' in text:
        return Counterexample.loads(text, str(path)).trace
    try:
        return Trace.loads(text)
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from None
