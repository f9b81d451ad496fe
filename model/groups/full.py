"""Full attention: ``vllm/v1/core/single_type_kv_cache_manager.py``, ``FullAttentionManager``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hitproof.model.pool import BlockPool


@attrs.frozen(kw_only=True, slots=True)
class FullAttention:
    """Every block of the prefix is needed; a hit may end at any aligned block boundary."""

    block_size: int

    def find_hit(
        self,
        pool: BlockPool,
        ids: Sequence[int],
        keys: Sequence[int],
        max_tokens: int,
        drop: bool,
        alignment: int,
    ) -> tuple[list[list[int]], int]:
        """Left to right until the first miss; then the EAGLE drop, then align down."""
        found: list[list[int]] = []
        for key in keys[: max_tokens // self.block_size]:
            holders = pool.find(key, ids)
            if holders is None:
                break
            found.append(holders)
        hit = len(found) * self.block_size
        if drop and hit > 0:
            hit -= self.block_size
        hit -= hit % alignment
        del found[hit // self.block_size :]
        return [[holders[i] for holders in found] for i in range(len(ids))], hit

    def write_mask(
        self,
        start: int,
        end: int,
        alignment: int,
        eagle: bool,
        retention: int | None,
        boundaries: Sequence[int],
    ) -> list[bool] | None:
        """All: retention does not thin out full attention."""
        return None

    def skipped_tokens(self, computed: int) -> int:
        """None."""
        return 0

    def admission_cap(self, max_num_batched_tokens: int, max_model_len: int) -> int | None:
        """No cap: all blocks are held until the request ends."""
        return None

    def needed(self, boundary: int) -> range:
        """The whole prefix."""
        return range(boundary // self.block_size)
