"""Terms that are Python values where they can be: an encoding evaluates with the code that states it.

Every encoding is written once over these functions. Given z3 variables it makes a formula; given
integers and booleans it computes, which is how random runs are checked against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import z3

from hitproof.model import RELEASES

STATED = RELEASES[RELEASES.index("0.19.0") :]
"""Releases whose rules the encodings state; what came before adopts hits and loops otherwise."""

Int: TypeAlias = Any
"""An ``int`` or a z3 integer term."""
Bool: TypeAlias = Any
"""A ``bool`` or a z3 Boolean term."""


def ite(test: Bool, then: Any, other: Any) -> Any:
    """``then`` if ``test``, else ``other``."""
    if isinstance(test, bool):
        return then if test else other
    if then is other or (not z3.is_expr(then) and not z3.is_expr(other) and then == other):
        return then
    if isinstance(then, bool) or isinstance(other, bool) or z3.is_bool(then):
        return either(both(test, then), both(neg(test), other))
    return z3.If(test, then, other)


def neg(a: Bool) -> Bool:
    """Not ``a``."""
    return not a if isinstance(a, bool) else z3.Not(a)


def both(*parts: Bool) -> Bool:
    """All of ``parts``."""
    left = [part for part in parts if part is not True]
    if any(part is False for part in left):
        return False
    if not left:
        return True
    return left[0] if len(left) == 1 else z3.And(left)


def either(*parts: Bool) -> Bool:
    """Some of ``parts``."""
    left = [part for part in parts if part is not False]
    if any(part is True for part in left):
        return True
    if not left:
        return False
    return left[0] if len(left) == 1 else z3.Or(left)


def implies(a: Bool, b: Bool) -> Bool:
    """``b`` if ``a``."""
    return either(neg(a), b)


def least(a: Int, b: Int) -> Int:
    """The smaller one."""
    return ite(a <= b, a, b)


def most(a: Int, b: Int) -> Int:
    """The larger one."""
    return ite(a >= b, a, b)


def count(parts: Iterable[Bool]) -> Int:
    """How many hold."""
    total: Int = 0
    for part in parts:
        if part is True:
            total = total + 1
        elif part is not False:
            total = total + z3.If(part, 1, 0)
    return total


def product(a: Int, b: Int, least_a: int, most_a: int) -> Int:
    """``a * b``, linear by cases on ``a``, which must lie in ``least_a`` to ``most_a``."""
    if isinstance(a, int) or isinstance(b, int):
        return a * b
    term = most_a * b
    for value in range(most_a - 1, least_a - 1, -1):
        term = z3.If(a == value, value * b, term)
    return term
