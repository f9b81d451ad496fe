"""``TinyServer``: vLLM's own API server on this machine, with the tiny model of a trace's config."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path

import attrs

from hitproof.model import BadInput, CacheConfig, HarnessFault
from hitproof.model.semantics import parse_release
from hitproof.replay import env, tiny_model
from hitproof.replay.engine import environment
from hitproof.replay.engine_worker import RETENTION, RETENTION_VARIABLE, engine_arguments

PR_SET_PDEATHSIG = 1
TAIL_LINES = 40
RETENTION_ARGUMENT_SINCE = (0, 29, 0)


class TinyServer:
    """Starts ``python -m vllm.entrypoints.openai.api_server`` and ends it with what it started.

    It listens on 127.0.0.1 alone. ``port`` 0 takes a free one. ``resettable``: offer
    ``/reset_prefix_cache`` and ``/server_info`` (vLLM's development mode). ``details``: show cached tokens.
    """

    def __init__(
        self,
        config: CacheConfig,
        python: Path,
        *,
        port: int = 0,
        resettable: bool = True,
        details: bool = True,
        timeout_s: float = 300,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.version = env.release_of(python)
        config = attrs.evolve(config, semantics=self.version)
        tiny_model.check_config(config)
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        if port and not _is_free(port):
            raise BadInput(f"--port {port}: something listens there already; choose another")
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._folder = tempfile.TemporaryDirectory(prefix="hitproof-model-")
        tiny_model.write(config, Path(self._folder.name))
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *flags(config, self._folder.name, self.version)]
        if details:
            command.append("--enable-prompt-tokens-details")
        variables = {
            k: v for k, v in environment(self.version).items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"
        }
        variables["VLLM_SERVER_DEV_MODE"] = "1" if resettable else "0"
        if not _retention_is_argument(self.version) and config.retention is not None:
            variables[RETENTION_VARIABLE] = str(config.retention)
        given = {**os.environ, **variables}
        self._process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**given, **tiny_model.variables(Path(self._folder.name), given)},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait(config, timeout_s, progress)
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.rstrip())

    def _wait(self, config: CacheConfig, timeout_s: float, progress: Callable[[str], None]) -> None:
        until = time.monotonic() + timeout_s
        while True:
            if self._process.poll() is not None:
                self._reader.join(timeout=5)
                raise HarnessFault(
                    f"the server ended while starting (exit status {self._process.returncode}); "
                    "end of its output:\n" + "\n".join(self._tail)
                )
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):  # noqa: S310
                return
            if time.monotonic() > until:
                raise HarnessFault(
                    f"the server does not answer after {timeout_s:g} s; end of its output:\n"
                    + "\n".join(self._tail)
                )
            progress(self._tail[-1] if self._tail else "starting")
            time.sleep(0.5)

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit status."""
        return self._process.wait()

    def close(self) -> None:
        """End the server and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> TinyServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _end_with_parent() -> None:
    """Have the server end when this process does, however it ends (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _retention_is_argument(release: str) -> bool:
    return parse_release(release) >= RETENTION_ARGUMENT_SINCE


def flags(config: CacheConfig, model: str, release: str) -> list[str]:
    """The engine's arguments as that release's API server takes them."""
    out: list[str] = []
    for name, value in engine_arguments(config, model, "cpu", release).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        elif name != RETENTION or _retention_is_argument(release):
            out += [f"--{flag}", str(value)]
    return out


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
