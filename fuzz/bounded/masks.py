"""``mask-covers-lookup`` as arithmetic: what one request writes against what a later lookup reads.

One sliding-window group beside one full-attention group, nothing evicted, prefill in one step. Block
sizes, retention and EAGLE are concrete in each case; the window (``q`` blocks, rounded up) and the
prompt's length are terms. Read beside ``reachable_block_mask`` and ``find_longest_cache_hit`` of
``vllm/v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import z3

from hitproof.fuzz.bounded.answer import Bound
from hitproof.fuzz.bounded.solver import Reply
from hitproof.fuzz.bounded.terms import Bool, Int, both, either, ite, least, most, neg
from hitproof.model import BadInput, CacheConfig, Drain, Group, Semantics, Span, Submit, Trace, cdiv

UNITS = 5
"""Prompts are at most so many scheduler blocks and one block long."""

MOST_SIZE = 4
"""Block sizes are 1 to this (tokens), if nothing else is asked for."""

BUGS = {
    "tail-one-block-short": "short_tail",
    "mask-without-eagle": "forgets_eagle",
    "scan-stops-at-miss": "stops_at_miss",
}
"""Seeded bugs that the arithmetic states, by the mutants' ids."""

Promise = Literal["mask-covers-lookup", "resend-hits", "extension-hits"]
PROMISES: tuple[Promise, ...] = ("mask-covers-lookup", "resend-hits", "extension-hits")


@attrs.frozen(kw_only=True, slots=True)
class Case:
    """Concrete settings: ``window_size`` and ``full_size`` in tokens; ``retention`` as in
    ``CacheConfig``. ``short_tail`` and ``forgets_eagle`` are seeded bugs of the mask, ``stops_at_miss``
    of the lookup (``BUGS``).
    """

    rules: Semantics
    window_size: int
    full_size: int
    retention: int | None
    eagle: bool
    short_tail: bool = False
    forgets_eagle: bool = False
    stops_at_miss: bool = False

    @property
    def unit(self) -> int:
        """The scheduler block size (tokens)."""
        return math.lcm(self.window_size, self.full_size)

    @property
    def key_size(self) -> int:
        """Tokens per block hash."""
        return math.gcd(self.window_size, self.full_size)

    def config(self, q: int, length: int) -> CacheConfig:
        """The config of a window of exactly ``q`` blocks and a pool that fits ``length`` tokens, twice."""
        settings: dict[str, Any] = {"retention_interval": self.retention} if self.rules.retention else {}
        blocks = cdiv(length, self.window_size) + cdiv(length, self.full_size)
        return CacheConfig(
            num_blocks=2 * blocks + 3,
            groups=(
                Group(
                    kind="sliding_window",
                    block_size=self.window_size,
                    window=max(1, q * self.window_size + 1),
                ),
                Group(kind="full", block_size=self.full_size),
            ),
            semantics=self.rules.release,
            use_eagle=self.eagle,
            max_model_len=max(2048, length + 1),
            **settings,
        )


def promised(case: Case, length: Int) -> Int:
    """What a resend of ``length`` tokens hits if nothing is lost."""
    boundary = _down(length - 1, case.unit)
    return most(0, boundary - case.unit) if case.eagle else boundary


def lookup(case: Case, q: Int, length: Int, again: Int, longest: int) -> Int:
    """The hit of a prompt of ``again`` tokens whose first ``length`` were written; both at most
    ``longest``.
    """
    once = case.rules.eagle_drop == "once_per_candidate"
    ahead = once and case.eagle
    limit = again - 1
    if case.rules.eagle_lookahead_limit == "hashes":
        limit = _down(again, case.key_size)
    ask = least(again - 1 + case.full_size, limit) if ahead else again - 1
    written = _cacheable(case, length, case.full_size)
    hit = least(_down(ask, case.full_size), _down(written, case.full_size))
    if case.eagle:
        hit = most(0, hit - case.full_size)
    hit = _down(hit, case.unit)
    ask = least(hit + case.window_size, limit) if ahead else hit
    return _window_hit(case, q, length, ask, longest)


