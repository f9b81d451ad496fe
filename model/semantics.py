"""What changed between vLLM releases: one named switch per behaviour.

``Semantics.of("0.25.0")`` answers for the releases 0.11.1 to 0.33 and their patch releases.
Each switch names the vLLM module it was read from and the release that introduced each value.
Releases are compared as tuples of integers; anything that is not a plain ``X.Y.Z`` is refused.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from hitproof.model.errors import BadInput, NotModelled, shown

Release = tuple[int, int, int]

RELEASES: tuple[str, ...] = (
    "0.11.1",
    "0.11.2",
    "0.12.0",
    "0.13.0",
    "0.14.0",
    "0.14.1",
    "0.15.0",
    "0.15.1",
    "0.16.0",
    "0.17.0",
    "0.17.1",
    "0.18.0",
    "0.18.1",
    "0.19.0",
    "0.19.1",
    "0.20.0",
    "0.20.1",
    "0.20.2",
    "0.21.0",
    "0.22.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
"""Every vLLM release whose rules were read for this model, oldest first."""

NEWEST = RELEASES[-1]


_RELEASE = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?")


def parse_release(text: str) -> Release:
    """``"0.25.0"`` or ``"v0.25"`` as integers; BadInput for anything else."""
    match = _RELEASE.fullmatch(text)
    if match is None:
        raise BadInput(
            f"semantics {shown(text)}: not a vLLM release; write it as X.Y.Z, for example {NEWEST}"
        )
    major, minor, patch = (int(part or 0) for part in match.groups())
    return major, minor, patch


def _choice(*since: tuple[str, Any]) -> Any:
    """A switch: (release that introduced a value, value) pairs, oldest first."""
    return attrs.field(metadata={"since": tuple((parse_release(r), value) for r, value in since)})


@attrs.frozen(kw_only=True, slots=True)
class Semantics:
    """One vLLM release's rules, as named switches."""

    release: str

    group_mix: Literal["one_block_size", "full_and_one_other", "any"] = _choice(
        ("0.11.1", "one_block_size"), ("0.12.0", "full_and_one_other"), ("0.14.0", "any")
    )
    """Which groups may stand beside each other (``verify_and_split_kv_cache_groups``): full attention
    of one spec, before or after groups of one other spec, all of one block size; the same with any
    block sizes; any.
    """

    adoption: Literal["as_found", "within_window"] = _choice(
        ("0.11.1", "as_found"), ("0.14.0", "within_window")
    )
    """How a hit becomes a block table. "as_found": every block that lookup returned is pinned, and
    what the window has passed is given back only by a later step (``save_new_computed_blocks``).
    "within_window": blocks before the window are not taken (``allocate_new_computed_blocks``).
    """

    admission_gate: bool = _choice(("0.11.1", False), ("0.19.0", True))
    """Whether a waiting request must fit as a whole (``scheduler_reserve_full_isl``)."""

    admission_cap: Literal["none", "always", "gate"] = _choice(
        ("0.11.1", "none"), ("0.20.0", "always"), ("0.20.2", "gate")
    )
    """Where a sliding-window or chunked-local group's need is capped by what it can hold at once.

    ``SingleTypeKVCacheManager.get_num_blocks_to_allocate``. "none": never (a window counts as full
    attention, vllm#39734). "always": also in the per-step check, which then promises blocks that
    ``allocate_new_blocks`` does not find (vllm#45856). "gate": in the full-sequence gate alone.
    """

    one_pass_hybrid: bool = _choice(("0.11.1", True), ("0.14.0", False), ("0.15.1", True))
    """Whether one full-attention spec beside one other is looked up in one pass, so that EAGLE drops
    once (``is_simple_hybrid`` in ``find_longest_cache_hit``; to 0.13 there was no other case)."""

    eagle_drop: Literal["every_pass", "once_per_candidate"] = _choice(
        ("0.11.1", "every_pass"), ("0.20.0", "once_per_candidate")
    )
    """How often a group drops its last matched block under EAGLE while lookup converges.

    ``HybridKVCacheCoordinator.find_longest_cache_hit``. "every_pass" loses one block per group and
    pass (vllm#32802); "once_per_candidate" looks one block further first and drops it once.
    """

    eagle_window_alignment: Literal["refused", "before_drop", "after_drop"] = _choice(
        ("0.11.1", "refused"), ("0.19.1", "before_drop"), ("0.20.0", "after_drop")
    )
    """Which length a sliding-window match must align when EAGLE drops its last block.

    ``SlidingWindowManager.find_longest_cache_hit``. "refused": the release asserts that block size
    and alignment are equal. "before_drop": the matched run's end, then re-aligned. "after_drop":
    the run's end less the dropped block.
    """

    eagle_lookahead_limit: Literal["prompt", "hashes"] = _choice(("0.11.1", "prompt"), ("0.32.0", "hashes"))
    """How far past a candidate the EAGLE block may be looked up: to the last prompt token but one,
    or to the last hashed block (``HybridKVCacheCoordinator.find_longest_cache_hit``)."""

    write_mask: Literal["none", "aligned", "reachable"] = _choice(
        ("0.11.1", "none"), ("0.22.0", "aligned"), ("0.23.0", "reachable")
    )
    """Which full blocks are written to the index.

    "none": all, as soon as full. "aligned": only up to a multiple of the scheduler block size, and
    of a sliding-window segment only the tail (``_cache_block_mask``, without the EAGLE block,
    vllm#44082). "reachable": ``reachable_block_mask``, which knows EAGLE and retention.
    """

    unhashed_first: Literal["never", "window_groups", "every_group", "every_group_if_caching"] = _choice(
        ("0.11.1", "never"),
        ("0.23.0", "window_groups"),
        ("0.24.0", "every_group"),
        ("0.27.0", "every_group_if_caching"),
        ("0.28.0", "every_group"),
    )
    """Which freed blocks without a hash go to the head of the free queue, to be reused first.

    ``BlockPool.free_blocks``; in 0.23.0 ``remove_skipped_blocks`` of every group and ``free`` of
    the sliding-window group alone ("window_groups", vllm#43447).
    """

    retention: bool = _choice(("0.11.1", False), ("0.23.0", True))
    """Whether a retention interval exists (environment variable
    ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL`` to 0.28, ``CacheConfig`` field from 0.29)."""

    default_retention: int | None = _choice(("0.11.1", None), ("0.29.0", 0))
    """The retention interval when nothing is set: None is dense, 0 keeps replay boundaries only."""

    default_retention_with_eagle: int | None = _choice(("0.11.1", None), ("0.30.0", 0))
    """The same for a hybrid model with EAGLE (``EngineArgs.create_engine_config``, dense in 0.29)."""

    retention_zero_without_window: bool = _choice(("0.11.1", False), ("0.29.0", True))
    """Whether retention 0 is accepted for a model with no sliding-window group
    (``_validate_prefix_cache_retention_interval``)."""

    replay_boundary: Literal["resend", "eagle_checkpoints"] = _choice(
        ("0.11.1", "resend"), ("0.30.0", "eagle_checkpoints")
    )
    """Which prompt boundaries retention keeps: the latest that an identical prompt can hit, or
    under EAGLE the two that a resend and an extension land on (``replay_boundaries``)."""

    junction: Literal["ignored", "kept", "kept_with_eagle"] = _choice(
        ("0.11.1", "ignored"), ("0.26.0", "kept"), ("0.33.0", "kept_with_eagle")
    )
    """Whether retention also keeps a shared-prefix junction: the length that some group had cached
    beyond the combined hit (third value of ``get_computed_blocks``), in 0.33 one block earlier too
    under EAGLE."""

    partial_tail: Literal["none", "prompt", "replay"] = _choice(
        ("0.11.1", "none"), ("0.26.0", "prompt"), ("0.32.0", "replay")
    )
    """Which boundary inside a block a full-attention group with blocks larger than the hash block
    registers as an extra key: the prompt's end, or the last one that a resend can reach
    (``FullAttentionManager._cache_partial_tail_block``)."""

    truncates: Literal["first_full_group", "every_full_group"] = _choice(
        ("0.11.1", "first_full_group"),
        ("0.14.0", "every_full_group"),
        ("0.15.1", "first_full_group"),
        ("0.29.0", "every_full_group"),
    )
    """Which full-attention groups are cut to the combined hit at the end of lookup when several of
    different block size exist (``HybridKVCacheCoordinator.find_longest_cache_hit``)."""

    least_specs: int = _choice(("0.11.1", 2), ("0.29.0", 1))
    """How many different group specs a model with several groups must have
    (``HybridKVCacheCoordinator.verify_and_split_kv_cache_groups``)."""

    watermark: bool = _choice(("0.11.1", False), ("0.24.0", True))
    """Whether ``SchedulerConfig.watermark`` exists."""

    retained_tokens: bool = _choice(("0.11.1", False), ("0.28.0", True))
    """Whether ``SlidingWindowSpec.extra_retained_tokens`` exists."""

    tagged_keys: bool = _choice(("0.11.1", False), ("0.31.0", True))
    """Whether cache salt and LoRA (name and path) are told apart in a block hash
    (``generate_block_hash_extra_keys``; before, vllm#44701 and vllm#30931)."""

    null_block_counted: bool = _choice(("0.11.1", True), ("0.33.0", False))
    """Whether ``touch`` and ``free_blocks`` move the null block's ref count, which nothing reads."""

    events_read_parent_block: bool = _choice(("0.11.1", True), ("0.14.0", False))
    """Whether a stored event reads its parent's hash off the block before, which fails where that is
    the null block (``BlockPool.cache_full_blocks``)."""

    events_name_lora: bool = _choice(("0.11.1", False), ("0.14.0", True))
    """Whether stored events carry ``lora_name``."""

    events_carry_extra: bool = _choice(("0.11.1", False), ("0.17.0", True))
    """Whether stored events carry ``extra_keys``."""

    events_name_group: bool = _choice(("0.11.1", False), ("0.20.0", True))
    """Whether KV events carry ``group_idx``."""

    @classmethod
    def of(cls, release: str) -> Semantics:
        """The rules of one release; NotModelled outside 0.11.1 to 0.33."""
        wanted = parse_release(release)
        oldest, newest = parse_release(RELEASES[0]), parse_release(RELEASES[-1])
        if wanted < oldest or wanted[:2] > newest[:2]:
            raise NotModelled(
                f"semantics {shown(release)}: not modelled; the model describes vLLM {RELEASES[0]} to {RELEASES[-1]}: name one of those releases"
            )
        values = {
            field.name: next(value for since, value in reversed(field.metadata["since"]) if since <= wanted)
            for field in attrs.fields(cls)
            if "since" in field.metadata
        }
        return cls(release=".".join(str(part) for part in wanted), **values)


def switch_table() -> list[tuple[str, list[tuple[str, object]]]]:
    """Every switch with the releases that introduced its values, for the docs."""
    return [
        (field.name, [(".".join(map(str, since)), value) for since, value in field.metadata["since"]])
        for field in attrs.fields(Semantics)
        if "since" in field.metadata
    ]
