"""Mutants: named seeded bugs, each a mistake that somebody who works on a KV cache could make.

Each must break the property it names, on a trace where the unmutated model keeps it (``tests/mutants``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs

from hitproof.model import (
    NO_KEY,
    NULL,
    Event,
    Identity,
    Lookup,
    ManagerFault,
    ModelManager,
    Request,
    Run,
    Scheduler,
    Tokens,
    Trace,
    under,
)
from hitproof.model.groups.sliding_window import SlidingWindow
from hitproof.model.lookup import SpecGroup
from hitproof.model.observation import Tables
from hitproof.model.writes import Writer

Apply = Callable[[ModelManager], None]


def _nothing(manager: ModelManager) -> None:
    """For a mistake in the scheduler alone."""


@attrs.frozen(kw_only=True, slots=True)
class Mutant:
    """One bug, seeded in release ``semantics``: it breaks property ``breaks``. ``like``: the public
    report that it resembles. ``apply`` bends a fresh manager, ``scheduler`` drives it.
    """

    id: str
    breaks: str
    what: str
    like: str = ""
    semantics: str = "0.33.0"
    apply: Apply = attrs.field(default=_nothing, repr=False)
    scheduler: type[Scheduler] = attrs.field(default=Scheduler, repr=False)


def mutated(mutant: Mutant) -> Callable[[Trace], Run]:
    """Runs a trace on the mutated model, under the mutant's release."""

    def run(trace: Trace) -> Run:
        trace = under(trace, mutant.semantics)
        manager = ModelManager(trace.config)
        manager.pool.free_queue = _AnyQueue(trace.config.num_blocks)  # type: ignore[assignment]
        mutant.apply(manager)
        for call in ("lookup", "allocate", "free", "reset"):
            _around(manager, call, _faulting)
        return mutant.scheduler(trace, manager).run(f"model with {mutant.id}", mutant.semantics)

    return run


class _AnyQueue:
    """The free queue as a plain list, so that a bug may leave anything in it, even a block twice."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = list(range(1, num_blocks))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def popleft(self, count: int) -> list[int]:
        blocks = self._blocks[:count]
        del self._blocks[:count]
        return blocks

    def remove(self, blocks: list[int]) -> None:
        for block in blocks:
            self._blocks.remove(block)

    def append(self, blocks: list[int]) -> None:
        self._blocks += blocks

    def prepend(self, blocks: list[int]) -> None:
        self._blocks[:0] = blocks


def _around(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner``'s method by what ``make`` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def _faulting(call: Callable[..., Any]) -> Callable[..., Any]:
    """A bent manager may trip over its own state: that is a fault of the manager under test."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (LookupError, ValueError) as error:
            raise ManagerFault("assertion", repr(error)) from error

    return guarded


def _switched(**switches: Any) -> Apply:
    """One rule of another release in place of this release's own."""

    def apply(manager: ModelManager) -> None:
        config = attrs.evolve(manager.config)
        object.__setattr__(config, "rules", attrs.evolve(config.rules, **switches))
        vars(manager).update(vars(ModelManager(config)))

    return apply


class _Bent:
    """The rules of a group with one answer replaced."""

    def __init__(self, rules: SlidingWindow, name: str, answer: Callable[..., Any]) -> None:
        self._rules = rules
        setattr(self, name, answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rules, name)


def _windows(name: str, make: Callable[[SlidingWindow], Callable[..., Any]]) -> Apply:
    """Sliding-window groups answer ``name`` otherwise."""

    def bend(rules: Any) -> Any:
        return _Bent(rules, name, make(rules)) if isinstance(rules, SlidingWindow) else rules

    def apply(manager: ModelManager) -> None:
        manager.groups = tuple(map(bend, manager.groups))
        manager.writer = Writer(manager.config, manager.pool, manager.groups, manager.tables, manager.written)
        manager.finder.specs = tuple(
            attrs.evolve(spec, rules=bend(spec.rules)) for spec in manager.finder.specs
        )

    return apply


def _on_pool(name: str, make: Callable[[Any, Any], Any]) -> Apply:
    """``make(pool, method)`` in place of a method of the block pool."""
    return lambda manager: _around(manager.pool, name, lambda method: make(manager.pool, method))


def _on_manager(name: str, make: Callable[[Any, Any], Any]) -> Apply:
    """``make(manager, method)`` in place of a method of the manager."""
    return lambda manager: _around(manager, name, lambda method: make(manager, method))


