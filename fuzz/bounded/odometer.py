"""The run-level encoding: how far each session's oldest live block stands from the head of the queue.

One request at a time, each run to its end before the next. A request is a *visit* of a session: a
prompt of ``n`` full blocks and one token, of one stream per session, with one or two output tokens.
Groups: ``windows`` sliding-window groups of one spec, then one full-attention group, equal block
sizes; a window is exactly ``m`` blocks and one token. All sizes are terms, so that pool, lengths,
window, number of window groups, chunk and the order of visits may be symbolic.

The *odometer* of a session (stack distance) is the number of blocks in the free queue at or behind
the session's oldest live block; a visit that takes more blocks than stand before that one evicts
it. Exact up to the first shortened hit: ``tests/bounded`` compares it with the model.

Read beside ``BlockPool.get_new_blocks`` and ``free_blocks`` of ``vllm/v1/core/block_pool.py`` and
``remove_skipped_blocks`` of ``single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs

from hitproof.fuzz.bounded.terms import Bool, Int, both, either, implies, ite, least, most, neg, product
from hitproof.model import BadInput, CacheConfig, Drain, Group, Op, Semantics, Span, Submit, Trace

BLOCK = 4
"""Tokens per block of a decoded trace: the fresh token and two outputs fill no block."""

MOST_WINDOWS = 8
"""Window groups at most: products with their number are linear by cases up to here."""

MOST_CHUNKS = 4
"""Prefill steps of one prompt at most, where prefill is chunked."""


@attrs.frozen(kw_only=True, slots=True)
class Setting:
    """What is concrete of a class of runs: release, retention (None dense or 0), chunked prefill or
    not. ``evicts_more``: blocks that a seeded bug evicts beyond those taken.
    """

    release: str
    retention: int | None
    chunked: bool = False
    evicts_more: int = 0

    def __attrs_post_init__(self) -> None:
        if self.retention not in (None, 0):
            raise BadInput(
                f"retention {self.retention}: the run level knows dense and 0; the block level any interval"
            )
        if self.retention == 0 and not Semantics.of(self.release).retention:
            raise BadInput(f"retention 0 needs vLLM 0.23.0 or newer, not {self.release}")

    @property
    def rules(self) -> Semantics:
        """The release's switches."""
        return Semantics.of(self.release)

    @property
    def text(self) -> str:
        """For bounds and tables."""
        kind = "dense" if self.retention is None else "retention 0"
        return f"{kind}, {'chunked' if self.chunked else 'one-step'} prefill"


@attrs.frozen(kw_only=True, slots=True)
class Sizes:
    """Terms. ``pool``: usable blocks (num_blocks less the null block); ``windows``: window groups;
    ``m``: blocks of a window; ``chunk``: blocks per prefill step; per session ``n`` full blocks and
    ``steps`` prefill steps (the last one not empty).
    """

    pool: Int
    windows: Int
    m: Int
    chunk: Int
    n: Sequence[Int]
    steps: Sequence[Int]

    def sane(self, setting: Setting) -> Bool:
        """What the class asks of its sizes."""
        found = [self.pool >= 1, self.windows >= 1, self.windows <= MOST_WINDOWS, self.m >= 1]
        found += [n >= 1 for n in self.n]
        if setting.chunked:
            found.append(self.chunk >= 1)
            for n, steps in zip(self.n, self.steps, strict=True):
                before = self.before_last(steps)
                found += [
                    steps >= 1,
                    steps <= MOST_CHUNKS,
                    before < n + 1,
                    before + self.chunk >= n + 1,
                ]
        return both(*found)

    def before_last(self, steps: Int) -> Int:
        """Blocks prefilled before the last step."""
        return product(steps - 1, self.chunk, 0, MOST_CHUNKS - 1)

    def per_window(self, blocks: Int) -> Int:
        """``blocks`` in every window group."""
        return product(self.windows, blocks, 1, MOST_WINDOWS)


@attrs.frozen(kw_only=True, slots=True)
class Cost:
    """What one visit does to the queue, in blocks. ``reach``: how far it takes from the head;
    ``adds``: what joins the tail; ``depth``: of that, at or behind the session's oldest live block;
    ``spare``: evictions of live blocks, beyond the first, until nothing of the hit is left;
    ``load``: most blocks held or needed by it at once, ``served``: the same once its prompt is
    computed; ``held``: what must fit the empty pool.
    """

    reach: Int
    adds: Int
    depth: Int
    spare: Int
    load: Int
    served: Int
    held: Int


@attrs.frozen(kw_only=True, slots=True)
class Session:
    """A session's costs by kind of visit; ``live``: its working set."""

    live: Int
    hit: Cost
    cold: tuple[Cost, Cost]
    """With one output token, with two."""


