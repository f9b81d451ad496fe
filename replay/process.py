"""Worker processes: the only place where code of a vLLM tree runs.

A worker is a Python interpreter running one of ``replay``'s worker modules. Requests and answers are
pickled objects over a private pipe pair; whatever the tree prints goes to a bounded tail that is
shown when the worker crashes, hangs or floods its output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hitproof.model import BadInput, HarnessFault, HitproofError

ROOT = Path(__file__).resolve().parent.parent
"""The folder that is the ``hitproof`` package."""

TAIL_BYTES = 64 * 1024
FLOOD_BYTES = 32 * 1024 * 1024
START = "start"
"""The first answer; a worker whose start raises ends."""

_BOOTSTRAP = """\
import importlib, sys, types
root, attrs_path, module, receive, send, arguments = {root!r}, {attrs_path!r}, {module!r}, {receive}, {send}, {arguments!r}
try:
    import attrs
except ImportError:
    sys.path.append(attrs_path)
package = types.ModuleType("hitproof")
package.__path__ = [root]
sys.modules["hitproof"] = package
importlib.import_module("hitproof.replay.process").serve(module, receive, send, arguments)
"""


class Worker:
    """One worker process. ``module`` offers ``handlers(*arguments) -> {name: function}``.

    ``timeout_s`` bounds every call. Every failure of the process is a HarnessFault that shows the
    end of its output; errors that the handler raises on purpose are raised here again.
    """

    def __init__(
        self,
        module: str,
        arguments: tuple[Any, ...] = (),
        *,
        name: str,
        python: str | Path = sys.executable,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._tail: deque[bytes] = deque()
        self._printed = 0
        child_receive, parent_send = os.pipe()
        parent_receive, child_send = os.pipe()
        import attr

        code = _BOOTSTRAP.format(
            root=str(ROOT),
            attrs_path=str(Path(attr.__file__).resolve().parent.parent),
            module=module,
            receive=child_receive,
            send=child_send,
            arguments=arguments,
        )
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [str(python), "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_receive, child_send),
                env={**os.environ, "PYTHONHASHSEED": "0", **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise BadInput(f"{python}: cannot start this interpreter: {error}") from None
        finally:
            os.close(child_receive)
            os.close(child_send)
        self._send = Connection(parent_send, readable=False)
        self._receive = Connection(parent_receive, writable=False)
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        try:
            self._answer(START)
        except BaseException:
            self.close()
            raise

    def call(self, handler: str, *arguments: Any) -> Any:
        """Run one handler in the worker and return its answer."""
        try:
            self._send.send((handler, arguments))
        except (OSError, ValueError):
            raise self._fault(f"the worker ended before {handler}") from None
        return self._answer(handler)

    def _answer(self, what: str) -> Any:
        try:
            if not self._receive.poll(self.timeout_s):
                self.close()
                self._await_end()
                raise self._fault(f"no answer to {what} within {self.timeout_s:g} s")
            kind, value = self._receive.recv()
        except (EOFError, OSError):
            self._await_end()
            flooded = "its output flooded" if self._printed > FLOOD_BYTES else "it crashed"
            raise self._fault(f"{flooded} during {what} (exit status {self._process.returncode})") from None
        if kind == "error":
            raise value
        if kind == "crash":
            if what == START:
                self._await_end()
            raise self._fault(f"{what} raised in the worker:\n{value}")
        return value

    def _await_end(self) -> None:
        """Until the process has ended and all that it printed is read, so that a fault can show it."""
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.close()
        self._reader.join(timeout=5)

    def _fault(self, what: str) -> HarnessFault:
        tail = b"".join(self._tail).decode(errors="replace").strip()
        return HarnessFault(f"{self.name}: {what}" + (f"\nend of its output:\n{tail}" if tail else ""))

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), 8192):
            self._tail.append(chunk)
            self._printed += len(chunk)
            while sum(map(len, self._tail)) > TAIL_BYTES:
                self._tail.popleft()
            if self._printed > FLOOD_BYTES:
                self._process.kill()
                return

    def close(self) -> None:
        """End the process and those that it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._send.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _end_with(parent: int) -> None:
    """End this process when its parent has gone: a call that hangs must not outlive it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve(module: str, receive: int, send: int, arguments: tuple[Any, ...]) -> None:
    """The worker's side: answer requests until the pipe closes."""
    import importlib
    import traceback

    requests = Connection(receive, writable=False)
    answers = Connection(send, readable=False)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def attempt(function: Callable[..., Any], *values: Any) -> tuple[str, Any]:
        try:
            return "ok", function(*values)
        except HitproofError as error:
            return "error", error
        except Exception:
            return "crash", traceback.format_exc()[-TAIL_BYTES:]

    kind, value = attempt(lambda: importlib.import_module(module).handlers(*arguments))
    answers.send((kind, None if kind == "ok" else value))
    while kind == "ok":
        try:
            handler, values = requests.recv()
        except EOFError:
            return
        answers.send(attempt(value[handler], *values))
