"""The law of the cliff: how large a pool K sessions in round-robin need, as a formula.

Each session sends the same prompt in every round: ``prefix`` tokens, a multiple of the scheduler
block size, and one token more; no output fills a block. One request at a time. Per group g of block size b, with ``n`` full
blocks of the prefix, the formula needs only counts:

- ``live``: blocks that a hit needs (n, or the window's tail), and ``one`` partly filled block;
- ``cold``: blocks that a prefill takes before any of its own come back to the head of the queue;
- ``tail``: blocks that a prefill leaves in the queue behind nothing older than itself: hashed ones,
  and unhashed ones where the release does not put those first;
- ``after``: of these, the ones freed from the first live block on.

All hits of all later rounds are full exactly when ``num_blocks - 1 >= needed``:

    needed = max(held, cold + after + (K - 2) * tail, live + groups + after_hit + (K - 2) * tail_hit)

for K >= 2 (the last term is the hit rounds'), and ``held``, the most that one visit holds or must fit,
for K = 1.
"""

from __future__ import annotations

import math
import random
from typing import Any

import attrs

from hitproof.fuzz.bounded.terms import STATED
from hitproof.model import (
    CacheConfig,
    Drain,
    Group,
    ModelTarget,
    Op,
    Semantics,
    Span,
    Submit,
    Trace,
    cdiv,
)


@attrs.frozen(kw_only=True, slots=True)
class Workload:
    """K sessions of ``prefix`` + 1 tokens each in round-robin, with ``outputs`` tokens generated."""

    sessions: int
    prefix: int
    outputs: int


@attrs.frozen(kw_only=True, slots=True)
class Law:
    """The counts of one workload, in blocks; ``needed``: usable blocks for full hits in every round."""

    live: int
    cold: int
    tail: int
    after: int
    after_hit: int
    tail_hit: int
    held: int
    needed: int


def law(config: CacheConfig, work: Workload) -> Law:
    """The formula's counts for ``config`` (its ``num_blocks`` is not looked at)."""
    cold = _replayed(config, work, hit=False)
    warm = _replayed(config, work, hit=True)
    k = work.sessions
    needed = max(cold.held, warm.held, _gate(config, work))
    if k >= 2:
        first = cold.reach + cold.after + (k - 2) * cold.tail
        again = warm.reach + warm.after + (k - 2) * warm.tail
        needed = max(needed, first, again)
    return Law(
        live=warm.reach - len(config.groups),
        cold=cold.reach,
        tail=cold.tail,
        after=cold.after,
        after_hit=warm.after,
        tail_hit=warm.tail,
        held=max(cold.held, warm.held),
        needed=needed,
    )


@attrs.frozen(kw_only=True, slots=True)
class _Visit:
    reach: int
    tail: int
    after: int
    held: int


def _written(config: CacheConfig, g: int, work: Workload) -> list[bool]:
    """Which full blocks of group ``g`` a prompt leaves in the index."""
    rules, size, unit = config.group_rules()[g], config.groups[g].block_size, config.scheduler_block_size
    prompt, n = work.prefix + 1, (work.prefix + work.outputs) // config.groups[g].block_size
    mask = rules.write_mask(0, n, unit, False, config.retention, [prompt - 1])
    whole = [True] * n if mask is None else list(mask)
    limit = work.prefix + work.outputs
    if len(config.groups) > 1 and config.rules.write_mask != "none":
        limit = limit // unit * unit
    return [kept and (i + 1) * size <= limit for i, kept in enumerate(whole)]


