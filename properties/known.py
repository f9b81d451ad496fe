"""Known violations: promises that a release is known not to keep. Data, not excuses: a search is
demanded to find each (see ``tests/fuzz``), and a finding outside ``applies`` stays a new one.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from hitproof.model import CacheConfig, Submit, Trace
from hitproof.model.semantics import parse_release
from hitproof.properties.verdict import Finding


@attrs.frozen(kw_only=True, slots=True)
class Known:
    """``property_id`` fails from release ``since`` up to but not including ``until`` (None: still)
    for traces that ``applies`` accepts. ``causes``: what may have become of the missing blocks.
    ``report``: the public report, or who found it.
    """

    property_id: str
    since: str
    until: str | None
    when: str
    applies: Callable[[Trace], bool] = attrs.field(repr=False)
    report: str
    because: str
    causes: tuple[str, ...] = ("",)

    def covers(self, trace: Trace, finding: Finding) -> bool:
        """Whether this entry speaks of what was found on ``trace``."""
        if finding.property_id != self.property_id or finding.cause not in self.causes:
            return False
        return self.speaks_of(trace.config.semantics) and self.applies(trace)

    def speaks_of(self, release: str) -> bool:
        """Whether ``release`` lies in this entry's range."""
        at = parse_release(release)
        return parse_release(self.since) <= at and (self.until is None or at < parse_release(self.until))


def _config(test: Callable[[CacheConfig], bool]) -> Callable[[Trace], bool]:
    return lambda trace: test(trace.config)


@_config
def _windowed(config: CacheConfig) -> bool:
    return any(group.kind != "full" for group in config.groups)


@_config
def _any(config: CacheConfig) -> bool:
    return config.enable_prefix_caching


@_config
def _crooked_chunk(config: CacheConfig) -> bool:
    return any(group.chunk is not None and group.chunk % group.block_size for group in config.groups)


@_config
def _eagle_unequal(config: CacheConfig) -> bool:
    return config.use_eagle and len({group.block_size for group in config.groups}) > 1


@_config
def _eagle(config: CacheConfig) -> bool:
    return config.use_eagle and len(config.groups) > 1


@_config
def _retention(config: CacheConfig) -> bool:
    return config.retention is not None and any(group.kind == "sliding_window" for group in config.groups)


@_config
def _retention_without_full(config: CacheConfig) -> bool:
    return config.retention is not None and all(group.kind != "full" for group in config.groups)


@_config
def _eagle_retention(config: CacheConfig) -> bool:
    return config.use_eagle and config.retention is not None


@_config
def _full_unequal(config: CacheConfig) -> bool:
    return len({group.block_size for group in config.groups if group.kind == "full"}) > 1


@_config
def _partial_tails(config: CacheConfig) -> bool:
    size = config.key_block_size
    return any(group.kind == "full" and group.block_size != size for group in config.groups)


@_config
def _windows_behind_gate(config: CacheConfig) -> bool:
    return config.scheduler_reserve_full_isl and any(group.kind != "full" for group in config.groups)


def _confusable(trace: Trace) -> bool:
    """Two requests are told apart by salt, LoRA name or LoRA path."""
    identities = {op.identity for op in trace.ops if isinstance(op, Submit)}
    return len(identities) > 1 and any(identity.lora is not None for identity in identities)


_OURS = "found by hitproof"

_SHORT_HITS = (
    "hit-survives-half-pool",
    "hit-survives-fit",
    "mask-covers-lookup",
    "resend-hits",
    "extension-hits",
    "junction-hits",
)

