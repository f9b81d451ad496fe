"""The combined prefix-cache lookup: ``vllm/v1/core/kv_cache_coordinator.py``,
``HybridKVCacheCoordinator`` and ``UnitaryKVCacheCoordinator``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from hitproof.model.observation import Lookup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hitproof.model.config import CacheConfig
    from hitproof.model.groups import GroupRules
    from hitproof.model.pool import BlockPool


@attrs.frozen(kw_only=True, slots=True)
class SpecGroup:
    """Groups of one spec, looked up together: a block counts only if every group has it."""

    ids: tuple[int, ...]
    rules: GroupRules
    full: bool


class Finder:
    """Finds the longest prefix on which every group agrees."""

    def __init__(self, config: CacheConfig) -> None:
        self._semantics = config.rules
        self._eagle = config.use_eagle
        self._alignment = config.scheduler_block_size
        self._key_size = config.key_block_size
        self._num_groups = len(config.groups)
        rules = config.group_rules()
        specs: dict[object, list[int]] = {}
        for i, group in enumerate(config.groups):
            specs.setdefault(group, []).append(i)
        found = [
            SpecGroup(ids=tuple(ids), rules=rules[ids[0]], full=config.groups[ids[0]].kind == "full")
            for ids in specs.values()
        ]
        # Full attention first: it bounds the others (verify_and_split_kv_cache_groups).
        self.specs = tuple(sorted(found, key=lambda spec: not spec.full))

    def keys_for(self, spec: SpecGroup, keys: list[int]) -> list[int]:
        """The request's keys at the block size of ``spec``."""
        scale = spec.rules.block_size // self._key_size
        return keys if scale == 1 else keys[scale - 1 :: scale]

    def find(self, pool: BlockPool, keys: list[int], max_tokens: int) -> Lookup:
        """The hit of a request with block keys ``keys``, at most ``max_tokens`` long.

        Each spec accepts the candidate length or shortens it; after any shortening all are asked
        again. With one full-attention spec and one other, most releases make one pass.
        """
        if self._num_groups == 1:
            spec = self.specs[0]
            blocks, hit = spec.rules.find_hit(pool, spec.ids, keys, max_tokens, self._eagle, self._alignment)
            return Lookup(hit_tokens=hit, blocks=(tuple(blocks[0]),))
        once = self._semantics.eagle_drop == "once_per_candidate"
        limit = max_tokens
        if self._semantics.eagle_lookahead_limit == "hashes":
            limit = len(keys) * self._key_size
        keys_of = [self.keys_for(spec, keys) for spec in self.specs]
        found: dict[int, list[int]] = {}
        length_of: dict[SpecGroup, int] = {}
        verified: set[int] = set()
        one_pass = self._semantics.one_pass_hybrid and len(self.specs) == 2 and self.specs[0].full
        hit, longest = max_tokens, 0
        while True:
            current = hit
            for i, spec in enumerate(self.specs):
                if spec.full and spec in length_of:
                    # Full attention is downward closed: what was found once only gets shorter.
                    current = min(current, length_of[spec])
                    continue
                drop = self._eagle and i not in verified
                ask = current
                if drop and once:
                    ask = min(current + spec.rules.block_size, limit)
                blocks, length = spec.rules.find_hit(pool, spec.ids, keys_of[i], ask, drop, self._alignment)
                if once and drop:
                    verified.add(i)
                elif length < current:
                    verified.clear()
                current = length
                length_of[spec] = length
                found.update(zip(spec.ids, blocks, strict=True))
                longest = max(longest, current)
            if current >= hit:
                break
            hit = current
            if one_pass:
                break
        for spec in self._truncated():
            for group in spec.ids:
                del found[group][hit // spec.rules.block_size :]
        tables = tuple(tuple(found[group]) for group in range(self._num_groups))
        shown = longest > hit and self._semantics.junction != "ignored"
        return Lookup(hit_tokens=hit, blocks=tables, junction=longest if shown else 0)

    def _truncated(self) -> Sequence[SpecGroup]:
        full = [spec for spec in self.specs if spec.full]
        return full if self._semantics.truncates == "every_full_group" else full[:1]
