"""The terms of the block level: numbers, a running request's slot, and what a turn does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import z3

from hitproof.fuzz.bounded.terms import Bool, both, either, neg

Number = Any
"""An ``int`` or a z3 bit-vector of ``WIDTH``."""

WIDTH = 12


def pick(test: Bool, then: Number, other: Number) -> Number:
    """``then`` if ``test``, else ``other``."""
    if isinstance(test, bool):
        return then if test else other
    if isinstance(then, int) and isinstance(other, int):
        if then == other:
            return then
        return z3.If(test, z3.BitVecVal(then, WIDTH), z3.BitVecVal(other, WIDTH))
    return then if then is other else z3.If(test, then, other)


def differ(a: Bool, b: Bool) -> Bool:
    """Exactly one of them holds."""
    return both(either(a, b), neg(both(a, b)))


def total(tests: Sequence[Bool]) -> Number:
    """How many hold."""
    found: Number = 0
    for test in tests:
        found = found + pick(test, 1, 0)
    return found


@attrs.define(kw_only=True, slots=True)
class Slot:
    """A running request, in the order of admission: which item, tokens computed, and per group and
    position its block (0 null), whether the table reaches there, whether it was offered to the index
    and whether the mask writes it. ``known``: the cache manager has written or adopted something.
    """

    active: Bool
    item: list[Bool]
    computed: Number
    table: list[list[Number]]
    has: list[list[Bool]]
    offered: list[list[Bool]]
    mask: list[list[Bool]]
    known: Bool
    turn: Number
    """Of its submission."""


@attrs.define(kw_only=True, slots=True)
class Turn:
    """What one turn did. ``submits[j]``: item j; ``aborts[k]``: slot k. ``hit``: of the submission;
    ``path[j][p]``: its lookup took path p; ``faults`` and ``met``: by promise, where it breaks and
    where it speaks of the turn at all.
    """

    submits: list[Bool]
    aborts: list[Bool]
    hit: Number = 0
    path: list[list[Bool]] = attrs.Factory(list)
    faults: dict[str, list[Bool]] = attrs.Factory(dict)
    met: dict[str, list[Bool]] = attrs.Factory(dict)

    def blame(self, promise: str, test: Bool, when: Bool = True) -> None:
        """``promise`` speaks of this turn ``when``, and is broken if ``test`` holds then."""
        self.met.setdefault(promise, []).append(when)
        self.faults.setdefault(promise, []).append(both(when, test))

    def broken(self, promise: str) -> Bool:
        """Whether this turn breaks it."""
        return either(*self.faults.get(promise, ()))

    def speaks(self, promise: str) -> Bool:
        """Whether this turn is evidence for it."""
        return either(*self.met.get(promise, ()))


def packed(running: list[Slot], count: int, valid: list[Bool]) -> list[Slot]:
    """The active ones first, in order. All must find a place."""
    slots = list(running)
    for _ in range(len(slots)):
        for n in range(len(slots) - 1):
            move = both(neg(slots[n].active), slots[n + 1].active)
            if move is False:
                continue
            slots[n], slots[n + 1] = (
                _chosen(move, slots[n + 1], slots[n]),
                _chosen(move, slots[n], slots[n + 1]),
            )
    for slot in slots[count:]:
        valid.append(neg(slot.active))
    return slots[:count]


def _chosen(test: Bool, then: Slot, other: Slot) -> Slot:
    def grid(name: str) -> Any:
        return [
            [pick_any(test, a, b) for a, b in zip(x, y, strict=True)]
            for x, y in zip(getattr(then, name), getattr(other, name), strict=True)
        ]

    return Slot(
        active=pick_any(test, then.active, other.active),
        item=[pick_any(test, a, b) for a, b in zip(then.item, other.item, strict=True)],
        computed=pick(test, then.computed, other.computed),
        table=grid("table"),
        has=grid("has"),
        offered=grid("offered"),
        mask=grid("mask"),
        known=pick_any(test, then.known, other.known),
        turn=pick(test, then.turn, other.turn),
    )


def pick_any(test: Bool, then: Any, other: Any) -> Any:
    """``pick`` for Booleans too."""
    if isinstance(then, bool) or isinstance(other, bool) or z3.is_bool(then):
        return either(both(test, then), both(neg(test), other))
    return pick(test, then, other)