def session(setting: Setting, sizes: Sizes, n: Int, steps: Int) -> Session:
    """The costs of a session of ``n`` full blocks, prefilled in ``steps`` steps."""
    per, m = sizes.per_window, sizes.m
    groups = sizes.windows + 1
    policy = setting.rules.unhashed_first
    # Unhashed blocks that go to the tail (each group's partly filled last one), and those of them
    # freed after the first group's live blocks.
    junk: Int = groups if policy == "never" else 1 if policy == "window_groups" else 0
    behind: Int = groups - 1 if policy == "never" else junk
    tail = least(n, m)
    live = n + per(tail)
    to_nothing = ite(n > m, 0, n - 1)
    hit = Cost(
        reach=live + groups,
        adds=live + junk,
        depth=live + behind,
        spare=to_nothing,
        load=live + groups,
        served=live + groups,
        held=live + groups,
    )
    held, load, kept = _prefill(setting, sizes, n, steps)
    gate = n + 1 + per(n + 1)
    if setting.chunked and setting.rules.admission_cap != "none":
        gate = n + 1 + per(least(n + 1, m + sizes.chunk + 1))
    last = n + 1 + per(kept + 1)
    if setting.retention is None:
        # All full blocks are cached; those that the window has passed go to the tail too.
        reach, adds = n + 1 + per(n + 1), n + per(n) + junk
        depth_of_one, spare_of_one = n + per(kept), ite(kept >= n, n - 1, kept - m)
    else:
        reach, adds = held, live + junk
        depth_of_one, spare_of_one = live, to_nothing
    common = {"reach": reach, "adds": adds, "load": load, "served": last, "held": most(held, gate)}
    # With two outputs, the step of the second gives back what the window has passed, before the end.
    one = Cost(depth=depth_of_one + behind, spare=spare_of_one, **common)
    two = Cost(depth=live + behind, spare=to_nothing, **common)
    return Session(live=live, hit=hit, cold=(one, two))


def _prefill(setting: Setting, sizes: Sizes, n: Int, steps: Int) -> tuple[Int, Int, Int]:
    """(most blocks held, most held or needed, full blocks of one window group held at the end)."""
    per, m = sizes.per_window, sizes.m
    if not setting.chunked:
        return n + 1 + per(n + 1), n + 1 + per(n + 1), n
    passed = most(0, sizes.before_last(steps) - m)
    held = load = n + 1 + per(n + 1 - passed)
    for j in range(1, MOST_CHUNKS):
        done = j * sizes.chunk
        here = done + per(done - most(0, (j - 1) * sizes.chunk - m))
        needed = here + most(0, n - done) + per(least(least(n, m), most(0, n - done)))
        held = ite(steps > j, most(held, here), held)
        load = ite(steps > j, most(load, needed), load)
    return held, load, n - passed


@attrs.frozen(kw_only=True, slots=True)
class Visit:
    """One request: ``by[s]``: it is session ``s``'s; ``single``: with one output token."""

    by: Sequence[Bool]
    single: Bool


@attrs.frozen(kw_only=True, slots=True)
class Seen:
    """One visit's outcome: ``returns``: its session was seen before; ``short``: not all of its live
    blocks were cached any more, ``nothing``: no hit is left; ``load``: blocks held or needed at
    most; ``working_set``: of all sessions seen, in blocks; ``fits``: the visit fits the empty pool.
    """

    returns: Bool
    short: Bool
    nothing: Bool
    load: Int
    served: Int
    working_set: Int
    fits: Bool


@attrs.frozen(kw_only=True, slots=True)
class State:
    """Between two visits, per session: ``seen``; ``short`` and ``nothing`` (see ``Seen``) if it
    returned now; its ``odometer`` and ``spare``; ``later[a][s]``: a was visited after s.
    """

    seen: Sequence[Bool]
    short: Sequence[Bool]
    nothing: Sequence[Bool]
    odometer: Sequence[Int]
    spare: Sequence[Int]
    later: Sequence[Sequence[Bool]]

    @classmethod
    def empty(cls, count: int) -> State:
        """Nothing was ever cached."""
        no = [False] * count
        return cls(seen=no, short=no, nothing=no, odometer=[0] * count, spare=[0] * count, later=[no] * count)


def visits(setting: Setting, sizes: Sizes, order: Sequence[Visit]) -> list[Seen]:
    """The outcome of each visit. Meaningful up to and including the first short one."""
    sessions = sessions_of(setting, sizes)
    state, out = State.empty(len(sessions)), []
    for visit in order:
        state, seen = step(setting, sizes, sessions, state, visit)
        out.append(seen)
    return out


def sessions_of(setting: Setting, sizes: Sizes) -> list[Session]:
    """The costs of every session."""
    return [session(setting, sizes, n, steps) for n, steps in zip(sizes.n, sizes.steps, strict=True)]


