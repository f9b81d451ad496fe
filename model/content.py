"""Token content as spans of named streams, and the block keys made from it.

``S:512`` is the first 512 tokens of stream S, ``S[100:200]`` a slice, ``@r1`` the output of request
r1. Equal spans are equal tokens; tokens of different streams are never equal. A key stands for a
vLLM block hash: two keys are equal exactly when vLLM's hash inputs are (``hash_block_tokens`` and
``generate_block_hash_extra_keys`` of ``vllm/v1/core/kv_cache_utils.py``).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING

import attrs

from hitproof.model.errors import BadInput, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

Piece = tuple[str, int, int]
"""(stream, first token, one past the last token)."""

_SPAN = re.compile(
    r"(?P<stream>[A-Za-z_][A-Za-z0-9_.-]{0,99})"
    r"(?::(?P<length>[0-9]{1,18})|\[(?P<start>[0-9]{1,18}):(?P<stop>[0-9]{1,18})\])\Z"
)
_OUTPUT = re.compile(r"@(?P<request>[A-Za-z0-9_.-]{1,100})\Z")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}\Z")


@attrs.frozen(slots=True)
class Span:
    """Tokens ``start`` to ``stop`` of ``stream``; ``stop`` None means the whole output of a request."""

    stream: str
    start: int
    stop: int | None

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read one span; BadInput with the accepted forms otherwise."""
        if output := _OUTPUT.match(text):
            return cls(f"@{output['request']}", 0, None)
        match = _SPAN.match(text)
        if match is None:
            raise BadInput(f"span {shown(text)}: write STREAM:LENGTH, STREAM[START:STOP] or @REQUEST")
        start = int(match["start"] or 0)
        stop = int(match["stop"] if match["length"] is None else match["length"])
        if stop <= start:
            raise BadInput(f"span {shown(text)}: it has no tokens; make its length at least 1")
        return cls(match["stream"], start, stop)

    def __str__(self) -> str:
        if self.stop is None:
            return self.stream
        return f"{self.stream}:{self.stop}" if self.start == 0 else f"{self.stream}[{self.start}:{self.stop}]"


class Tokens:
    """A growing sequence of tokens as maximal pieces. Lengths and positions are in tokens."""

    __slots__ = ("_ends", "pieces")

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces: list[Piece] = []
        self._ends: list[int] = []
        for piece in pieces:
            self.append(piece)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, piece: Piece) -> None:
        """Add ``piece`` at the end, merged with the last one where they meet."""
        stream, start, stop = piece
        if self.pieces and self.pieces[-1][0] == stream and self.pieces[-1][2] == start:
            self.pieces[-1] = (stream, self.pieces[-1][1], stop)
            self._ends[-1] += stop - start
        else:
            self.pieces.append(piece)
            self._ends.append(len(self) + stop - start)

    def slice(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The pieces of tokens ``start`` to ``stop``."""
        found = []
        i = bisect_right(self._ends, start)
        while start < stop:
            stream, first, last = self.pieces[i]
            offset = self._ends[i] - (last - first)
            end = min(stop, self._ends[i])
            found.append((stream, first + start - offset, first + end - offset))
            start = end
            i += 1
        return tuple(found)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens ``a`` and ``b`` share."""
    shared = 0
    for (stream_a, start_a, stop_a), (stream_b, start_b, stop_b) in zip(a.pieces, b.pieces, strict=False):
        if stream_a != stream_b or start_a != start_b:
            break
        shared += min(stop_a, stop_b) - start_a
        if stop_a != stop_b:
            break
    return shared


@attrs.frozen(kw_only=True, slots=True)
class Identity:
    """What beside its tokens makes a request's cache its own: salt, LoRA name and path."""

    salt: str | None = None
    lora: str | None = None
    lora_path: str | None = None

    def words(self, start: int, *, tagged: bool) -> tuple[object, ...]:
        """The extra hash input of a block that starts at token ``start``."""
        found: list[object] = []
        if self.lora is not None:
            found.append(("lora", self.lora, self.lora_path) if tagged else self.lora)
        if self.salt is not None and start == 0:
            found.append(("cache_salt", self.salt) if tagged else self.salt)
        return tuple(found)

    def event_words(self, start: int) -> tuple[str, ...] | None:
        """The same as a KV event shows it: names only, None if there are none."""
        found = tuple(word for word in (self.lora, self.salt if start == 0 else None) if word is not None)
        return found or None


class KeyTable:
    """Interns block keys: 0, 1, 2, ... in the order in which new contents appear.

    A key's number depends only on the order of appearance, so two tables that saw the same requests
    in the same order agree key by key exactly when they agree on which contents are equal.
    """

    def __init__(self, block_size: int, *, tagged: bool) -> None:
        self.block_size = block_size
        self._tagged = tagged
        self._number: dict[tuple[int, tuple[object, ...], tuple[Piece, ...]], int] = {}
        self._runs: dict[tuple[tuple[object, ...], tuple[object, ...], str], list[int]] = {}

    def extend(self, keys: list[int], tokens: Tokens, identity: Identity) -> None:
        """Append to ``keys`` the keys of all full blocks of ``tokens`` not in it yet."""
        if not keys and tokens.pieces:
            self._first_piece(keys, tokens, identity)
        size = self.block_size
        for i in range(len(keys), len(tokens) // size):
            words = identity.words(i * size, tagged=self._tagged)
            parent = keys[-1] if keys else -1
            content = (parent, words, tokens.slice(i * size, i * size + size))
            keys.append(self._number.setdefault(content, len(self._number)))

    def _first_piece(self, keys: list[int], tokens: Tokens, identity: Identity) -> None:
        """The blocks inside the first piece, remembered per stream: long prefixes cost a copy."""
        stream, first, last = tokens.pieces[0]
        if first != 0:
            return
        size, count = self.block_size, last // self.block_size
        at_start = identity.words(0, tagged=self._tagged)
        later = identity.words(size, tagged=self._tagged)
        run = self._runs.setdefault((at_start, later, stream), [])
        for i in range(len(run), count):
            words = later if i else at_start
            content = (run[-1] if run else -1, words, ((stream, i * size, i * size + size),))
            run.append(self._number.setdefault(content, len(self._number)))
        keys.extend(run[:count])