def _cached_to_head(pool: Any, free: Any) -> Any:
    def bent(blocks: Iterable[int], *, unhashed_first: bool) -> None:
        freed = list(blocks)
        free(freed, unhashed_first=False)
        cached = [block for block in freed if block in pool.free_queue and pool.key_of[block] != NO_KEY]
        if unhashed_first:
            pool.free_queue.remove(cached)
            pool.free_queue.prepend(cached)

    return bent


def _evict_one_more(pool: Any, take: Any) -> Any:
    def bent(count: int) -> list[int]:
        blocks: list[int] = take(count)
        if blocks and pool.free_queue:
            pool.forget(next(iter(pool.free_queue)))
        return blocks

    return bent


def _one_token_short(manager: ModelManager) -> None:
    _around(manager.finder, "find", lambda find: lambda pool, keys, most: find(pool, keys, max(0, most - 1)))


def _scan_stops_at_miss(rules: SlidingWindow) -> Callable[..., Any]:
    def find_hit(
        pool: Any, ids: Any, keys: Any, max_tokens: int, drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        last = max_tokens // rules.block_size - 1
        if last < 0 or pool.find(keys[last], ids) is None:
            return [[] for _ in ids], 0
        return rules.find_hit(pool, ids, keys, max_tokens, drop, alignment)

    return find_hit


def _no_veto(rules: SlidingWindow) -> Callable[..., Any]:
    def find_hit(
        pool: Any, ids: Any, keys: Any, max_tokens: int, drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        found, hit = rules.find_hit(pool, ids, keys, max_tokens, drop, alignment)
        if hit:
            return found, hit
        hit = max_tokens // alignment * alignment
        return [[NULL] * (hit // rules.block_size) for _ in ids], hit

    return find_hit


def _short_tail(rules: SlidingWindow) -> Callable[..., Any]:
    mask: Callable[..., Any] = attrs.evolve(rules, window=max(1, rules.window - rules.block_size)).write_mask
    return mask


def _mask_without_eagle(rules: SlidingWindow) -> Callable[..., Any]:
    return lambda start, end, unit, _, *more: rules.write_mask(start, end, unit, False, *more)


def _drop_remembered(manager: ModelManager) -> None:
    def make(find: Any) -> Any:
        def bent(*args: Any) -> Lookup:
            found: Lookup = find(*args)
            if found.hit_tokens:
                manager.finder._eagle = False
            return found

        return bent

    _around(manager.finder, "find", make)


def _two_holders_not_found(pool: Any, find: Any) -> Any:
    def bent(key: int, groups: Iterable[int]) -> list[int] | None:
        if any(len(pool.index[group].get(key, ())) > 1 for group in groups):
            return None
        found: list[int] | None = find(key, groups)
        return found

    return bent


def _first_hash_block(manager: ModelManager) -> None:
    def scaled(block_size: int) -> int:
        return block_size // manager.config.key_block_size

    def make_keys_for(_: Any) -> Any:
        def bent(spec: SpecGroup, keys: list[int]) -> list[int]:
            scale = scaled(spec.rules.block_size)
            return keys[: len(keys) // scale * scale : scale]

        return bent

    def make_write(write: Any) -> Any:
        def bent(g: int, request: Request, keys: list[int], tokens: int) -> None:
            scale = scaled(manager.groups[g].block_size)
            write(g, request, [keys[i // scale * scale] for i in range(len(keys))], tokens)

        return bent

    _around(manager.finder, "keys_for", make_keys_for)
    _around(manager.writer, "_write_full", make_write)


def _not_truncated(manager: ModelManager) -> None:
    _around(manager.finder, "_truncated", lambda _: tuple)


def _pinned_late(manager: Any, allocate: Any) -> Any:
    def bent(*args: Any, **kwargs: Any) -> Tables | None:
        touch, late = manager.pool.touch, []  # type: ignore[var-annotated]
        manager.pool.touch = late.extend
        try:
            blocks: Tables | None = allocate(*args, **kwargs)
        finally:
            manager.pool.touch = touch
            touch(late)
        return blocks

    return bent


def _hit_stays_queued(manager: ModelManager) -> None:
    def touch(blocks: Iterable[int]) -> None:
        for block in blocks:
            if block != NULL:
                manager.pool.ref_count[block] += 1

    _around(manager.pool, "touch", lambda _: touch)


def _shared_not_counted(pool: Any, touch: Any) -> Any:
    return lambda blocks: touch([block for block in blocks if pool.ref_count[block] == 0])


def _shared_queued(pool: Any, free: Any) -> Any:
    def bent(blocks: Iterable[int], *, unhashed_first: bool) -> None:
        freed = list(blocks)
        free(freed, unhashed_first=unhashed_first)
        pool.free_queue.append([block for block in freed if pool.ref_count[block] > 0 and block != NULL])

    return bent


def _null_queued(pool: Any, free: Any) -> Any:
    def bent(blocks: Iterable[int], *, unhashed_first: bool) -> None:
        freed = list(blocks)
        free(freed, unhashed_first=unhashed_first)
        if NULL in freed:
            pool.free_queue.append([NULL])

    return bent


def _unhashed_lost(pool: Any, free: Any) -> Any:
    def bent(blocks: Iterable[int], *, unhashed_first: bool) -> None:
        freed = list(blocks)
        free(freed, unhashed_first=unhashed_first)
        if unhashed_first:
            pool.free_queue.remove([b for b in freed if b in pool.free_queue and pool.key_of[b] == NO_KEY])

    return bent


def _salt_ignored(manager: ModelManager) -> None:
    def make(extend: Any) -> Any:
        def bent(keys: list[int], tokens: Tokens, identity: Identity) -> None:
            extend(keys, tokens, attrs.evolve(identity, salt=None))

        return bent

    _around(manager.key_table, "extend", make)


def _skipped_freed_again(manager: Any, give_back: Any) -> Any:
    def bent(request: Request, computed: int) -> None:
        held = [list(table.get(request.id, ())) for table in manager.tables]
        give_back(request, computed)
        for table, blocks in zip(manager.tables, held, strict=True):
            if blocks:
                table[request.id] = blocks

    return bent


def _evicted_key_stays(pool: Any, forget: Any) -> Any:
    def bent(block: int) -> None:
        index = dict(pool.index[pool.group_of[block]])
        forget(block)
        pool.index[pool.group_of[block]] = index

    return bent


def _alias_stays(pool: Any, forget: Any) -> Any:
    def bent(block: int) -> None:
        pool.aliases.pop(block, None)
        forget(block)

    return bent


def _duplicate_overwrites(pool: Any, insert: Any) -> Any:
    def bent(group: int, key: int, block: int, tokens: int) -> None:
        insert(group, key, block, tokens)
        pool.index[group][key] = (block,)

    return bent


def _queued_hits(manager: ModelManager, request: Request, adopted: Tables) -> int:
    """Hit blocks that the request would take out of the free queue."""
    if any(request.id in written for written in manager.written):
        return 0
    return sum(manager.pool.ref_count[b] == 0 and b != NULL for blocks in adopted for b in blocks)


def _hits_not_counted(manager: Any, needed: Any) -> Any:
    return lambda request, tokens, adopted, *more, **kw: (
        needed(request, tokens, adopted, *more, **kw) - _queued_hits(manager, request, adopted)
    )


def _hits_counted_twice(manager: Any, needed: Any) -> Any:
    return lambda request, tokens, adopted, *more, **kw: (
        needed(request, tokens, adopted, *more, **kw) + _queued_hits(manager, request, adopted)
    )


def _unwritten_not_freed(manager: Any, free: Any) -> Any:
    def bent(request: Request) -> None:
        if any(request.id in written for written in manager.written):
            free(request)

    return bent


def _give_back_once(manager: Any, give_back: Any) -> Any:
    def bent(request: Request, computed: int) -> None:
        if not any(table.get(request.id, (-1,))[0] == NULL for table in manager.tables):
            give_back(request, computed)

    return bent


def _head_first(_pool: Any, free: Any) -> Any:
    def bent(blocks: Iterable[int], *, unhashed_first: bool) -> None:
        free(reversed(list(blocks)), unhashed_first=unhashed_first)

    return bent


def _announced_again(pool: Any, touch: Any) -> Any:
    def bent(blocks: Sequence[int]) -> None:
        for block in blocks:
            if pool.key_of[block] != NO_KEY and pool.ref_count[block] == 0:
                pool.emit(pool.group_of[block], Event(kind="stored", keys=(pool.key_of[block],)))
        touch(blocks)

    return bent


def _silent_eviction(pool: Any, forget: Any) -> Any:
    def bent(block: int) -> None:
        said = len(pool.events)
        forget(block)
        del pool.events[said:]

    return bent


class _ByName(Scheduler):
    """Admits the request with the smallest name first."""

    def _admit(self, budget: int, scheduled: list[tuple[Request, int]]) -> None:
        ordered = sorted(self.waiting, key=lambda request: request.id)
        self.waiting.clear()
        self.waiting.extend(ordered)
        super()._admit(budget, scheduled)


class _Forgetful(Scheduler):
    """Loses a preempted request."""

    def _preempt(self, request: Request) -> None:
        super()._preempt(request)
        self.waiting.pop(0)


class _AbortLeaks(Scheduler):
    """Takes an aborted request off its queue without giving its blocks back."""

    def abort(self, name: str) -> None:
        vars(self)["_free"] = lambda _: None
        super().abort(name)
        del vars(self)["_free"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        id="cached-to-head",
        breaks="hit-survives-half-pool",
        what="The test is inverted: freed blocks that are cached, not those that are not, are reused first.",
        like="vllm#43447",
        apply=_on_pool("free", _cached_to_head),
    ),
    Mutant(
        id="evicts-one-more",
        breaks="hit-survives-fit",
        what="Taking blocks also evicts the one at the head of the queue after the last one taken.",
        apply=_on_pool("take", _evict_one_more),
    ),
    Mutant(
        id="one-token-short",
        breaks="resend-hits",
        what="The lookup leaves two tokens to compute instead of one.",
        apply=_one_token_short,
    ),
    Mutant(
        id="eagle-drops-every-pass",
        breaks="resend-hits",
        what="Under EAGLE each group drops its last block again in every pass of the fixed point.",
        like="vllm#32802",
        apply=_switched(eagle_drop="every_pass"),
    ),
    Mutant(
        id="scan-stops-at-miss",
        breaks="extension-hits",
        what="The window scan gives up at the first block that is not cached instead of going on to the left.",
        apply=_windows("find_hit", _scan_stops_at_miss),
    ),
    Mutant(
        id="junction-not-kept",
        breaks="junction-hits",
        what="Retention does not keep the window tails where two prompts diverged.",
        like="vllm#45238",
        apply=_switched(junction="ignored"),
    ),
    Mutant(
        id="tail-one-block-short",
        breaks="mask-covers-lookup",
        what="The write mask drops one block too many: its window tail is a block shorter than the lookup's.",
        apply=_windows("write_mask", _short_tail),
    ),
    Mutant(
        id="mask-without-eagle",
        breaks="mask-covers-lookup",
        what="The write mask does not keep the further block that a lookup under EAGLE matches and drops.",
        like="vllm#44082",
        apply=_windows("write_mask", _mask_without_eagle),
    ),
    Mutant(
        id="drop-remembered",
        breaks="lookup-idempotent",
        what="That the EAGLE block was dropped is remembered beyond the lookup, so that the next one keeps it.",
        apply=_drop_remembered,
    ),
    Mutant(
        id="two-holders-not-found",
        breaks="more-cache-never-hurts",
        what="A key that two blocks hold is not found.",
        apply=_on_pool("find", _two_holders_not_found),
    ),
    Mutant(
        id="admits-by-name",
        breaks="names-do-not-matter",
        what="Waiting requests are kept in a heap whose last tie-break, the request's name, comes first.",
        scheduler=_ByName,
    ),
    Mutant(
        id="first-hash-block",
        breaks="hit-content",
        what="A block of several hash blocks is named by the hash of its first one instead of its last.",
        apply=_first_hash_block,
    ),
    Mutant(
        id="evicted-key-stays",
        breaks="hit-content",
        what="An evicted block stays in the index.",
        apply=_on_pool("forget", _evicted_key_stays),
    ),
    Mutant(
        id="full-not-truncated",
        breaks="hit-covers",
        what="Full attention's blocks are not cut to the combined hit: the hit is longer than what is covered.",
        like="vllm-ascend#14283",
        apply=_not_truncated,
    ),
    Mutant(
        id="window-does-not-veto",
        breaks="hit-covers",
        what="A window group that finds nothing does not shorten the hit.",
        apply=_windows("find_hit", _no_veto),
    ),
    Mutant(
        id="pinned-late",
        breaks="pinned-before-pop",
        what="The blocks of a hit are pinned after the new blocks are taken.",
        like="vllm#33775",
        apply=_on_manager("allocate", _pinned_late),
    ),
    Mutant(
        id="hit-stays-queued",
        breaks="sole-owner",
        what="A free block that is hit again is not taken out of the free queue.",
        apply=_hit_stays_queued,
    ),
    Mutant(
        id="null-block-queued",
        breaks="null-block-inert",
        what="Freeing a table with skipped blocks puts the null block in the free queue.",
        apply=_on_pool("free", _null_queued),
    ),
    Mutant(
        id="salt-ignored",
        breaks="keys-injective",
        what="The cache salt does not enter the block hash.",
        apply=_salt_ignored,
    ),
    Mutant(
        id="words-untagged",
        breaks="keys-injective",
        what="Salt and LoRA name enter the block hash as plain words, and the LoRA path not at all.",
        like="vllm#44701, vllm#30931",
        apply=_switched(tagged_keys=False),
    ),
    Mutant(
        id="unhashed-lost",
        breaks="pool-conserved",
        what="Freed blocks without a hash are set apart for the head of the queue and never put there.",
        apply=_on_pool("free", _unhashed_lost),
    ),
    Mutant(
        id="shared-block-queued",
        breaks="queue-well-formed",
        what="A freed block is queued whether or not another request still holds it.",
        apply=_on_pool("free", _shared_queued),
    ),
    Mutant(
        id="shared-not-counted",
        breaks="ref-count-is-holders",
        what="A hit on a block that is in use takes no reference.",
        apply=_on_pool("touch", _shared_not_counted),
    ),
    Mutant(
        id="skipped-freed-again",
        breaks="ref-count-is-holders",
        what="Blocks that the window has passed are given back and stay in the table, to be freed twice.",
        apply=_on_manager("_give_back_skipped", _skipped_freed_again),
    ),
    Mutant(
        id="alias-stays",
        breaks="index-matches-blocks",
        what="When a block with two keys is evicted, only its first key leaves the index.",
        apply=_on_pool("forget", _alias_stays),
    ),
    Mutant(
        id="duplicate-overwrites",
        breaks="index-matches-blocks",
        what="A second block with the same key replaces the first one in the index.",
        apply=_on_pool("insert", _duplicate_overwrites),
    ),
    Mutant(
        id="step-check-capped",
        breaks="check-implies-alloc",
        what="The per-step check caps a window group's need, which allocation does not.",
        like="vllm#45856",
        apply=_switched(admission_cap="always"),
    ),
    Mutant(
        id="hits-not-counted",
        breaks="check-implies-alloc",
        what="The capacity check forgets that hit blocks leave the free queue.",
        apply=_on_manager("_blocks_needed", _hits_not_counted),
    ),
    Mutant(
        id="unwritten-not-freed",
        breaks="drain-frees-all",
        what="A request that never filled a block is not known to the cache, and its blocks are not freed.",
        apply=_on_manager("free", _unwritten_not_freed),
    ),
    Mutant(
        id="abort-leaks",
        breaks="drain-frees-all",
        what="An aborted request leaves its queue without giving its blocks back.",
        scheduler=_AbortLeaks,
    ),
    Mutant(
        id="given-back-once",
        breaks="footprint-bounded",
        what="Blocks that the window has passed are only given back the first time: then the scan meets a null block.",
        apply=_on_manager("_give_back_skipped", _give_back_once),
    ),
    Mutant(
        id="freed-head-first",
        breaks="tail-goes-first",
        what="A request's blocks are freed first to last, so that its prefix loses its beginning first.",
        apply=_on_pool("free", _head_first),
    ),
    Mutant(
        id="gate-counts-whole-sequence",
        breaks="fits-alone-runs",
        what="The admission gate counts a window group as if it held the whole sequence.",
        like="vllm#39734",
        apply=_switched(admission_cap="none"),
    ),
    Mutant(
        id="hits-counted-twice",
        breaks="fits-alone-runs",
        what="The capacity check counts hit blocks as leaving the free queue and as new ones too.",
        apply=_on_manager("_blocks_needed", _hits_counted_twice),
    ),
    Mutant(
        id="preempted-forgotten",
        breaks="progress",
        what="A preempted request is not put back in the waiting queue.",
        scheduler=_Forgetful,
    ),
    Mutant(
        id="eviction-without-event",
        breaks="events-replay-index",
        what="An eviction emits no removed event.",
        apply=_on_pool("forget", _silent_eviction),
    ),
    Mutant(
        id="hit-announced-again",
        breaks="events-self-consistent",
        what="A block that a hit takes out of the free queue is announced as stored once more.",
        apply=_on_pool("touch", _announced_again),
    ),
)
"""At least one for each property."""
