"""Unbounded proofs at their abstraction, and the seeded bugs that refute them."""

import pytest

from hitproof.fuzz.bounded.invariants import ACCOUNTING, BUGS, accounting, sessions
from hitproof.fuzz.bounded.solver import Limits
from hitproof.properties.mutants import MUTANTS

SECONDS = 30


def test_accounting_holds_for_any_pool():
    """All four at once: one tracked block among any number, any order of operations."""
    assert accounting(Limits.of(SECONDS)).status == "unsat"
    assert set(BUGS.values()) == set(ACCOUNTING)


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_refutes_it(bug):
    """The bug breaks the promise that it is registered for."""
    assert next(mutant for mutant in MUTANTS if mutant.id == bug).breaks in (BUGS[bug], "hit-content")
    assert accounting(Limits.of(SECONDS), BUGS[bug], bug).status == "sat"


def test_what_fits_survives_for_any_number_of_sessions():
    """Retention 0 from 0.24 on; refuted one block short, and where dead blocks join the tail."""
    assert sessions(Limits.of(SECONDS)).status == "unsat"
    assert sessions(Limits.of(SECONDS), short=1).status == "sat"
    assert sessions(Limits.of(SECONDS), dense=True).status == "sat"
