"""The block pool: ``vllm/v1/core/block_pool.py`` and ``FreeKVCacheBlockQueue`` of
``kv_cache_utils.py``.

Blocks are integers; block 0 is the null block. Keys are integers too (see ``content.py``), and a key
is looked up per group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from hitproof.model.errors import ManagerFault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

NULL = 0
NO_KEY = -1


@attrs.frozen(kw_only=True, slots=True)
class Event:
    """One KV event. ``tokens``: the content pieces that a stored event lists, ``extra``: per block
    the salt and LoRA words, ``parent``: the key before the first block (NO_KEY at position 0).
    """

    kind: Literal["stored", "removed", "cleared"]
    group: int | None = None
    keys: tuple[int, ...] = ()
    parent: int = NO_KEY
    tokens: tuple[tuple[str, int, int], ...] = ()
    block_size: int = 0
    extra: tuple[tuple[str, ...] | None, ...] | None = None
    lora: str | None = None


class FreeQueue:
    """The free blocks in eviction order, linked both ways. The null block, which is never free,
    stands before the first and after the last.
    """

    def __init__(self, num_blocks: int) -> None:
        self._after = [*range(1, num_blocks), NULL]
        self._before = [num_blocks - 1, *range(num_blocks - 1)]
        self._length = num_blocks - 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        block = NULL
        while (block := self._after[block]) != NULL:
            yield block

    def popleft(self, count: int) -> list[int]:
        """Take the first ``count`` blocks out."""
        block, after = NULL, self._after
        blocks = [block := after[block] for _ in range(count)]
        after[NULL] = after[block]
        self._before[after[NULL]] = NULL
        self._length -= count
        return blocks

    def remove(self, blocks: list[int]) -> None:
        """Take ``blocks`` out, wherever they are."""
        before, after = self._before, self._after
        for block in blocks:
            left, right = before[block], after[block]
            after[left], before[right] = right, left
        self._length -= len(blocks)

    def append(self, blocks: list[int]) -> None:
        """Put ``blocks`` at the tail, in this order."""
        self._insert(self._before[NULL], blocks)

    def prepend(self, blocks: list[int]) -> None:
        """Put ``blocks`` at the head, in this order."""
        self._insert(NULL, blocks)

    def _insert(self, left: int, blocks: list[int]) -> None:
        before, after = self._before, self._after
        right = after[left]
        for block in blocks:
            after[left], before[block] = block, left
            left = block
        after[left], before[right] = right, left
        self._length += len(blocks)


class BlockPool:
    """Ref counts, the free queue in eviction order, and the index from keys to blocks."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        *,
        null_block_counted: bool,
        events_name_group: bool,
        record_events: bool,
    ) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self.free_queue = FreeQueue(num_blocks)
        # Per group: key -> blocks that hold it, oldest first. Lookup returns the oldest.
        self.index: list[dict[int, tuple[int, ...]]] = [{} for _ in range(num_groups)]
        self.group_of = [0] * num_blocks
        self.key_of = [NO_KEY] * num_blocks
        # Length of the prefix that key_of names, in tokens, counted from its block's own request.
        self.tokens_of = [0] * num_blocks
        self.aliases: dict[int, list[int]] = {}
        self.events: list[Event] = []
        self._null_block_counted = null_block_counted
        self._events_name_group = events_name_group
        self.record_events = record_events

    def find(self, key: int, groups: Sequence[int]) -> list[int] | None:
        """The oldest block holding ``key`` in each group, or None if a group has none."""
        found = []
        for group in groups:
            holders = self.index[group].get(key)
            if holders is None:
                return None
            found.append(holders[0])
        return found

    def holds(self, group: int, key: int, block: int) -> bool:
        """Whether ``block`` is in ``group``'s index under ``key``."""
        return block in self.index[group].get(key, ())

    def insert(self, group: int, key: int, block: int, tokens: int) -> None:
        """Enter ``block`` under ``key``: its first key is its own, later ones are aliases."""
        own = self.key_of[block]
        if own == NO_KEY:
            self.key_of[block] = key
            self.tokens_of[block] = tokens
            self.group_of[block] = group
        elif self.holds(group, key, block):
            return
        else:
            self.aliases.setdefault(block, []).append(key)
        index = self.index[group]
        index[key] = (*index[key], block) if key in index else (block,)

    def forget(self, block: int) -> None:
        """Take ``block`` out of the index under all its keys (``_remove_cached_block_hashes``)."""
        own = self.key_of[block]
        if own == NO_KEY:
            return
        self.key_of[block] = NO_KEY
        group = self.group_of[block]
        self._remove(group, own, block)
        if block in self.aliases:
            for key in self.aliases.pop(block):
                self._remove(group, key, block)

    def _remove(self, group: int, key: int, block: int) -> None:
        holders = self.index[group].pop(key)
        if len(holders) > 1:
            at = holders.index(block)
            self.index[group][key] = holders[:at] + holders[at + 1 :]
        if self.record_events:
            self.emit(group, Event(kind="removed", keys=(key,)))

    def emit(self, group: int, event: Event) -> None:
        """Queue an event of ``group``."""
        self.events.append(attrs.evolve(event, group=group if self._events_name_group else None))

    def take(self, count: int) -> list[int]:
        """The first ``count`` free blocks, evicted from the index, with one reference each."""
        if count > len(self.free_queue):
            raise ManagerFault("pool exhausted")
        ref_count, key_of = self.ref_count, self.key_of
        blocks = self.free_queue.popleft(count)
        for block in blocks:
            if key_of[block] != NO_KEY:
                self.forget(block)
            ref_count[block] = 1
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """One more reference each; a free block leaves the queue."""
        ref_count = self.ref_count
        if self._null_block_counted:
            ref_count[NULL] += blocks.count(NULL)
        held = [block for block in blocks if block != NULL]
        self.free_queue.remove([block for block in held if ref_count[block] == 0])
        for block in held:
            ref_count[block] += 1

    def free(self, blocks: Iterable[int], *, unhashed_first: bool) -> None:
        """One reference less each. ``blocks`` are in eviction order: they join the tail of the
        queue in this order, but with ``unhashed_first`` those without a key join the head.
        """
        ref_count, key_of = self.ref_count, self.key_of
        null_references = ref_count[NULL]
        head: list[int] = []
        tail: list[int] = []
        for block in blocks:
            left = ref_count[block] = ref_count[block] - 1
            if left or block == NULL:
                continue
            if unhashed_first and key_of[block] == NO_KEY:
                head.append(block)
            else:
                tail.append(block)
        if not self._null_block_counted:
            ref_count[NULL] = null_references
        self.free_queue.append(tail)
        self.free_queue.prepend(head)

    def reset(self) -> bool:
        """Empty the index if no block is in use (``reset_prefix_cache``)."""
        if len(self.free_queue) != self.num_blocks - 1:
            return False
        for index in self.index:
            index.clear()
        self.aliases.clear()
        self.key_of = [NO_KEY] * self.num_blocks
        if self.record_events:
            self.events.append(Event(kind="cleared"))
        return True
