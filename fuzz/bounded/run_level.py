"""Questions at the run level: bound by bound, and for any number of turns by induction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import z3

from hitproof.fuzz.bounded.answer import Bound
from hitproof.fuzz.bounded.odometer import (
    MOST_CHUNKS,
    MOST_WINDOWS,
    Promise,
    Session,
    Setting,
    Sizes,
    State,
    Visit,
    broken,
    canonical,
    decode,
    premise,
    sessions_of,
    step,
    visits,
)
from hitproof.fuzz.bounded.solver import Limits, Reply, ask
from hitproof.fuzz.bounded.terms import Bool, Int, both, either, implies, ite, neg
from hitproof.model import Trace


@attrs.frozen(kw_only=True, slots=True)
class Fixed:
    """Sizes that are given instead of any: ``blocks`` and ``least_blocks`` (any pool from there
    on) count the null block, ``windows`` are groups,
    ``m`` and ``chunk`` are in blocks; ``single``: one output token (True), two (False), either (None).
    """

    blocks: int | None = None
    least_blocks: int | None = None
    windows: int | None = None
    m: int | None = None
    chunk: int | None = None
    single: bool | None = None

    @property
    def text(self) -> str:
        """For bounds."""
        pool = "any pool" if self.blocks is None else f"{self.blocks} blocks"
        pool = pool if self.least_blocks is None else f"{self.least_blocks} blocks or more"
        windows = f"1 to {MOST_WINDOWS}" if self.windows is None else str(self.windows)
        m = "any window" if self.m is None else f"window of {self.m} blocks"
        chunk = "" if self.chunk is None else f", chunks of {self.chunk} blocks"
        outputs = {None: "", True: ", one output token", False: ", two output tokens"}[self.single]
        return f"{pool}, {windows} window groups + 1 full, {m}, any lengths{chunk}{outputs}"


def variables(setting: Setting, fixed: Fixed, sessions: int) -> Sizes:
    """A z3 variable for each size that is not given."""
    return Sizes(
        pool=z3.Int("pool") if fixed.blocks is None else fixed.blocks - 1,
        windows=z3.Int("windows") if fixed.windows is None else fixed.windows,
        m=z3.Int("m") if fixed.m is None else fixed.m,
        chunk=z3.Int("chunk") if fixed.chunk is None else fixed.chunk,
        n=[z3.Int(f"n{s}") for s in range(sessions)],
        steps=[z3.Int(f"steps{s}") if setting.chunked else 1 for s in range(sessions)],
    )


def sane(setting: Setting, fixed: Fixed, sizes: Sizes) -> Bool:
    """What the class and what is given ask of the sizes."""
    return both(sizes.sane(setting), fixed.least_blocks is None or sizes.pool >= fixed.least_blocks - 1)


def visit_of(fixed: Fixed, name: object, sessions: int) -> Visit:
    """A visit by any session."""
    single = z3.Bool(f"single{name}") if fixed.single is None else fixed.single
    return Visit(by=[z3.Bool(f"by{name}_{s}") for s in range(sessions)], single=single)


def bounds(promise: Promise, setting: Setting, fixed: Fixed, turns: int, sessions: int) -> Iterator[Bound]:
    """Fewest turns first, of those fewest sessions first."""
    for t in range(2, turns + 1):
        for k in range(1, min(sessions, t - 1) + 1):
            yield bound(promise, setting, fixed, t, k)


def bound(promise: Promise, setting: Setting, fixed: Fixed, turns: int, sessions: int) -> Bound:
    """Exactly so many turns and sessions; the last turn is the one that breaks the promise."""
    sizes = variables(setting, fixed, sessions)
    order = [visit_of(fixed, t, sessions) for t in range(turns)]
    seen = visits(setting, sizes, order)
    of_class = [sane(setting, fixed, sizes), canonical(order)]
    values: list[tuple[str, Any]] = [("blocks", sizes.pool + 1), ("", seen[-1].working_set)]
    # The rest only to make the counterexample the same on every run.
    terms = [sizes.windows, sizes.m, *sizes.n, sizes.chunk if setting.chunked else 0, *sizes.steps]
    terms += [ite(test, 1, 0) for visit in order for test in (*visit.by, visit.single)]
    values += [("", term) for term in terms]

    def decoded(reply: Reply) -> Trace:
        return decode(
            setting,
            Sizes(
                pool=reply.value(sizes.pool),
                windows=reply.value(sizes.windows),
                m=reply.value(sizes.m),
                chunk=reply.value(sizes.chunk) if setting.chunked else 1,
                n=[reply.value(n) for n in sizes.n],
                steps=[reply.value(x) for x in sizes.steps],
            ),
            [([reply.value(x) for x in v.by].index(True), bool(reply.value(v.single))) for v in order],
        )

    return Bound(
        text=f"{turns} turns x {sessions} sessions",
        premise=[*of_class, premise(promise, sizes, order, seen)],
        broken=[broken(promise, seen)],
        smallest=[(name, term) for name, term in values if z3.is_expr(term)],
        decode=decoded,
    )


def induction(
    promise: Promise,
    setting: Setting,
    fixed: Fixed,
    sessions: int,
    limits: Limits,
    given: Callable[[Sizes], Bool] = lambda _: True,
) -> Reply:
    """Unsat: with sizes as ``given``, within ``sessions`` sessions the promise holds for any number of turns, up to the first
    shortened hit that it allows.

    The invariant: visits are in a strict order; a session's odometer is at most the live blocks of
    the sessions visited since, its own included; and a session with evicted live blocks met, since
    it was last served, a load over the pool (fit), or a working set of half the pool.
    """
    sizes = variables(setting, fixed, sessions)
    all_sessions = sessions_of(setting, sizes)
    every = range(sessions)
    before = State(
        seen=[z3.Bool(f"seen{s}") for s in every],
        short=[z3.Bool(f"short{s}") for s in every],
        nothing=[z3.Bool(f"nothing{s}") for s in every],
        odometer=[z3.Int(f"odometer{s}") for s in every],
        spare=[z3.Int(f"spare{s}") for s in every],
        later=[[z3.Bool(f"later{a}_{s}") if a != s else False for s in every] for a in every],
    )
    worst = [z3.Int(f"worst{s}") for s in every]
    visit = visit_of(fixed, "", sessions)
    after, seen = step(setting, sizes, all_sessions, before, visit)
    # Half the pool: the working set only grows, so that its last value is its peak.
    load = seen.load if promise == "hit-survives-fit" else seen.working_set
    served = seen.served if promise == "hit-survives-fit" else seen.working_set
    grown = [
        ite(visit.by[s], served, ite(load > worst[s], load, worst[s]))
        if promise == "hit-survives-fit"
        else load
        for s in every
    ]
    one_of = [either(*visit.by)]
    one_of += [neg(both(visit.by[a], visit.by[b])) for a in every for b in range(a)]
    formulas = [
        sane(setting, fixed, sizes),
        given(sizes),
        *one_of,
        seen.fits,
        neg(seen.short),
        _invariant(promise, sizes, all_sessions, before, worst),
        neg(_invariant(promise, sizes, all_sessions, after, grown)),
    ]
    return ask(formulas, limits)


def _invariant(
    promise: Promise, sizes: Sizes, sessions: list[Session], state: State, worst: list[Int]
) -> Bool:
    every = range(len(sessions))
    live = [x.live for x in sessions]
    later = state.later
    found: list[Bool] = []
    total = sum((ite(state.seen[s], live[s], 0) for s in every), start=0)
    for s in every:
        since = live[s] + sum((ite(later[a][s], live[a], 0) for a in every if a != s), start=0)
        found.append(implies(state.seen[s], state.odometer[s] <= since))
        found += [implies(later[a][s], state.seen[a]) for a in every if a != s]
        for a in range(s):
            met = both(state.seen[a], state.seen[s])
            found.append(implies(met, either(later[a][s], later[s][a])))
            found.append(neg(both(later[a][s], later[s][a])))
        found += [
            implies(both(later[a][s], later[b][a]), later[b][s])
            for a in every
            for b in every
            if a != s and b not in (a, s)
        ]
        lost = both(state.seen[s], state.short[s])
        if promise == "hit-survives-fit":
            found.append(implies(lost, worst[s] > sizes.pool))
        else:
            found.append(implies(lost, 2 * worst[s] >= sizes.pool + 1))
            found.append(implies(either(*state.seen), worst[s] == total))
    return both(*found)


def steps_text(setting: Setting) -> str:
    """The bound that chunked prefill adds."""
    return f", prompts of at most {MOST_CHUNKS} prefill steps" if setting.chunked else ""


@attrs.frozen(kw_only=True, slots=True)
class Occupancy:
    """The least working set (blocks) at which some session's hit can vanish, in ``of`` blocks.
    ``proven``: no run within the bound loses a hit below; else down to ``none_below``.
    """

    working_set: int | None
    of: int
    proven: bool
    none_below: int
    bound: str
    seconds: float


def occupancy(setting: Setting, fixed: Fixed, turns: int, sessions: int, limits: Limits) -> Occupancy:
    """By bisection over the working set of all sessions seen, turn by turn, with proof below."""
    assert fixed.blocks is not None
    best: int | None = None
    none_below, proven = fixed.blocks, True
    start = time.monotonic()
    for t in range(3, turns + 1):
        for k in range(2, min(sessions, t - 1) + 1):
            sizes = variables(setting, fixed, k)
            order = [visit_of(fixed, i, k) for i in range(t)]
            seen = visits(setting, sizes, order)
            last = seen[-1]
            lost = [sane(setting, fixed, sizes), canonical(order), *(x.fits for x in seen)]
            lost += [*(neg(x.short) for x in seen[:-1]), last.nothing]
            low, high = -1, fixed.blocks if best is None else best
            while low + 1 < high:
                middle = (low + high) // 2
                reply = ask([*lost, last.working_set <= middle], limits)
                if reply.status == "sat":
                    best = high = reply.value(last.working_set)
                elif reply.status == "unsat":
                    low = middle
                else:
                    proven = False
                    break
            none_below = min(none_below, low + 1)
    return Occupancy(
        working_set=best,
        of=fixed.blocks,
        proven=proven,
        none_below=none_below,
        bound=f"{turns} turns x {sessions} sessions",
        seconds=time.monotonic() - start,
    )


def twice_the_transient(sizes: Sizes) -> Bool:
    """``num_blocks >= 2 (Gs c + 1)``, Gs window groups and chunks of c blocks."""
    return sizes.pool + 1 >= 2 * (sizes.per_window(sizes.chunk) + 1)
