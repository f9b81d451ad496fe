"""Sliding window: ``vllm/v1/core/single_type_kv_cache_manager.py``, ``SlidingWindowManager``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from hitproof.model.groups.group import cdiv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hitproof.model.pool import BlockPool
    from hitproof.model.semantics import Semantics


@attrs.frozen(kw_only=True, slots=True)
class SlidingWindow:
    """The next token needs the ``window - 1`` tokens before it; older blocks are given back."""

    block_size: int
    window: int
    extra_retained_tokens: int
    semantics: Semantics

    def tail(self, eagle: bool) -> int:
        """Contiguous blocks that a hit needs at its end (``_contiguous_blocks_for_hit``)."""
        return cdiv(self.window - 1, self.block_size) + (1 if eagle else 0)

    def find_hit(
        self,
        pool: BlockPool,
        ids: Sequence[int],
        keys: Sequence[int],
        max_tokens: int,
        drop: bool,
        alignment: int,
    ) -> tuple[list[list[int]], int]:
        """Right to left for a run of ``tail`` cached blocks that ends on an aligned boundary.

        A shorter run counts only if it starts at block 0.
        """
        size, need = self.block_size, self.tail(drop)
        per_unit = alignment // size
        shift = 0 if drop and self.semantics.eagle_window_alignment == "after_drop" else 1
        run: list[list[int]] = []
        for i in range(max_tokens // size - 1, -1, -1):
            holders = pool.find(keys[i], ids)
            if holders is None:
                run.clear()
                continue
            if not run and (i + shift) % per_unit:
                continue
            run.append(holders)
            if len(run) >= need:
                start, end = i, i + len(run)
                break
        else:
            start, end = 0, len(run) - len(run) % per_unit
        run.reverse()
        if drop and end:
            end -= 1
            end -= end % per_unit
        del run[max(0, end - start) :]
        return [[0] * min(start, end) + [holders[g] for holders in run] for g in range(len(ids))], end * size

    def write_mask(
        self,
        start: int,
        end: int,
        alignment: int,
        eagle: bool,
        retention: int | None,
        boundaries: Sequence[int],
    ) -> list[bool] | None:
        """A tail per segment, and under retention a tail before each of ``boundaries``.

        The segment is the alignment (retention None), nothing (0) or the interval.
        """
        if self.semantics.write_mask == "none":
            return None
        if self.semantics.write_mask == "aligned":
            return self._aligned_mask(start, end, alignment // self.block_size)
        need, shift = self.tail(eagle), 1 if eagle else 0
        mask = [False] * (end - start)
        segment = alignment if retention is None else retention
        if segment:
            per_segment = segment // self.block_size
            if need >= per_segment:
                return None
            for i in range(start, end):
                if i >= shift and (i - shift) % per_segment >= per_segment - need:
                    mask[i - start] = True
        if retention is not None:
            for boundary in boundaries:
                stop = boundary // alignment * alignment // self.block_size + shift
                for i in range(max(start, stop - need), min(end, stop)):
                    mask[i - start] = True
        return mask

    def _aligned_mask(self, start: int, end: int, per_segment: int) -> list[bool] | None:
        need = self.tail(eagle=False)
        if per_segment <= 1 or need >= per_segment:
            return None
        return [i % per_segment >= per_segment - need for i in range(start, end)]

    def skipped_tokens(self, computed: int) -> int:
        """Tokens before the window of the next token, less those kept on purpose."""
        return max(0, computed - self.window + 1 - self.extra_retained_tokens)

    def admission_cap(self, max_num_batched_tokens: int, max_model_len: int) -> int | None:
        """The window plus one step's tokens, plus one block for a window that straddles blocks."""
        held = self.window - 1 + self.extra_retained_tokens + max_num_batched_tokens
        return cdiv(min(held, max_model_len), self.block_size) + 1

    def needed(self, boundary: int) -> range:
        """The tail before the boundary."""
        end = boundary // self.block_size
        return range(max(0, end - self.tail(eagle=False)), end)
