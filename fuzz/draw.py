"""Hypothesis strategies for configs and for prompt lengths: small and odd on purpose."""

from __future__ import annotations

import math
from functools import cache

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from hitproof.model import BadInput, CacheConfig, Group, Semantics


@attrs.frozen(kw_only=True, slots=True)
class Range:
    """How wide configs are drawn. ``retention``: "default" leaves it to the release, "any" varies it.
    ``hybrid``: always full attention beside another kind. ``odd``: every other setting varied too, ``eagle`` among them.
    """

    semantics: str
    retention: str = "default"
    most_groups: int = 6
    most_blocks: int = 72
    odd: bool = True
    hybrid: bool = False
    eagle: bool = True

    @property
    def text(self) -> str:
        """The range in words, for bounds."""
        return (
            f"vLLM {self.semantics}, retention {self.retention}, 1-{self.most_groups} {'hybrid ' if self.hybrid else ''}groups, "
            f"4-{self.most_blocks} blocks{', every setting varied' if self.odd else ''}{'' if self.eagle else ', no EAGLE'}"
        )


_SIZES = st.sampled_from((4, 2, 1, 8, 3))
_FACTORS = st.sampled_from((1, 1, 1, 1, 2, 3, 4))
_KINDS = st.sampled_from(("sliding_window", "full", "chunked_local"))
_WINDOWS = st.sampled_from((1, 1, 2, 0, 3, 250))
_CHUNKS = st.sampled_from((4, 8, 13, 64))
_BUDGETS = st.sampled_from((4096, 4096, 1, 2, 3))
_SEQUENCES = st.sampled_from((8, 8, 2, 1))
_ONE_IN_FIVE = st.integers(0, 4).map(lambda n: n == 4)
_ONE_IN_TWELVE = st.integers(0, 11).map(lambda n: n == 11)
_RETENTIONS = st.sampled_from((None, 0, 1, 2, 3))


def _window(blocks: int, size: int) -> int:
    """Shorter than a block (0), just over ``blocks`` blocks, or longer than any pool (250)."""
    return blocks * size + 1 if blocks else 2


@st.composite
def _groups(draw: DrawFn, wide: Range) -> tuple[Group, ...]:
    """Half the time the usual shape, full attention beside equal windows; else anything."""
    size = draw(_SIZES)
    large = size * draw(_FACTORS)
    count = draw(st.integers(1, wide.most_groups))
    if wide.hybrid:
        count = draw(st.sampled_from((4, 6, 5, 3, 2)))
    if wide.hybrid or draw(st.booleans()):
        window = Group(kind="sliding_window", block_size=size, window=_window(draw(_WINDOWS), size))
        return (*(window,) * (count - 1), Group(kind="full", block_size=large))
    groups = []
    for _ in range(count):
        kind = draw(_KINDS)
        here = large if draw(st.booleans()) else size
        if kind == "full":
            groups.append(Group(kind=kind, block_size=here))
        elif kind == "sliding_window":
            groups.append(Group(kind=kind, block_size=here, window=_window(draw(_WINDOWS), here)))
        else:
            groups.append(Group(kind=kind, block_size=here, chunk=draw(_CHUNKS)))
    return tuple(groups)


@cache
def configs(wide: Range) -> SearchStrategy[CacheConfig]:
    """Configs that vLLM of that release accepts."""
    return _configs(wide)


@st.composite
def _configs(draw: DrawFn, wide: Range) -> CacheConfig:
    rules = Semantics.of(wide.semantics)
    groups = draw(_groups(wide))
    unit = math.lcm(*(group.block_size for group in groups))
    budget = draw(_BUDGETS)
    values: dict[str, object] = {
        "num_blocks": draw(st.integers(12 if wide.hybrid else 4, wide.most_blocks)),
        "max_num_batched_tokens": budget if budget == 4096 else budget * unit + budget // 3,
        "max_num_seqs": draw(_SEQUENCES),
        "max_model_len": 4096,
    }
    if wide.odd:
        values["use_eagle"] = wide.eagle and draw(_ONE_IN_FIVE)
        values["scheduler_reserve_full_isl"] = not draw(_ONE_IN_FIVE)
        values["enable_prefix_caching"] = not draw(_ONE_IN_TWELVE)
        if rules.watermark and draw(_ONE_IN_TWELVE):
            values["watermark"] = 0.2
    if wide.retention == "any" and rules.retention:
        times = draw(_RETENTIONS)
        values["retention_interval"] = times and times * unit
    elif wide.retention == "dense":
        values["retention_interval"] = None
    elif wide.retention.isdecimal():
        values["retention_interval"] = int(wide.retention)
    try:
        return CacheConfig(groups=groups, semantics=wide.semantics, **values)  # type: ignore[arg-type]
    except BadInput:
        # A combination that this release refuses: take its plain neighbour.
        kept = {
            name: values[name]
            for name in ("num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len")
        }
        if wide.retention == "dense":
            kept["retention_interval"] = None
        if wide.retention.isdecimal():
            kept["retention_interval"] = interval = int(wide.retention)
            unit = next((size for size in (8, 4, 3, 2) if interval % size == 0), 1)
        plain = (
            Group(kind="sliding_window", block_size=unit, window=unit + 1),
            Group(kind="full", block_size=unit),
        )
        return CacheConfig(groups=plain, semantics=wide.semantics, **kept)  # type: ignore[arg-type]
