"""The errors hitproof raises on purpose. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class HitproofError(Exception):
    """Base of every error that hitproof raises on purpose."""


class BadInput(HitproofError):
    """A config, trace or command that cannot be run as written."""


class NotModelled(BadInput):
    """A vLLM feature that the model does not describe: refused by name, never approximated."""


def shown(value: object) -> str:
    """``value`` as messages quote it: on one line, and cut in the middle if it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else f"{text[:48]}...{text[-16:]}"


class HarnessFault(HitproofError):
    """hitproof or the code it drives broke; says nothing about any promise."""


class ManagerFault(HitproofError):
    """The manager under test raised where vLLM would raise: an observation, not a harness fault.

    ``kind`` is ``"pool exhausted"`` (``BlockPool.get_new_blocks`` was asked for more blocks than
    are free) or ``"assertion"`` (an ``assert`` of vLLM's manager failed).
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