def _window_hit(case: Case, q: Int, length: Int, ask: Int, longest: int) -> Int:
    """Right to left, as ``SlidingWindowManager.find_longest_cache_hit`` does."""
    size, per = case.window_size, case.unit // case.window_size
    need = q + 1 if case.eagle else q
    shift = 0 if case.eagle and case.rules.eagle_window_alignment == "after_drop" else 1
    run: Int = 0
    end: Int = 0
    found: Bool = False
    missed: Bool = False
    for i in range(longest // size - 1, -1, -1):
        asked = both((i + 1) * size <= ask, neg(found))
        cached = _written(case, q, length, i)
        missed = either(missed, both(asked, (i + 2) * size > ask, neg(cached)))
        joins = both(asked, cached, either(run > 0, (i + shift) % per == 0))
        run = ite(joins, run + 1, ite(both(asked, neg(cached)), 0, run))
        now = both(joins, run >= need)
        end = ite(now, i + run, end)
        found = either(found, now)
    end = ite(found, end, run - _modulo(run, per))
    if case.stops_at_miss:
        end = ite(either(missed, ask < size), 0, end)
    if case.eagle:
        dropped = most(0, end - 1)
        end = dropped - _modulo(dropped, per)
    return end * size


def _written(case: Case, q: Int, length: Int, i: int) -> Bool:
    """Whether block ``i`` of the window group enters the index."""
    size, per = case.window_size, case.unit // case.window_size
    full = (i + 1) * size <= _cacheable(case, length, size)
    if case.short_tail:
        q = most(0, q - 1)
    kind = case.rules.write_mask
    if kind == "none":
        return full
    if kind == "aligned":
        all_kept = either(per <= 1, q >= per)
        return both(full, either(all_kept, i % per >= per - q))
    eagle = case.eagle and not case.forgets_eagle
    need, shift = (q + 1, 1) if eagle else (q, 0)
    kept: Bool = False
    segment = case.unit if case.retention is None else case.retention
    if segment:
        per_segment = segment // size
        kept = either(need >= per_segment, both(i >= shift, (i - shift) % per_segment >= per_segment - need))
    if case.retention is not None:
        for boundary in _boundaries(case, length):
            stop = _blocks(_down(boundary, case.unit), size) + shift
            kept = either(kept, both(i >= stop - need, i < stop))
    return both(full, kept)


def _boundaries(case: Case, length: Int) -> list[Int]:
    if not (case.eagle and case.rules.replay_boundary == "eagle_checkpoints"):
        return [length - 1]
    return [most(_down(at, case.unit) - case.unit, 0) for at in (length - 1, length)]


def _cacheable(case: Case, length: Int, size: int) -> Int:
    """Tokens that are offered to the index (``HybridKVCacheCoordinator.cache_blocks``)."""
    if case.rules.write_mask == "none":
        return length
    aligned = _down(length, case.unit)
    if case.rules.write_mask == "reachable" and case.eagle:
        return ite(aligned > 0, least(length, aligned + size), aligned)
    return aligned


def _blocks(tokens: Int, size: int) -> Int:
    return tokens / size if z3.is_expr(tokens) else tokens // size


def _down(tokens: Int, unit: int) -> Int:
    return _blocks(tokens, unit) * unit


def _modulo(a: Int, b: int) -> Int:
    return a % b


def cases(release: str, window_size: int, full_size: int, **bug: bool) -> list[Case]:
    """Every retention (dense, 0, one to three scheduler blocks) and EAGLE setting that the release
    accepts.
    """
    rules = Semantics.of(release)
    unit = math.lcm(window_size, full_size)
    found = []
    for retention in (None, 0, unit, 2 * unit, 3 * unit) if rules.retention else (None,):
        for eagle in (False, True):
            case = Case(
                rules=rules,
                window_size=window_size,
                full_size=full_size,
                retention=retention,
                eagle=eagle,
                **bug,
            )
            try:
                case.config(1, case.unit)
            except BadInput:
                continue
            found.append(case)
    return found


def bounds(
    promise: Promise,
    release: str,
    *,
    most_size: int = MOST_SIZE,
    eagle: bool | None = None,
    retention: Literal["any", "dense", "0"] = "any",
    equal: bool | None = None,
    least_window: int = 1,
    **bug: bool,
) -> Iterator[Bound]:
    """One question per pair of block sizes, smallest scheduler block first. ``eagle``, ``retention``
    and ``equal`` (block sizes) narrow the cases; ``least_window`` is the least window in blocks.
    """
    every = range(1, most_size + 1)
    pairs = sorted(((s, f) for s in every for f in every), key=lambda p: (math.lcm(*p), sum(p), p))
    for s, f in pairs:
        chosen = [
            case
            for case in cases(release, s, f, **bug)
            if (eagle is None or case.eagle is eagle)
            and (retention == "any" or case.retention == {"dense": None, "0": 0}[retention])
            and (equal is None or (s == f) is equal)
        ]
        if chosen:
            yield bound(promise, chosen, least_window)


def text(most_size: int, eagle: bool | None, retention: str, equal: bool | None) -> str:
    """The class of runs in words, for bounds."""
    sizes = {None: "any", True: "equal", False: "different"}[equal]
    kept = "dense, 0 and 1 to 3 scheduler blocks" if retention == "any" else retention
    drop = {None: "EAGLE on and off", True: "EAGLE on", False: "EAGLE off"}[eagle]
    return (
        f"one window group beside one full, {sizes} block sizes of 1 to {most_size} tokens, any window of at least "
        f"1 block, prompts of up to {UNITS} scheduler blocks, retention {kept}, {drop}, nothing evicted"
    )


def bound(promise: Promise, chosen: list[Case], least_window: int) -> Bound:
    """Cases of one pair of block sizes."""
    unit, size = chosen[0].unit, max(chosen[0].window_size, chosen[0].full_size)
    longest = UNITS * unit + size
    q, length, which = z3.Int("q"), z3.Int("length"), z3.Int("case")
    again: Int = z3.Int("again") if promise == "extension-hits" else length
    premise = [q >= least_window, length >= 1, again >= length, again <= longest, which >= 0]
    premise += [
        which < len(chosen),
        either(*(both(which == k, promised(c, length) > 0) for k, c in enumerate(chosen))),
    ]
    if promise == "extension-hits":
        premise.append(again > length)
    short = [
        both(which == k, lookup(case, q, length, again, longest) < promised(case, length))
        for k, case in enumerate(chosen)
    ]

    def decoded(reply: Reply) -> Trace:
        case = chosen[reply.value(which)]
        return decode(promise, case, reply.value(q), reply.value(length), reply.value(again))

    return Bound(
        text=f"window:{chosen[0].window_size} full:{chosen[0].full_size}",
        premise=premise,
        broken=[either(*short)],
        smallest=[("prompt", length), ("window blocks", q), ("", again), ("", which)],
        decode=decoded,
    )


def decode(promise: Promise, case: Case, q: int, length: int, again: int) -> Trace:
    """One request; for the other two promises, one more that repeats or extends it."""
    first = Submit(request="r0", prompt=(Span("A", 0, length),), output_tokens=1)
    ops: list[Any] = [first, Drain()]
    if promise != "mask-covers-lookup":
        more = (Span("B", 0, again - length),) if again > length else ()
        ops += [Submit(request="r1", prompt=(*first.prompt, *more), output_tokens=1), Drain()]
    return Trace(config=case.config(q, again + 1), ops=tuple(ops))