def step(
    setting: Setting, sizes: Sizes, sessions: Sequence[Session], before: State, visit: Visit
) -> tuple[State, Seen]:
    """One visit."""
    every, by, seen = range(len(sessions)), visit.by, before.seen
    costs = [_chosen(seen[s], sessions[s].hit, _chosen(visit.single, *sessions[s].cold)) for s in every]
    reach = _of(by, [cost.reach for cost in costs])
    adds = _of(by, [cost.adds for cost in costs])
    lives = [x.live for x in sessions]
    returns = either(*(both(by[s], seen[s]) for s in every))
    short, nothing, odometer, spare = [], [], [], []
    for s in every:
        touched = [both(by[a], seen[a], before.later[a][s]) if a != s else False for a in every]
        rest = before.odometer[s] - _of(touched, lives)
        popped = rest + reach + setting.evicts_more - sizes.pool
        other = neg(by[s])
        short.append(both(other, either(before.short[s], both(seen[s], popped > 0))))
        nothing.append(both(other, either(before.nothing[s], both(seen[s], popped > before.spare[s]))))
        odometer.append(ite(by[s], costs[s].depth, ite(seen[s], rest + adds, 0)))
        spare.append(ite(by[s], costs[s].spare, before.spare[s]))
    later = [
        [False if a == s else either(by[a], both(before.later[a][s], neg(by[s]))) for s in every]
        for a in every
    ]
    after = [either(seen[s], by[s]) for s in every]
    working_set = sum((ite(after[s], lives[s], 0) for s in every), start=0)
    others = working_set - _of(by, lives)
    return (
        State(seen=after, short=short, nothing=nothing, odometer=odometer, spare=spare, later=later),
        Seen(
            returns=returns,
            short=both(returns, either(*(both(by[s], before.short[s]) for s in every))),
            nothing=both(returns, either(*(both(by[s], before.nothing[s]) for s in every))),
            load=others + _of(by, [cost.load for cost in costs]),
            served=others + _of(by, [cost.served for cost in costs]),
            working_set=working_set,
            fits=_of(by, [cost.held for cost in costs]) <= sizes.pool,
        ),
    )


def _chosen(test: Bool, then: Cost, other: Cost) -> Cost:
    return Cost(
        **{
            field.name: ite(test, getattr(then, field.name), getattr(other, field.name))
            for field in attrs.fields(Cost)
        }
    )


def _of(by: Sequence[Bool], values: Sequence[Int]) -> Int:
    """The value of the chosen one; 0 if none is."""
    found: Int = 0
    for test, value in zip(by, values, strict=True):
        found = ite(test, value, found)
    return found


Promise = Literal["hit-survives-half-pool", "hit-survives-fit"]


def premise(promise: Promise, sizes: Sizes, order: Sequence[Visit], seen: Sequence[Seen]) -> Bool:
    """The last visit returns while the promise is in force, and none before it was shortened."""
    last = seen[-1]
    found = [last.returns, *(neg(x.short) for x in seen[:-1]), *(x.fits for x in seen)]
    if promise == "hit-survives-half-pool":
        return both(*found, 2 * last.working_set < sizes.pool + 1)
    for t, here in enumerate(seen[:-1]):
        same = either(*(both(a, b) for a, b in zip(order[t].by, order[-1].by, strict=True)))
        again = either(
            *(both(a, b) for x in order[t + 1 : -1] for a, b in zip(x.by, order[-1].by, strict=True))
        )
        # Loads count from when the session was last served.
        found.append(either(again, ite(same, here.served, here.load) <= sizes.pool))
    return both(*found)


def broken(promise: Promise, seen: Sequence[Seen]) -> Bool:
    """The last visit's hit is what the promise forbids."""
    return seen[-1].nothing if promise == "hit-survives-half-pool" else seen[-1].short


def canonical(order: Sequence[Visit]) -> Bool:
    """Sessions are numbered as they appear, all appear, and each visit is one session's."""
    found: list[Bool] = []
    count = len(order[0].by)
    for t, visit in enumerate(order):
        found.append(either(*visit.by))
        found += [neg(both(visit.by[a], visit.by[b])) for a in range(count) for b in range(a)]
        found += [
            implies(visit.by[s], either(*(order[u].by[s - 1] for u in range(t)))) for s in range(1, count)
        ]
    found += [either(*(visit.by[s] for visit in order)) for s in range(count)]
    return both(*found)


def decode(setting: Setting, sizes: Sizes, order: Sequence[tuple[int, bool]]) -> Trace:
    """The trace of concrete sizes and visits (session, with one output token)."""
    longest = max(sizes.n) * BLOCK + 3
    budget = sizes.chunk * BLOCK if setting.chunked else max(2048, longest)
    window = Group(kind="sliding_window", block_size=BLOCK, window=sizes.m * BLOCK + 1)
    settings: dict[str, Any] = {"retention_interval": setting.retention} if setting.rules.retention else {}
    config = CacheConfig(
        num_blocks=sizes.pool + 1,
        groups=(*[window] * sizes.windows, Group(kind="full", block_size=BLOCK)),
        semantics=setting.release,
        max_num_batched_tokens=budget,
        max_model_len=max(2048, longest),
        **settings,
    )
    ops: list[Op] = []
    for t, (s, single) in enumerate(order):
        prompt = (Span(stream(s), 0, sizes.n[s] * BLOCK + 1),)
        ops += [Submit(request=f"r{t}", prompt=prompt, output_tokens=1 if single else 2), Drain()]
    return Trace(config=config, ops=tuple(ops))


def stream(s: int) -> str:
    """The name of session ``s``'s stream."""
    return chr(65 + s) if s < 26 else f"S{s}"
