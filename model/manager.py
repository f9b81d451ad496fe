"""``Manager``: the calls a scheduler makes; ``ModelManager``: the abstract state machine.

Read beside ``vllm/v1/core/kv_cache_manager.py`` (``KVCacheManager``) and the allocation half of
``single_type_kv_cache_manager.py``. What is written to the index is in ``writes.py``, lookup in
``lookup.py``, the pool in ``pool.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hitproof.model.content import KeyTable
from hitproof.model.groups import cdiv
from hitproof.model.lookup import Finder
from hitproof.model.observation import Lookup, Snapshot
from hitproof.model.pool import NO_KEY, NULL, BlockPool, Event
from hitproof.model.writes import Writer

if TYPE_CHECKING:
    from hitproof.model.config import CacheConfig
    from hitproof.model.observation import Tables
    from hitproof.model.request import Request


class Manager(Protocol):
    """A KV-cache manager at the height of vLLM's ``KVCacheManager``. Raises ManagerFault where
    vLLM's manager would raise.
    """

    def add(self, request: Request) -> tuple[int, ...]:
        """Make the request known; returns its block keys so far."""

    def append(self, request: Request) -> tuple[int, ...]:
        """The request grew by output tokens; returns its new block keys."""

    def step(self) -> None:
        """A scheduler step starts."""

    def lookup(self, request: Request) -> Lookup:
        """The request's prefix-cache hit now. Changes nothing."""

    def allocate(
        self, request: Request, new_tokens: int, hit: Lookup | None, *, must_fit: bool, beside: bool
    ) -> Tables | None:
        """Blocks for ``new_tokens`` more tokens, adopting ``hit`` first; None if there is no room.

        ``must_fit``: refuse unless the whole sequence fits. ``beside``: other requests run already.
        """

    def free(self, request: Request) -> None:
        """Give all blocks of the request back."""

    def reset(self) -> bool:
        """Empty the prefix cache; False if a block is in use."""

    def take_events(self) -> tuple[Event, ...]:
        """KV events since the last call."""

    def snapshot(self) -> Snapshot:
        """The whole state."""


