"""What enters the index: ``cache_blocks`` of the coordinator and the single-type managers, and
``BlockPool.cache_full_blocks`` / ``cache_partial_block``.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

from hitproof.model.errors import ManagerFault
from hitproof.model.pool import NO_KEY, NULL, BlockPool, Event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hitproof.model.config import CacheConfig
    from hitproof.model.groups import GroupRules
    from hitproof.model.request import Request


class Writer:
    """Enters a request's full blocks, and the partial tail of a coarse full-attention group."""

    def __init__(
        self,
        config: CacheConfig,
        pool: BlockPool,
        groups: tuple[GroupRules, ...],
        tables: list[dict[str, list[int]]],
        written: list[dict[str, int]],
    ) -> None:
        self._config = config
        self._pool = pool
        self._groups = groups
        self._tables = tables
        self._written = written
        self._alignment = config.scheduler_block_size
        self._key_size = config.key_block_size
        self._retention = config.retention
        self._partial = tuple(
            config.rules.partial_tail != "none"
            and group.kind == "full"
            and group.block_size != self._key_size
            for group in config.groups
        )

    def write(self, request: Request, keys: list[int], computed: int) -> None:
        """Offer all blocks that ``computed`` tokens fill."""
        for g, rules in enumerate(self._groups):
            tokens = self._cacheable(computed, rules.block_size)
            self._write_full(g, request, keys, tokens)
            if self._partial[g]:
                self._write_partial_tail(g, request, keys, tokens)

    def _cacheable(self, computed: int, block_size: int) -> int:
        """Tokens that may be written: with several groups only up to where a hit can end, under
        EAGLE one block more (``HybridKVCacheCoordinator.cache_blocks``).
        """
        mask = self._config.rules.write_mask
        if len(self._groups) == 1 or mask == "none":
            return computed
        aligned = computed // self._alignment * self._alignment
        if mask == "reachable" and self._config.use_eagle and aligned > 0:
            return min(computed, aligned + block_size)
        return aligned

    def boundaries(self, request: Request, block_size: int) -> Sequence[int]:
        """Prompt lengths whose window tails retention keeps: replay boundaries and junction."""
        rules, eagle, unit = self._config.rules, self._config.use_eagle, self._alignment
        prompt = request.num_prompt_tokens
        found = [prompt - 1]
        if eagle and rules.replay_boundary == "eagle_checkpoints":
            resend, extension = (prompt - 1) // unit * unit, prompt // unit * unit
            found = sorted({max(resend - unit, 0), max(extension - unit, 0)})
        if request.junction and rules.junction != "ignored":
            found.append(request.junction)
            if eagle and rules.junction == "kept_with_eagle":
                found.append(request.junction - block_size)
        return found

    def _write_full(self, g: int, request: Request, keys: list[int], tokens: int) -> None:
        rules, pool = self._groups[g], self._pool
        size = rules.block_size
        start, end = self._written[g].get(request.id, 0), tokens // size
        if start >= end:
            return
        self._written[g][request.id] = end
        scale = size // self._key_size
        table = self._tables[g][request.id]
        boundaries = self.boundaries(request, size) if self._retention is not None else ()
        mask = rules.write_mask(
            start, end, self._alignment, self._config.use_eagle, self._retention, boundaries
        )
        offered = range(start, end) if mask is None else compress(range(start, end), mask)
        kept = [i for i in offered if table[i] != NULL]
        for i in kept:
            block = table[i]
            if pool.key_of[block] != NO_KEY:
                # Only a partial tail that has become full may already have a key.
                if pool.tokens_of[block] >= (i + 1) * size or self._config.rules.partial_tail == "none":
                    raise ManagerFault("assertion", f"full block {block} is already in the index")
                pool.forget(block)
            pool.insert(g, keys[(i + 1) * scale - 1], block, (i + 1) * size)
        semantics = self._config.rules
        if pool.record_events:
            if start and semantics.events_read_parent_block and table[start - 1] == NULL:
                raise ManagerFault("assertion", "the parent of a stored event is the null block")
            pool.emit(
                g,
                Event(
                    kind="stored",
                    keys=tuple(keys[(i + 1) * scale - 1] for i in kept),
                    parent=keys[start * scale - 1] if start else NO_KEY,
                    tokens=request.tokens.slice(start * size, end * size),
                    block_size=size,
                    extra=(tuple(request.identity.event_words(i * size) for i in kept) or None)
                    if semantics.events_carry_extra
                    else None,
                    lora=request.identity.lora if semantics.events_name_lora else None,
                ),
            )

    def _write_partial_tail(self, g: int, request: Request, keys: list[int], tokens: int) -> None:
        """An extra key at the last hash-block boundary of the prompt inside a larger block."""
        unit, size = self._key_size, self._groups[g].block_size
        limit = request.num_prompt_tokens
        if self._config.rules.partial_tail == "replay" and not self._config.use_eagle:
            limit -= 1
        boundary = limit // unit * unit
        table = self._tables[g][request.id]
        if boundary == 0 or boundary > tokens or boundary % size == 0 or boundary // size >= len(table):
            return
        block, key = table[boundary // size], keys[boundary // unit - 1]
        pool = self._pool
        if block == NULL or pool.holds(g, key, block):
            return
        if pool.key_of[block] != NO_KEY and pool.tokens_of[block] < boundary:
            pool.forget(block)
        pool.insert(g, key, block, boundary)
        if pool.record_events:
            pool.emit(
                g,
                Event(
                    kind="stored",
                    keys=(key,),
                    parent=keys[boundary // unit - 2] if boundary > unit else NO_KEY,
                    tokens=request.tokens.slice(boundary - unit, boundary),
                    block_size=unit,
                    extra=(request.identity.event_words(boundary - unit),),
                    lora=request.identity.lora,
                ),
            )
