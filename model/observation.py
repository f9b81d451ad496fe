"""What running a trace showed. The same records come from the model and from real vLLM."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from hitproof.model.pool import Event
from hitproof.model.trace import Trace

Blocks = tuple[int, ...]
Tables = tuple[Blocks, ...]
"""Block ids per group."""


class Unseen:
    """The type of ``UNSEEN``."""

    def __repr__(self) -> str:
        return "UNSEEN"

    def __reduce__(self) -> str:
        return "UNSEEN"


UNSEEN = Unseen()
"""A target cannot show this: compatible with anything, and counted."""


@attrs.frozen(kw_only=True, slots=True)
class Snapshot:
    """A manager's whole state, comparable field by field.

    ``keys``: per block its group, own key and sorted aliases, None without a key. ``index``: per
    group the keys in order with the blocks that hold them, oldest first. ``tables``: per request.
    """

    ref_count: Blocks
    free_queue: Blocks
    keys: tuple[tuple[int, int, tuple[int, ...]] | None, ...]
    index: tuple[tuple[tuple[int, Blocks], ...], ...]
    tables: tuple[tuple[str, Tables], ...]


@attrs.frozen(kw_only=True, slots=True)
class Lookup:
    """A prefix-cache lookup: the combined hit and junction in tokens, and block ids per group."""

    hit_tokens: int
    blocks: Tables
    junction: int = 0


Call = Literal["add", "append", "step", "lookup", "allocate", "free", "reset"]


@attrs.frozen(kw_only=True, slots=True)
class Observation:
    """One call on a manager and what it showed.

    ``op`` is the trace op it belongs to. ``request`` is None for step and reset. For ``allocate``
    ``computed`` to ``computed + new_tokens`` are the tokens computed by the step, ``hit`` the lookup
    it adopts, ``blocks`` the new blocks per group or None if refused. ``keys``: the request's new
    block keys (add, append). ``ok``: False if allocate or reset was refused. ``fault``: what the
    manager raised; nothing follows it.
    """

    op: int
    call: Call
    request: str | None = None
    computed: int = 0
    new_tokens: int = 0
    must_fit: bool = False
    beside: bool = False
    hit: Lookup | None = None
    again: Lookup | None = None
    blocks: Tables | None = None
    keys: tuple[int, ...] = ()
    ok: bool = True
    fault: str = ""
    events: tuple[Event, ...] = ()
    snapshot: Snapshot | Unseen = UNSEEN


@attrs.define(kw_only=True, slots=True)
class RequestResult:
    """What became of one request. ``hit_tokens`` is the hit at its first admission."""

    id: str
    prompt_tokens: int
    hit_tokens: int | None = None
    preemptions: int = 0
    finished: bool = False
    aborted: bool = False

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "preemptions": self.preemptions,
            "finished": self.finished,
        }


@attrs.frozen(kw_only=True, slots=True)
class Run:
    """One trace run on one target. ``stuck``: the op at which a drain found no progress possible."""

    trace: Trace
    target: str
    version: str
    requests: tuple[RequestResult, ...]
    observations: tuple[Observation, ...] = ()
    stuck: int | None = None
    fault: str = ""

    @property
    def hits(self) -> tuple[int | None, ...]:
        """Hit tokens per request, in submission order."""
        return tuple(result.hit_tokens for result in self.requests)

    @property
    def sees(self) -> frozenset[str]:
        """What this run shows: always "hits"; "calls" and "state" from a manager."""
        if not self.observations:
            return frozenset({"hits"})
        return frozenset({"hits", "calls", "state"})
