"""What several commands share: targets by name, and progress on standard error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hitproof.model import BadInput, ModelTarget, Semantics, Target, Trace, shown
from hitproof.replay import env, store
from hitproof.replay.counterexample import Counterexample, read_text
from hitproof.replay.engine import EngineTarget
from hitproof.replay.ladder import RUNGS
from hitproof.replay.manager_target import HEIGHTS
from hitproof.replay.server import ServerTarget

errors = Console(stderr=True, highlight=False)

ENVIRONMENT = "env"
"""``--vllm env``: the vLLM that is installed in the environment of `hitproof vllm env`."""


_COUNTEREXAMPLE = re.compile(r'"(?:finding|trace)"\s*:')


def target_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that choose a target."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--url", help="For --target server: where it listens, as http://127.0.0.1:8000."),
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
                metavar="RELEASE|PATH|env",
                help="vLLM release, source tree, or the environment's own vLLM [default: the trace's release].",
            ),
            click.option(
                "--target",
                type=click.Choice(RUNGS),
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
    name: str,
    semantics: str,
    vllm: str | None,
    python: Path | None,
    device: str,
    url: str | None = None,
    *,
    record: bool = True,
) -> Iterator[Target]:
    """The chosen target; what it needs is fetched first. ``record``: keep every call's state."""
    if device != "cpu" and name != "engine":
        raise BadInput(f"--device {device}: for --target engine only, not {name}; remove it")
    if url is not None and name != "server":
        raise BadInput(f"--url: for --target server only, not {name}; remove it")
    if python is not None and name in ("model", "server"):
        raise BadInput(f"--vllm-python: for a real vLLM, not for --target {name}; remove it")
    if vllm == ENVIRONMENT and name != "server":
        python = env.python(given=python)
        vllm = env.release_of(python)
    if name == "model":
        yield ModelTarget(None if vllm is None else Semantics.of(vllm).release, record=record)
    elif name in HEIGHTS:
        tree = fetch(semantics if vllm is None else vllm)
        if python is not None:
            python = env.python(given=python)
            env.release_of(python)
        loader: Literal["core", "env"] = "core" if python is None else "env"
        with HEIGHTS[name](tree, loader, python, record=record) as real:
            yield real
    elif name == "engine":
        interpreter = env.python(env.NEWEST_CPU if vllm is None else vllm, python)
        with EngineTarget(interpreter, device=device) as engine:
            yield engine
    else:
        if url is None:
            raise BadInput("--target server: which one? Give --url, as http://127.0.0.1:8000")
        if vllm is not None:
            raise BadInput("--vllm: a server says which vLLM it is; remove it")
        yield ServerTarget(url)


def fetch(spec: str) -> store.Tree:
    """The tree of a release or path; a release that is not there yet is downloaded, with progress."""
    try:
        return store.find(spec)
    except BadInput:
        if not store.is_release(spec):
            raise
    with spinner(f"fetching vLLM {spec}") as say:
        return store.add(spec, progress=say)


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error with the last line of progress."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as progress:
        task = progress.add_task(title)
        yield lambda line: progress.update(task, description=f"{title}: {line.strip()[:80]}")


def bar() -> Progress:
    """A progress bar on standard error."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=errors,
    )


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """``text`` of a file or of a tree's output without what a terminal would obey."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def retention_option(text: str, words: tuple[str, ...], option: str = "--retention") -> str:
    """``text`` if it is one of ``words`` or a number of tokens."""
    if text in words or re.fullmatch(r"[0-9]{1,9}", text):
        return text
    raise click.BadParameter(
        f"{shown(text)}: write {', '.join(words)} or a number of tokens", param_hint=option
    )


def seconds(text: str) -> float:
    """``90``, ``90s`` or ``5m`` in seconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh]?)", text)
    value = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0
    if not 0 < value < 1_000_000:
        raise click.BadParameter(
            f"{shown(text)}: write seconds or minutes, for example 60s or 5m", param_hint="--budget"
        )
    return value


def interval_option(text: str | None, option: str) -> int | Literal["keep"] | None:
    """The retention interval that ``under`` sets: None dense, tokens, or "keep" if nothing was given."""
    if text is None:
        return "keep"
    word = retention_option(text, ("dense",), option)
    return None if word == "dense" else int(word)


def load_case(path: Path) -> tuple[Trace, Counterexample | None]:
    """The trace of a trace file, or of a counterexample file, and that counterexample."""
    text = read_text(path)
    if _COUNTEREXAMPLE.search(text):
        case = Counterexample.loads(text, str(path))
        return case.trace, case
    try:
        return Trace.loads(text), None
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from None


def load_trace(path: Path) -> Trace:
    """The trace of a trace file or of a counterexample file."""
    return load_case(path)[0]
