"""``CacheConfig``: everything that can influence a run, and nothing else."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import attrs

from hitproof.model.errors import BadInput, NotModelled, shown
from hitproof.model.groups import Group, GroupRules, rules_of, whole_number
from hitproof.model.semantics import NEWEST, Semantics

MOST_BLOCKS = 10_000_000
"""The largest pool (blocks): several times what a machine with the largest cards has."""

MOST_TOKENS = 10_000_000
"""The longest sequence (``max_model_len``, in tokens)."""

MOST_GROUPS = 64

DEFAULT: Any = "default"
"""``retention_interval``: take the release's own default."""

NOT_MODELLED = {
    "dcp_world_size": "context parallelism",
    "decode_context_parallel_size": "context parallelism",
    "kv_transfer_config": "KV connectors",
    "kv_connector": "KV connectors",
    "num_speculative_tokens": "scheduled draft tokens (only the EAGLE drop is: use_eagle)",
    "num_lookahead_tokens": "scheduled draft tokens (only the EAGLE drop is: use_eagle)",
    "num_hash_lookahead_tokens": "lookahead block hashes (0.33 is modelled in its drop mode)",
    "num_prefill_lookahead": "multi-module MTP",
    "async_scheduling": "asynchronous scheduling",
    "policy": "the priority policy",
    "scheduling_policy": "the priority policy",
    "long_prefill_token_threshold": "the long-prefill threshold",
    "is_eagle_group": "draft groups",
    "mamba_cache_mode": "Mamba groups",
}