def _replayed(config: CacheConfig, work: Workload, *, hit: bool) -> _Visit:
    """Count what one visit takes and gives back, step by step, group by group."""
    rules = config.group_rules()
    policy = config.rules.unhashed_first
    start = work.prefix if hit else 0
    prompt, budget = work.prefix + 1, config.max_num_batched_tokens
    written = [_written(config, g, work) for g in range(len(rules))]
    first = [rules[g].needed(work.prefix) for g in range(len(rules))]
    held = {(g, i) for g in range(len(rules)) for i in (first[g] if hit else ())}
    out = reach = len(held)
    peak = len(held)
    tail: list[tuple[int, int, bool]] = []
    computed = start
    length = [start // r.block_size for r in rules]

    def give(blocks: list[tuple[int, int]], to_head: bool) -> None:
        nonlocal out
        for g, i in blocks:
            held.discard((g, i))
            cached = i < len(written[g]) and written[g][i]
            if to_head and not cached:
                out -= 1
            else:
                tail.append((g, i, i in first[g]))

    while True:
        done = computed >= prompt
        new = 1 if done else min(prompt - computed, budget)
        for g, r in enumerate(rules):
            skipped = r.skipped_tokens(computed) // r.block_size
            passed = sorted(((h, i) for h, i in held if h == g and i < skipped), reverse=True)
            give(passed, policy != "never")
        for g, r in enumerate(rules):
            upto = cdiv(computed + new, r.block_size)
            fresh = [(g, i) for i in range(length[g], upto)]
            length[g] = max(length[g], upto)
            held.update(fresh)
            out += len(fresh)
        reach, peak = max(reach, out), max(peak, len(held))
        computed += new
        if computed >= prompt and computed - prompt + 1 >= work.outputs:
            break
    for g in range(len(rules)):
        windowed = config.groups[g].kind == "sliding_window"
        first_out = policy != "never" and (policy != "window_groups" or windowed)
        give(sorted(((h, i) for h, i in held if h == g), reverse=True), first_out)
    lives = [n for n, (_, _, live) in enumerate(tail) if live]
    after = len(tail) - lives[0] if lives else 0
    return _Visit(reach=reach, tail=len(tail), after=after, held=peak)


def _gate(config: CacheConfig, work: Workload) -> int:
    """New blocks of the whole prompt as the full-sequence gate counts them."""
    if not config.scheduler_reserve_full_isl:
        return 0
    needed = 0
    for rules in config.group_rules():
        cap = rules.admission_cap(config.max_num_batched_tokens, config.max_model_len)
        required = cdiv(work.prefix + 1, rules.block_size)
        capped = cap is not None and config.rules.admission_cap != "none"
        needed += min(required, cap) if capped and cap is not None else required
    return needed


def trace(config: CacheConfig, work: Workload, rounds: int = 3) -> Trace:
    """The workload as a trace."""
    ops: list[Op] = []
    for r in range(rounds):
        for s in range(work.sessions):
            prompt = (Span(f"S{s}", 0, work.prefix + 1),)
            ops += [Submit(request=f"r{r}_{s}", prompt=prompt, output_tokens=work.outputs), Drain()]
    return Trace(config=config, ops=tuple(ops))


def full(config: CacheConfig, work: Workload) -> bool:
    """Whether the concrete model hits in full in every round but the first."""
    run = ModelTarget(record=False).run(trace(config, work))
    return run.stuck is None and all(hit == work.prefix for hit in run.hits[work.sessions :])


def threshold(config: CacheConfig, work: Workload) -> tuple[int, int]:
    """(what the law says, the least usable pool with full hits on the concrete model nearby).

    The concrete one is searched upward and downward from the law's, so that an error is a number.
    """
    said = law(config, work).needed
    found = said
    sized = _sized(config, found)
    if full(sized, work):
        while found > 1 and full(_sized(config, found - 1), work):
            found -= 1
    else:
        while not full(_sized(config, found), work):
            found += 1
    return said, found


def _sized(config: CacheConfig, usable: int) -> CacheConfig:
    return attrs.evolve(config, num_blocks=usable + 1)


def closed_form(release: str, dense: bool, groups: int, k: int, n: int, m: int, outputs: int) -> int:
    """The same for equal block sizes, prefill in one step, ``groups - 1`` windows of ``m`` blocks and
    ``n >= m``: usable blocks needed by K >= 2 sessions of ``n`` blocks.
    """
    policy = Semantics.of(release).unhashed_first
    junk = groups if policy == "never" else 1 if policy == "window_groups" else 0
    behind = groups - 1 if policy == "never" else junk
    live = n + (groups - 1) * m
    tail = (groups * n if dense else live) + junk
    after = (groups * n if dense and outputs == 1 else live) + behind
    return groups * (n + 1) + after + (k - 2) * tail


def example(release: str, retention: int | None, **settings: Any) -> CacheConfig:
    """400 blocks of 32 tokens, five windows of 64 tokens beside one full group."""
    window = Group(kind="sliding_window", block_size=32, window=64)
    if Semantics.of(release).retention:
        settings["retention_interval"] = retention
    return CacheConfig(
        num_blocks=400,
        groups=(*[window] * 5, Group(kind="full", block_size=32)),
        semantics=release,
        max_num_batched_tokens=65_536,
        max_model_len=65_536,
        **settings,
    )


def drawn(rng: random.Random) -> tuple[CacheConfig, Workload]:
    """A random config of the law's class (windows of one spec beside one full group) and a workload."""
    while True:
        release = rng.choice(STATED)
        base = rng.choice((4, 8))
        sizes = rng.choice(((base,), (base, 2 * base, 4 * base)))
        window_size, full_size = rng.choice(sizes), rng.choice(sizes)
        reach = rng.choice((rng.randint(2, 6 * window_size), rng.randint(1, 6) * window_size + 1))
        window = Group(kind="sliding_window", block_size=window_size, window=reach)
        groups = (*[window] * rng.randint(1, 6), Group(kind="full", block_size=full_size))
        unit = math.lcm(window_size, full_size)
        settings: dict[str, Any] = {}
        if Semantics.of(release).retention:
            settings["retention_interval"] = rng.choice((None, 0, unit, 2 * unit))
        work = Workload(
            sessions=rng.randint(1, 6), prefix=unit * rng.randint(1, 12), outputs=rng.choice((1, 2, 2, 3))
        )
        if 1 + work.outputs >= min(window_size, full_size):
            continue
        config = CacheConfig(
            num_blocks=9,
            groups=groups,
            semantics=release,
            max_num_batched_tokens=rng.choice((100_000, unit, rng.randint(unit, 5 * unit))),
            max_model_len=100_000,
            **settings,
        )
        return config, work


def errors(count: int, seed: int) -> list[int]:
    """What the law says less what the model needs, for ``count`` random workloads."""
    rng = random.Random(seed)  # noqa: S311
    return [said - found for said, found in (threshold(*drawn(rng)) for _ in range(count))]
