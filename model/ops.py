"""Ops: what a trace asks for. Each prints as one line and parses back."""

from __future__ import annotations

import re
from typing import TypeAlias

import attrs

from hitproof.model.content import NAME, Identity, Span
from hitproof.model.errors import BadInput, shown


@attrs.frozen(kw_only=True, slots=True)
class Submit:
    """A new request: its prompt as spans, how many tokens it generates, and what isolates it.

    ``priority`` is carried for targets that have priorities; first come, first served ignores it.
    """

    request: str
    prompt: tuple[Span, ...]
    output_tokens: int = 1
    identity: Identity = Identity()
    priority: int = 0

    def __str__(self) -> str:
        words = ["submit", self.request, *map(str, self.prompt), f"out={self.output_tokens}"]
        if self.identity.salt is not None:
            words.append(f"salt={self.identity.salt}")
        if self.identity.lora is not None:
            path = self.identity.lora_path
            words.append(f"lora={self.identity.lora}" + (f"@{path}" if path != self.identity.lora else ""))
        if self.priority:
            words.append(f"priority={self.priority}")
        return " ".join(words)


@attrs.frozen(kw_only=True, slots=True)
class Step:
    """Run the scheduler ``count`` steps."""

    count: int = 1

    def __str__(self) -> str:
        return "step" if self.count == 1 else f"step {self.count}"


@attrs.frozen(slots=True)
class Drain:
    """Step until nothing runs or waits, or no progress is possible."""

    def __str__(self) -> str:
        return "drain"


@attrs.frozen(kw_only=True, slots=True)
class Abort:
    """Cancel a request, waiting or running; a finished one is left alone."""

    request: str

    def __str__(self) -> str:
        return f"abort {self.request}"


@attrs.frozen(slots=True)
class Reset:
    """Empty the prefix cache; refused by the manager while any block is in use."""

    def __str__(self) -> str:
        return "reset"


MOST_STEPS = 100_000
"""The most steps that one op may ask for."""

_NUMBER = re.compile(r"[0-9]{1,9}\Z")

Op: TypeAlias = Submit | Step | Drain | Abort | Reset

FORMS = "submit REQUEST SPAN... [out=N] [salt=S] [lora=NAME[@PATH]] [priority=N]; step [N]; drain; abort REQUEST; reset"


def _name(what: str, text: str) -> str:
    if not NAME.match(text):
        raise BadInput(f"{what} {shown(text)}: use letters, digits, '_', '.' and '-', at most 100")
    return text


def _count(what: str, text: str, least: int, most: int = 999_999_999) -> int:
    if not _NUMBER.match(text) or not least <= int(text) <= most:
        raise BadInput(f"{what} {shown(text)}: write a whole number from {least} to {most}")
    return int(text)


def parse_op(line: str) -> Op:
    """Read one op; BadInput says what is wrong with the line."""
    words = line.split()
    if not words:
        raise BadInput(f"empty op; write one of: {FORMS}")
    verb, rest = words[0], words[1:]
    if verb == "submit":
        return _parse_submit(rest)
    if verb == "step" and len(rest) <= 1:
        return Step(count=_count("step", rest[0], 1, MOST_STEPS) if rest else 1)
    if verb == "abort" and len(rest) == 1:
        return Abort(request=_name("request", rest[0]))
    if verb in ("drain", "reset") and not rest:
        return Drain() if verb == "drain" else Reset()
    raise BadInput(f"op {shown(line)}: not understood; write one of: {FORMS}")


def _parse_submit(words: list[str]) -> Submit:
    if not words:
        raise BadInput(f"submit without a request name; write: {FORMS.partition(';')[0]}")
    request = _name("request", words[0])
    prompt: list[Span] = []
    given: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            prompt.append(Span.parse(word))
        elif key not in ("out", "salt", "lora", "priority"):
            raise BadInput(f"submit {request}: unknown setting {shown(key)}; use out, salt, lora or priority")
        elif key in given:
            raise BadInput(f"submit {request}: {key} is given twice")
        else:
            given[key] = value
    if not prompt:
        raise BadInput(f"submit {request}: no prompt; give at least one span such as S:64")
    lora, at, path = given.get("lora", "").partition("@")
    identity = Identity(
        salt=_name("salt", given["salt"]) if "salt" in given else None,
        lora=_name("lora", lora) if "lora" in given else None,
        lora_path=_name("lora path", path if at else lora) if "lora" in given else None,
    )
    return Submit(
        request=request,
        prompt=tuple(prompt),
        output_tokens=_count("out", given.get("out", "1"), 1),
        identity=identity,
        priority=_count("priority", given.get("priority", "0"), 0),
    )
