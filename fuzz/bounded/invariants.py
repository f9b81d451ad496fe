"""Unbounded proofs, at a stated abstraction, by Z3's Horn solver (Spacer) or by induction.

``accounting``: one tracked block among any number. Its ref count, whether it is queued, keyed and
indexed; of the others only how many are queued and how many are in use. Any operations of a pool in
any order, for any pool size and any number of requests. Left out: the order of the queue, which
block is which, contents and block tables (the tracked block's holders are a number), faults.

``sessions``: one observed session among any number, at the run level: its odometer, its live blocks,
and the sums of the others' live blocks. Left out: all that the run level leaves out
(``odometer.py``), and which session is which.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import attrs
import z3

from hitproof.fuzz.bounded.solver import Limits, Reply, run

Accounting = Literal["pool-conserved", "queue-well-formed", "ref-count-is-holders", "index-matches-blocks"]
ACCOUNTING: tuple[Accounting, ...] = (
    "pool-conserved",
    "queue-well-formed",
    "ref-count-is-holders",
    "index-matches-blocks",
)
BUGS: dict[str, Accounting] = {
    "unhashed-lost": "pool-conserved",
    "shared-block-queued": "queue-well-formed",
    "shared-not-counted": "ref-count-is-holders",
    "skipped-freed-again": "ref-count-is-holders",
    "evicted-key-stays": "index-matches-blocks",
    "duplicate-overwrites": "index-matches-blocks",
}
"""Seeded bugs that the abstraction states, with what each must refute."""

FITS = "hit-survives-fit"


@attrs.frozen(kw_only=True, slots=True)
class _Rule:
    """A transition: ``guard`` over the variables before, ``after`` their values after."""

    name: str
    guard: list[Any]
    after: dict[str, Any]


def accounting(limits: Limits, promise: Accounting | None = None, bug: str = "") -> Reply:
    """Unsat: no order of a pool's operations ever breaks ``promise`` (None: any of the four, which
    Spacer finds the invariant of; asked for one of them alone it may run on). Sat: some order does.
    """
    holders, ref, others_queued, others_used = z3.Ints("holders ref others_queued others_used")
    queued, keyed, indexed = z3.Bools("queued keyed indexed")
    variables = {
        "pool": z3.Int("pool"),
        "holders": holders,
        "ref": ref,
        "queued": queued,
        "keyed": keyed,
        "indexed": indexed,
        "others_queued": others_queued,
        "others_used": others_used,
    }
    pool = variables["pool"]
    start = [
        pool >= 1,
        holders == 0,
        ref == 0,
        queued,
        z3.Not(keyed),
        z3.Not(indexed),
        others_queued == pool - 1,
        others_used == 0,
    ]
    rules = [
        _Rule(
            name="take it",
            guard=[queued],
            after={
                "holders": holders + 1,
                "ref": z3.IntVal(1),
                "queued": z3.BoolVal(False),
                "keyed": z3.BoolVal(False),
                "indexed": indexed if bug == "evicted-key-stays" else z3.BoolVal(False),
            },
        ),
        _Rule(
            name="take another",
            guard=[others_queued > 0],
            after={"others_queued": others_queued - 1, "others_used": others_used + 1},
        ),
        _Rule(
            name="write it",
            guard=[holders > 0, z3.Not(keyed)],
            after={"keyed": z3.BoolVal(True), "indexed": z3.BoolVal(True)},
        ),
        _Rule(
            name="hit it",
            guard=[indexed],
            after={
                "holders": holders + 1,
                "ref": z3.If(ref == 0, 1, ref) if bug == "shared-not-counted" else ref + 1,
                "queued": z3.BoolVal(False),
            },
        ),
        _Rule(
            name="hit another in the queue",
            guard=[others_queued > 0],
            after={"others_queued": others_queued - 1, "others_used": others_used + 1},
        ),
        _Rule(
            name="free it",
            guard=[holders > 0],
            after={
                "holders": holders - 1,
                "ref": ref - 1,
                "queued": z3.Or(
                    queued,
                    z3.And(
                        z3.Or(ref == 1, z3.BoolVal(bug == "shared-block-queued")),
                        z3.Or(keyed, z3.BoolVal(bug != "unhashed-lost")),
                    ),
                ),
            },
        ),
        _Rule(
            name="free another for good",
            guard=[others_used > 0],
            after={"others_queued": others_queued + 1, "others_used": others_used - 1},
        ),
        _Rule(
            name="reset",
            guard=[holders == 0, others_used == 0],
            after={"keyed": z3.BoolVal(False), "indexed": z3.BoolVal(False)},
        ),
    ]
    if bug == "skipped-freed-again":
        rules.append(
            _Rule(
                name="give it back and keep it in the table",
                guard=[holders > 0, ref > 0],
                after={"ref": ref - 1, "queued": z3.Or(queued, ref == 1)},
            )
        )
    if bug == "duplicate-overwrites":
        rules.append(
            _Rule(name="another block takes its key", guard=[keyed], after={"indexed": z3.BoolVal(False)})
        )
    broken = {
        "pool-conserved": z3.If(ref > 0, 1, 0) + z3.If(queued, 1, 0) + others_used + others_queued != pool,
        "queue-well-formed": queued != (ref == 0),
        "ref-count-is-holders": ref != holders,
        "index-matches-blocks": keyed != indexed,
    }
    bad = z3.Or(list(broken.values())) if promise is None else broken[promise]
    return _reach(variables, start, rules, bad, limits)


def sessions(limits: Limits, *, dense: bool = False, short: int = 0) -> Reply:
    """Unsat: at the run level, under retention 0 from 0.24 on, ``hit-survives-fit`` holds for any
    number of sessions, visits and sizes. ``dense``: blocks that no hit needs join the tail;
    ``short``: the promise is asked of a pool so many blocks smaller than what is held or needed.
    """
    pool, mine, odometer, later, others = z3.Ints("pool mine odometer later others")
    lost = z3.Bool("lost")
    variables = {
        "pool": pool,
        "mine": mine,
        "odometer": odometer,
        "later": later,
        "others": others,
        "lost": lost,
    }
    live, beyond, junk = z3.Ints("live beyond junk")
    start = [pool >= 1, mine >= 1, odometer == mine, later == 0, others >= 0, z3.Not(lost)]
    visit = [live >= 1, beyond >= 0, junk >= 0, z3.BoolVal(True) if dense else junk == 0]

    def fits(rest: Any) -> Any:
        """Held or needed by the visitor (its live blocks and what it takes beyond), the rest of the
        working set and the observed session fit the pool.
        """
        return live + beyond + rest + mine <= pool + short

    def popped(moved: Any) -> Any:
        return odometer - moved + live + beyond > pool

    rules = [
        _Rule(
            name="a session visited since the observed one comes back",
            guard=[*visit, live <= later, fits(others - live)],
            after={"odometer": odometer + junk, "lost": z3.Or(lost, popped(live))},
        ),
        _Rule(
            name="a session visited before it comes back",
            guard=[*visit, live <= others - later, fits(others - live)],
            after={"odometer": odometer + live + junk, "later": later + live, "lost": z3.Or(lost, popped(0))},
        ),
        _Rule(
            name="a new session comes",
            guard=[*visit, fits(others)],
            after={
                "odometer": odometer + live + junk,
                "later": later + live,
                "others": others + live,
                "lost": z3.Or(lost, popped(0)),
            },
        ),
        _Rule(
            name="the observed one comes back",
            guard=[z3.Not(lost)],
            after={"odometer": mine, "later": z3.IntVal(0)},
        ),
    ]
    return _reach(variables, start, rules, lost, limits, [live, beyond, junk])


def _reach(
    variables: dict[str, Any],
    start: list[Any],
    rules: list[_Rule],
    bad: Any,
    limits: Limits,
    inputs: list[Any] | None = None,
) -> Reply:
    """Whether ``bad`` can be reached. Z3's Horn solver says sat for an invariant: here that is unsat."""
    solver = z3.SolverFor("HORN")
    solver.set("random_seed", limits.seed)
    values = list(variables.values())
    state = z3.Function("state", *[v.sort() for v in values], z3.BoolSort())
    bound = [*values, *(inputs or [])]
    solver.add(z3.ForAll(values, z3.Implies(z3.And(start), state(*values))))
    for rule in rules:
        after = [rule.after.get(name, value) for name, value in variables.items()]
        solver.add(z3.ForAll(bound, z3.Implies(z3.And(state(*values), *rule.guard), state(*after))))
    solver.add(z3.ForAll(values, z3.Implies(z3.And(state(*values), bad), z3.BoolVal(False))))
    begun = time.monotonic()
    reply = run(solver.check, solver, limits)
    status: Literal["sat", "unsat", "unknown"] = (
        "unsat" if reply.status == "sat" else "sat" if reply.status == "unsat" else "unknown"
    )
    return attrs.evolve(reply, status=status, model=None, seconds=time.monotonic() - begun)