class ModelManager:
    """The abstract state machine of vLLM's hybrid KV-cache manager, exact to block ids."""

    def __init__(self, config: CacheConfig, *, record_events: bool = True) -> None:
        semantics = config.rules
        self.config = config
        self.pool = BlockPool(
            config.num_blocks,
            len(config.groups),
            null_block_counted=semantics.null_block_counted,
            events_name_group=semantics.events_name_group,
            record_events=record_events,
        )
        self.groups = config.group_rules()
        self.key_table = KeyTable(config.key_block_size, tagged=semantics.tagged_keys)
        self.keys: dict[str, list[int]] = {}
        self.finder = Finder(config)
        # Per group: request -> its blocks, and request -> how many of them were offered to the index.
        self.tables: list[dict[str, list[int]]] = [{} for _ in config.groups]
        self.written: list[dict[str, int]] = [{} for _ in config.groups]
        self.writer = Writer(config, self.pool, self.groups, self.tables, self.written)
        self._snapshot: Snapshot | None = None
        self._adopts_as_found = semantics.adoption == "as_found"
        self._caps = tuple(
            rules.admission_cap(config.max_num_batched_tokens, config.max_model_len) for rules in self.groups
        )
        policy = semantics.unhashed_first
        splits = policy != "never" and (config.enable_prefix_caching or policy != "every_group_if_caching")
        self._unhashed_first_when_skipped = splits
        self._unhashed_first_when_freed = tuple(
            splits and (policy != "window_groups" or group.kind == "sliding_window")
            for group in config.groups
        )

    def add(self, request: Request) -> tuple[int, ...]:
        """Compute the block keys of the prompt (``Request.update_block_hashes``)."""
        self.keys[request.id] = []
        return self.append(request)

    def append(self, request: Request) -> tuple[int, ...]:
        """Compute the block keys that new tokens completed."""
        if not self.config.enable_prefix_caching:
            return ()
        keys = self.keys[request.id]
        before = len(keys)
        self.key_table.extend(keys, request.tokens, request.identity)
        return tuple(keys[before:])

    def step(self) -> None:
        """Nothing to do for the modelled kinds (``new_step_starts`` serves Mamba)."""

    def lookup(self, request: Request) -> Lookup:
        """``get_computed_blocks``: at most all tokens but the last, which must be computed."""
        if not self.config.enable_prefix_caching:
            return Lookup(hit_tokens=0, blocks=((),) * len(self.groups))
        return self.finder.find(self.pool, self.keys[request.id], request.num_tokens - 1)

    def allocate(
        self, request: Request, new_tokens: int, hit: Lookup | None, *, must_fit: bool, beside: bool
    ) -> Tables | None:
        """``allocate_slots``: gate, give back skipped blocks, check, adopt the hit, allocate, write."""
        self._snapshot = None
        config, pool = self.config, self.pool
        adopted = hit.blocks if hit is not None and any(hit.blocks) else ((),) * len(self.groups)
        local = request.computed + (hit.hit_tokens if hit is not None else 0)
        total = min(local, config.max_model_len)
        spare = config.watermark_blocks if beside and not request.running else 0
        cap = config.rules.admission_cap
        if must_fit:
            full = min(request.num_tokens, config.max_model_len)
            if self._blocks_needed(request, full, adopted, total, capped=cap != "none") + spare > len(
                pool.free_queue
            ):
                return None
        wanted = min(total + new_tokens, config.max_model_len)
        self._give_back_skipped(request, request.computed if self._adopts_as_found else total)
        if self._blocks_needed(request, wanted, adopted, local, capped=cap == "always") + spare > len(
            pool.free_queue
        ):
            return None
        if any(adopted):
            self._adopt(request, adopted, local)
        new = []
        for table, rules in zip(self.tables, self.groups, strict=True):
            held = table.setdefault(request.id, [])
            fresh = pool.take(max(0, cdiv(wanted, rules.block_size) - len(held)))
            held.extend(fresh)
            new.append(tuple(fresh))
        if config.enable_prefix_caching:
            self.writer.write(request, self.keys[request.id], min(total + new_tokens, request.num_tokens))
        return tuple(new)

    def _blocks_needed(
        self, request: Request, tokens: int, adopted: Tables, computed: int, *, capped: bool
    ) -> int:
        """``get_num_blocks_to_allocate``: new blocks plus hit blocks that must leave the free queue."""
        needed = 0
        ref_count = self.pool.ref_count
        for g, rules in enumerate(self.groups):
            required = cdiv(tokens, rules.block_size)
            limit = self._caps[g]
            if capped and limit is not None:
                required = min(required, limit)
            held = len(self.tables[g].get(request.id, ()))
            if request.id in self.written[g]:
                needed += max(required - held, 0)
                continue
            skipped = 0 if self._adopts_as_found else rules.skipped_tokens(computed) // rules.block_size
            blocks = adopted[g]
            needed += max(required - max(skipped, len(blocks) + held), 0)
            needed += [ref_count[b] for b in blocks[max(0, skipped - held) :] if b != NULL].count(0)
        return needed

    def _give_back_skipped(self, request: Request, computed: int) -> None:
        """``remove_skipped_blocks``: from the last skipped block back to the first null block."""
        for table, rules in zip(self.tables, self.groups, strict=True):
            skipped = rules.skipped_tokens(computed) // rules.block_size
            blocks = table.get(request.id)
            if skipped <= 0 or not blocks:
                continue
            start = end = min(skipped, len(blocks))
            while start > 0 and blocks[start - 1] != NULL:
                start -= 1
            freed = blocks[start:end]
            blocks[start:end] = [NULL] * len(freed)
            self.pool.free(reversed(freed), unhashed_first=self._unhashed_first_when_skipped)

    def _adopt(self, request: Request, adopted: Tables, computed: int) -> None:
        """``add_local_computed_blocks``, once per request: null blocks stand for skipped ones."""
        if any(request.id in written for written in self.written):
            return
        for g, rules in enumerate(self.groups):
            skipped = 0 if self._adopts_as_found else rules.skipped_tokens(computed) // rules.block_size
            kept = adopted[g][skipped:]
            self.pool.touch(kept)
            self.tables[g][request.id] = [NULL] * skipped + list(kept)
            self.written[g][request.id] = skipped + len(kept)

    def free(self, request: Request) -> None:
        """Group by group, last block first, so that the tail of the sequence is evicted first."""
        self._snapshot = None
        for table, written, unhashed_first in zip(
            self.tables, self.written, self._unhashed_first_when_freed, strict=True
        ):
            written.pop(request.id, None)
            self.pool.free(reversed(table.pop(request.id, [])), unhashed_first=unhashed_first)

    def reset(self) -> bool:
        """``reset_prefix_cache``."""
        self._snapshot = None
        return self.pool.reset()

    def take_events(self) -> tuple[Event, ...]:
        """Events since the last call, oldest first."""
        events = tuple(self.pool.events)
        self.pool.events.clear()
        return events

    def snapshot(self) -> Snapshot:
        """Everything that the comparison with vLLM looks at."""
        if self._snapshot is None:
            self._snapshot = self._take_snapshot()
        return self._snapshot

    def _take_snapshot(self) -> Snapshot:
        pool = self.pool
        aliases = {block: tuple(sorted(further)) for block, further in pool.aliases.items()}
        keys = tuple(
            None if own == NO_KEY else (group, own, aliases.get(block, ()))
            for block, (group, own) in enumerate(zip(pool.group_of, pool.key_of, strict=True))
        )
        live = sorted({request for table in self.tables for request, blocks in table.items() if blocks})
        return Snapshot(
            ref_count=tuple(pool.ref_count),
            free_queue=tuple(pool.free_queue),
            keys=keys,
            index=tuple(tuple(sorted(index.items())) for index in pool.index),
            tables=tuple(
                (request, tuple(tuple(table.get(request, ())) for table in self.tables)) for request in live
            ),
        )