@attrs.frozen(kw_only=True, slots=True)
class CacheConfig:
    """One manager and scheduler configuration, checked the way vLLM would check it.

    ``num_blocks`` counts the null block. Sizes, lengths and budgets are in tokens, pools in blocks.
    ``semantics`` is a vLLM release.
    """

    num_blocks: int
    groups: tuple[Group, ...]
    semantics: str = NEWEST
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 8
    max_model_len: int = 2048
    retention_interval: int | None = DEFAULT
    hash_block_size: int | None = None
    use_eagle: bool = False
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    scheduler_reserve_full_isl: bool = True
    rules: Semantics = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.semantics, str):
            raise BadInput(
                f"config: semantics must be a release such as {NEWEST!r}, not {shown(self.semantics)}"
            )
        try:
            rules = Semantics.of(self.semantics)
        except BadInput as error:
            raise type(error)(f"config: {error}") from None
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "semantics", rules.release)
        whole_number("config: num_blocks (it counts the null block)", self.num_blocks, 2, MOST_BLOCKS)
        whole_number("config: max_model_len", self.max_model_len, 1, MOST_TOKENS)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            whole_number(f"config: {name}", getattr(self, name), 1)
        for name in ("use_eagle", "enable_prefix_caching", "scheduler_reserve_full_isl"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(f"config: {name} must be true or false, not {shown(getattr(self, name))}")
        self._check_groups()
        self._check_sizes()
        self._check_retention()
        self._check_watermark()

    def _check_groups(self) -> None:
        if not self.groups:
            raise BadInput("config: groups is empty; give at least one group")
        if len(self.groups) > MOST_GROUPS:
            raise BadInput(f"config: {len(self.groups)} groups; the most is {MOST_GROUPS}")
        if (
            len(self.groups) > 1
            and len(set(self.groups)) < self.rules.least_specs
            and self.enable_prefix_caching
        ):
            raise BadInput(
                f"config: vLLM {self.semantics} needs at least {self.rules.least_specs} different group specs "
                "when there are several groups; give one group, or groups that differ"
            )
        if len(self.groups) > 1 and self.rules.group_mix != "any" and self.enable_prefix_caching:
            self._check_two_specs()
        chunked = any(group.kind == "chunked_local" for group in self.groups)
        if chunked and self.enable_prefix_caching:
            if self.use_eagle:
                raise BadInput(
                    "config: vLLM refuses EAGLE with chunked local attention; set use_eagle to false"
                )
            if any(
                g.kind == "chunked_local" and g.block_size != self.scheduler_block_size for g in self.groups
            ):
                raise BadInput(
                    "config: vLLM refuses chunked local attention whose block_size is not the scheduler block "
                    f"size ({self.scheduler_block_size}); give all groups one block size"
                )
        if self.use_eagle and self.rules.eagle_window_alignment == "refused":
            size = self.scheduler_block_size
            if any(g.kind == "sliding_window" and g.block_size != size for g in self.groups):
                raise BadInput(
                    f"config: vLLM {self.semantics} refuses EAGLE with different block sizes; make them equal"
                )
        if any(group.extra_retained_tokens for group in self.groups) and not self.rules.retained_tokens:
            raise BadInput(f"config: extra_retained_tokens needs vLLM 0.28.0 or newer, not {self.semantics}")

    def _check_two_specs(self) -> None:
        """``verify_and_split_kv_cache_groups`` before 0.14.0."""
        full = {group for group in self.groups if group.kind == "full"}
        kinds = [group.kind == "full" for group in self.groups]
        if len(full) != 1 or len(set(self.groups)) != 2 or sum(a != b for a, b in pairwise(kinds)) != 1:
            raise BadInput(
                f"config: vLLM {self.semantics} needs full-attention groups of one spec, all before or all "
                "after groups of one other spec; reorder or remove groups"
            )
        if self.rules.group_mix == "one_block_size":
            sizes = {group.block_size for group in self.groups}
            if len(sizes) > 1 or self.hash_block_size not in (None, *sizes):
                raise BadInput(f"config: vLLM {self.semantics} has one block size; make them all equal")

    def _check_sizes(self) -> None:
        if self.hash_block_size is None:
            return
        whole_number("config: hash_block_size", self.hash_block_size, 1)
        sizes = {group.block_size for group in self.groups}
        if len(self.groups) == 1 and sizes != {self.hash_block_size}:
            raise BadInput(f"config: with one group, hash_block_size must be its block_size ({sizes.pop()})")
        if any(size % self.hash_block_size for size in sizes):
            raise BadInput(
                f"config: hash_block_size {self.hash_block_size} must divide every group's block_size ({sorted(sizes)})"
            )

    def _check_retention(self) -> None:
        if self.retention_interval == DEFAULT:
            return
        interval = self.retention_interval
        if interval is None:
            return
        whole_number("config: retention_interval (null means dense)", interval, 0)
        if not self.rules.retention:
            raise BadInput(
                f"config: retention_interval needs vLLM 0.23.0 or newer, not {self.semantics}; set it to null"
            )
        windowed = any(group.kind == "sliding_window" for group in self.groups)
        if not windowed and not (interval == 0 and self.rules.retention_zero_without_window):
            raise BadInput(
                f"config: vLLM {self.semantics} refuses retention_interval {interval} without a sliding_window group"
            )
        if interval % self.scheduler_block_size:
            raise BadInput(
                f"config: retention_interval {interval} must be a multiple of the scheduler block size ({self.scheduler_block_size})"
            )

    def _check_watermark(self) -> None:
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, (int, float)):
            raise BadInput(f"config: watermark must be a number in [0, 1), not {shown(self.watermark)}")
        if not 0 <= self.watermark < 1:
            raise BadInput(f"config: watermark {shown(self.watermark)} must be in [0, 1)")
        if self.watermark and not self.rules.watermark:
            raise BadInput(f"config: watermark needs vLLM 0.24.0 or newer, not {self.semantics}")

    @property
    def scheduler_block_size(self) -> int:
        """LCM of the groups' block sizes: hits are multiples of it (tokens)."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def is_hybrid(self) -> bool:
        """Full attention beside another kind: what the hybrid manager is for."""
        kinds = {group.kind for group in self.groups}
        return "full" in kinds and len(kinds) > 1

    @property
    def key_block_size(self) -> int:
        """Tokens per block hash: ``hash_block_size`` or the GCD of the groups' block sizes."""
        if self.hash_block_size is not None:
            return self.hash_block_size
        return math.gcd(*(group.block_size for group in self.groups))

    @property
    def retention(self) -> int | None:
        """The retention interval in force: None dense, 0 replay boundaries only, N tokens."""
        if self.retention_interval != DEFAULT:
            return self.retention_interval
        hybrid_eagle = self.use_eagle and len(self.groups) > 1
        return self.rules.default_retention_with_eagle if hybrid_eagle else self.rules.default_retention

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free when a waiting request is admitted beside running ones."""
        return int(self.watermark * self.num_blocks)

    def group_rules(self) -> tuple[GroupRules, ...]:
        """The rules of each group, in group order."""
        return tuple(rules_of(group, self.rules) for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """As a trace file stores it: fields that differ from their default, equal groups counted."""
        out: dict[str, Any] = {}
        for field in attrs.fields(CacheConfig):
            value = getattr(self, field.name)
            if field.name in ("num_blocks", "semantics") or (
                field.init and field.name != "groups" and value != field.default
            ):
                out[field.name] = value
        out["groups"] = _groups_to_json(self.groups)
        return out

    @classmethod
    def from_json(cls, data: object) -> CacheConfig:
        """Read a config; BadInput names the field that is wrong, NotModelled the unmodelled one."""
        if not isinstance(data, dict):
            raise BadInput(f"config: must be an object with num_blocks and groups, not {type(data).__name__}")
        known = {field.name for field in attrs.fields(cls) if field.init}
        for name in data:
            if name in NOT_MODELLED:
                raise NotModelled(f"config: not modelled: {NOT_MODELLED[name]}; remove {name!r}")
            if name not in known:
                raise BadInput(
                    f"config: unknown field {shown(name)}; known fields: {', '.join(sorted(known))}"
                )
        for name in ("num_blocks", "groups"):
            if name not in data:
                raise BadInput(f"config: {name} is missing")
        return cls(**{**data, "groups": _groups_from_json(data["groups"])})


_GROUP_FIELDS = ("kind", "block_size", "window", "chunk", "extra_retained_tokens")


def _groups_to_json(groups: tuple[Group, ...]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    last: Group | None = None
    for group in groups:
        if group == last:
            out[-1]["count"] = out[-1].get("count", 1) + 1
            continue
        out.append(
            {name: getattr(group, name) for name in _GROUP_FIELDS if getattr(group, name) not in (None, 0)}
        )
        last = group
    return out


def _groups_from_json(data: object) -> tuple[Group, ...]:
    if not isinstance(data, list):
        raise BadInput("config: groups must be a list of objects such as {'kind': 'full', 'block_size': 16}")
    groups: list[Group] = []
    for i, item in enumerate(data):
        if not isinstance(item, dict):
            raise BadInput(f"config: groups[{i}] must be an object, not {shown(item)}")
        for name in item:
            if name in NOT_MODELLED:
                raise NotModelled(f"config: groups[{i}]: not modelled: {NOT_MODELLED[name]}; remove {name!r}")
            if name not in (*_GROUP_FIELDS, "count"):
                raise BadInput(
                    f"config: groups[{i}]: unknown field {shown(name)}; known: {', '.join((*_GROUP_FIELDS, 'count'))}"
                )
        for name in ("kind", "block_size"):
            if name not in item:
                raise BadInput(f"config: groups[{i}]: {name} is missing")
        count = whole_number(f"config: groups[{i}]: count", item.get("count", 1), 1)
        if len(groups) + count > MOST_GROUPS:
            raise BadInput(f"config: groups[{i}]: more than {MOST_GROUPS} groups; lower count")
        try:
            group = Group(**{k: v for k, v in item.items() if k != "count"})
        except BadInput as error:
            raise type(error)(f"config: groups[{i}]: {str(error).removeprefix('groups: ')}") from None
        groups += [group] * count
    return tuple(groups)
