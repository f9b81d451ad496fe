"""Chunked local attention: ``vllm/v1/core/single_type_kv_cache_manager.py``,
``ChunkedLocalAttentionManager``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from hitproof.model.groups.group import cdiv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hitproof.model.pool import BlockPool


@attrs.frozen(kw_only=True, slots=True)
class ChunkedLocal:
    """A token attends to its own chunk of ``chunk`` tokens only; earlier chunks are given back."""

    block_size: int
    chunk: int

    def find_hit(
        self,
        pool: BlockPool,
        ids: Sequence[int],
        keys: Sequence[int],
        max_tokens: int,
        drop: bool,
        alignment: int,
    ) -> tuple[list[list[int]], int]:
        """Earlier chunks count as computed; the current chunk is read left to right.

        vLLM asserts that there is no EAGLE drop and that block size and alignment are equal;
        ``CacheConfig`` refuses such configs.
        """
        start = max_tokens // self.chunk * self.chunk // self.block_size
        found = [[0] * start for _ in ids]
        for key in keys[start : max_tokens // self.block_size]:
            holders = pool.find(key, ids)
            if holders is None:
                break
            for blocks, block in zip(found, holders, strict=True):
                blocks.append(block)
        return found, len(found[0]) * self.block_size

    def write_mask(
        self,
        start: int,
        end: int,
        alignment: int,
        eagle: bool,
        retention: int | None,
        boundaries: Sequence[int],
    ) -> list[bool] | None:
        """All: retention does not thin out chunked local attention."""
        return None

    def skipped_tokens(self, computed: int) -> int:
        """All tokens of earlier chunks."""
        return computed // self.chunk * self.chunk

    def admission_cap(self, max_num_batched_tokens: int, max_model_len: int) -> int | None:
        """One chunk plus one step's tokens."""
        return cdiv(min(self.chunk + max_num_batched_tokens, max_model_len), self.block_size)

    def needed(self, boundary: int) -> range:
        """The part of the boundary's chunk that lies before it."""
        return range(boundary // self.chunk * self.chunk // self.block_size, boundary // self.block_size)
