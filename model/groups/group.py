"""What a KV-cache group is, and what every kind of group must answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from hitproof.model.errors import BadInput, NotModelled, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hitproof.model.pool import BlockPool
    from hitproof.model.semantics import Semantics

MODELLED_KINDS = ("full", "sliding_window", "chunked_local")
LATER_KINDS = ("mamba", "cross_attention", "sink_full", "rswa", "circular_buffer", "hisparse")


MOST = 1_000_000_000
"""The most that any number of a config may be, where nothing smaller is said."""


def whole_number(where: str, value: object, least: int, most: int = MOST) -> int:
    """``value`` if it is an integer from ``least`` to ``most``; BadInput naming ``where`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{where}: {shown(value)} is not a whole number; write an integer of at least {least}")
    if value < least:
        raise BadInput(f"{where}: {shown(value)} is too small; it must be at least {least}")
    if value > most:
        raise BadInput(f"{where}: {shown(value)} is too large; it must be at most {most}")
    return value


def cdiv(a: int, b: int) -> int:
    """A / b rounded up."""
    return -(-a // b)


@attrs.frozen(kw_only=True, slots=True)
class Group:
    """One KV-cache group: layers that share block tables.

    ``block_size`` and ``window`` / ``chunk`` / ``extra_retained_tokens`` are in tokens. Groups with
    equal fields have equal vLLM specs and are looked up together.
    """

    kind: str
    block_size: int
    window: int | None = None
    chunk: int | None = None
    extra_retained_tokens: int = 0

    def __attrs_post_init__(self) -> None:
        if self.kind in LATER_KINDS:
            raise NotModelled(
                f"groups: kind {self.kind!r} is not modelled yet; use one of {', '.join(MODELLED_KINDS)}"
            )
        if self.kind not in MODELLED_KINDS:
            raise BadInput(f"groups: unknown kind {shown(self.kind)}; use one of {', '.join(MODELLED_KINDS)}")
        whole_number(f"groups: block_size of the {self.kind} group", self.block_size, 1)
        for field, owner in (("window", "sliding_window"), ("chunk", "chunked_local")):
            value = getattr(self, field)
            if self.kind == owner and value is None:
                raise BadInput(f"groups: a {owner} group needs {field!r} (in tokens)")
            if self.kind != owner and value is not None:
                raise BadInput(f"groups: a {self.kind} group has no {field!r}; remove it")
            if value is not None:
                whole_number(f"groups: {field} of the {owner} group", value, 1)
        whole_number("groups: extra_retained_tokens", self.extra_retained_tokens, 0)
        if self.extra_retained_tokens and self.kind != "sliding_window":
            raise BadInput(f"groups: a {self.kind} group has no 'extra_retained_tokens'; remove it")

    @property
    def label(self) -> str:
        """One short word for reports: ``full:32``, ``window:32/64``, ``chunk:16/64``."""
        if self.kind == "sliding_window":
            return f"window:{self.block_size}/{self.window}"
        if self.kind == "chunked_local":
            return f"chunk:{self.block_size}/{self.chunk}"
        return f"full:{self.block_size}"


class GroupRules(Protocol):
    """What one kind of group answers. Lengths are in tokens, positions in blocks of the group."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def find_hit(
        self,
        pool: BlockPool,
        ids: Sequence[int],
        keys: Sequence[int],
        max_tokens: int,
        drop: bool,
        alignment: int,
    ) -> tuple[list[list[int]], int]:
        """The longest cached prefix that all groups ``ids`` (of this spec) agree on.

        ``keys`` are at this group's block size. ``drop``: give up the last matched block (EAGLE).
        Returns the block ids per group (null block where none is needed) and the length in tokens.
        """

    def write_mask(
        self,
        start: int,
        end: int,
        alignment: int,
        eagle: bool,
        retention: int | None,
        boundaries: Sequence[int],
    ) -> list[bool] | None:
        """Which of the full blocks ``start`` to ``end`` enter the index; None means all."""

    def skipped_tokens(self, computed: int) -> int:
        """Leading tokens that the next token does not attend to, with ``computed`` computed."""

    def admission_cap(self, max_num_batched_tokens: int, max_model_len: int) -> int | None:
        """The most blocks one request holds at once; None if it holds all it ever used."""

    def needed(self, boundary: int) -> range:
        """The blocks that must be cached for a hit of ``boundary`` tokens."""


def rules_of(group: Group, semantics: Semantics) -> GroupRules:
    """The rules of ``group`` in one release."""
    from hitproof.model.groups.chunked_local import ChunkedLocal
    from hitproof.model.groups.full import FullAttention
    from hitproof.model.groups.sliding_window import SlidingWindow

    if group.kind == "full":
        return FullAttention(block_size=group.block_size)
    if group.kind == "sliding_window":
        assert group.window is not None
        return SlidingWindow(
            block_size=group.block_size,
            window=group.window,
            extra_retained_tokens=group.extra_retained_tokens,
            semantics=semantics,
        )
    assert group.chunk is not None
    return ChunkedLocal(block_size=group.block_size, chunk=group.chunk)