KNOWN: tuple[Known, ...] = (
    Known(
        property_id="hit-survives-half-pool",
        since="0.11.1",
        until=None,
        when="some group is not full attention",
        applies=_windowed,
        report="vllm#48435",
        causes=("evicted",),
        because="a cold prefill takes blocks for every token in every group at once, and windows it has passed "
        "stay cached (dense) or at least pass through the queue (retention 0)",
    ),
    Known(
        property_id="hit-survives-fit",
        since="0.11.1",
        until=None,
        when="caching is on",
        applies=_any,
        report="vllm#48435",
        causes=("evicted",),
        because="eviction is by age alone: blocks that no later prompt can use are evicted after ones that are needed",
    ),
    Known(
        property_id="hit-covers",
        since="0.11.1",
        until=None,
        when="a chunk is not a multiple of its group's block size",
        applies=_crooked_chunk,
        report=_OURS,
        because="the lookup starts at the chunk of the longest allowed hit, rounded down to a block: the block that "
        "the chunk starts inside is taken as not needed",
    ),
    Known(
        property_id="footprint-bounded",
        since="0.11.1",
        until=None,
        when="a chunk is not a multiple of its group's block size",
        applies=_crooked_chunk,
        report=_OURS,
        because="the bound of a chunked-local group lacks the extra block of a chunk that starts inside a block",
    ),
    *(
        Known(
            property_id=name,
            since="0.22.0",
            until="0.23.0",
            when="EAGLE with groups of different block sizes",
            applies=_eagle_unequal,
            report="vllm#44082",
            causes=("not written",),
            because="the write mask keeps a window's tail without the block that the lookup drops",
        )
        for name in _SHORT_HITS
    ),
    *(
        Known(
            property_id=name,
            since="0.11.1",
            until=None,
            when="EAGLE with groups of different block sizes",
            applies=_eagle_unequal,
            report=_OURS,
            causes=("all cached", "not written"),
            because="a run that reaches block 0 is aligned before the EAGLE block is dropped, and again after: one "
            "scheduler block is lost for one block",
        )
        for name in _SHORT_HITS
    ),
    *(
        Known(
            property_id=name,
            since="0.11.1",
            until="0.20.0",
            when="EAGLE with several groups",
            applies=_eagle,
            report="vllm#32802",
            causes=("all cached", "not written"),
            because="each group drops its last block in each pass of the fixed point",
        )
        for name in _SHORT_HITS
    ),
    *(
        Known(
            property_id=name,
            since="0.23.0",
            until="0.30.0",
            when="EAGLE with a retention interval",
            applies=_eagle_retention,
            report="vllm#53945, vllm#54713",
            causes=("not written",),
            because="retention keeps the boundary that a prompt reaches before the EAGLE drop, not where it lands after",
        )
        for name in _SHORT_HITS
    ),
    Known(
        property_id="junction-hits",
        since="0.23.0",
        until="0.26.0",
        when="a retention interval with some group that is a sliding window",
        applies=_retention,
        report="vllm#45238",
        causes=("not written",),
        because="retention keeps no window tail where two prompts diverged",
    ),
    Known(
        property_id="junction-hits",
        since="0.26.0",
        until=None,
        when="a retention interval and no full-attention group",
        applies=_retention_without_full,
        report=_OURS,
        causes=("not written",),
        because="a junction is what one group finds beyond the combined hit: windows alone, whose tails there are "
        "gone, find none, so that no later prompt makes them keep it",
    ),
    Known(
        property_id="hit-covers",
        since="0.15.1",
        until="0.29.0",
        when="full-attention groups of different block sizes",
        applies=_full_unequal,
        report=_OURS,
        because="only the first of them is cut to the combined hit",
    ),
    Known(
        property_id="keys-injective",
        since="0.11.1",
        until="0.31.0",
        when="requests differ in salt or LoRA, and one uses LoRA",
        applies=_confusable,
        report="vllm#44701, vllm#30931",
        because="salt and LoRA name enter the hash untagged, and the LoRA path does not",
    ),
    Known(
        property_id="hit-content",
        since="0.11.1",
        until="0.31.0",
        when="requests differ in salt or LoRA, and one uses LoRA",
        applies=_confusable,
        report="vllm#44701, vllm#30931",
        because="salt and LoRA name enter the hash untagged, and the LoRA path does not",
    ),
    *(
        Known(
            property_id=name,
            since="0.19.0",
            until="0.20.0",
            when="the admission gate is on and some group is not full attention",
            applies=_windows_behind_gate,
            report="vllm#39734",
            because="the gate counts a windowed group as if it held the whole sequence",
        )
        for name in ("fits-alone-runs", "progress")
    ),
    Known(
        property_id="check-implies-alloc",
        since="0.11.1",
        until="0.14.0",
        when="some group is not full attention",
        applies=_windowed,
        report=_OURS,
        because="a stored event reads its parent's hash off the block before, which the group has given back",
    ),
    Known(
        property_id="check-implies-alloc",
        since="0.20.0",
        until="0.20.2",
        when="some group is not full attention",
        applies=_windowed,
        report="vllm#45856",
        because="the per-step check caps a windowed group's need, allocation does not",
    ),
    Known(
        property_id="events-self-consistent",
        since="0.26.0",
        until=None,
        when="a full-attention group has blocks larger than the hash block",
        applies=_partial_tails,
        report="vllm#49125",
        because="a partial tail that has become a full block is removed, and at once entered again beside it",
    ),
)


def known_for(finding: Finding, trace: Trace) -> Known | None:
    """The entry that speaks of what was found on this trace, if any."""
    return next((k for k in KNOWN if k.covers(trace, finding)), None)
