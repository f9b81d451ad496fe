"""Differences that were found between the model and real vLLM, each kept with the right value.

See docs/divergences.md. Every trace is checked on the model everywhere, and call by call against the
real manager where trees are at hand.
"""

import attrs
import pytest

from hitproof.model import RELEASES, BadInput, CacheConfig, Group, ModelTarget, Trace, parse_op, under
from hitproof.model.semantics import parse_release

FULL = Group(kind="full", block_size=1)
COARSE = Group(kind="full", block_size=2)
WINDOW = Group(kind="sliding_window", block_size=1, window=3)

SAME_WORD = Trace(
    config=CacheConfig(num_blocks=40, groups=(FULL,)),
    ops=tuple(map(parse_op, ("submit a S:4 out=1 lora=y", "drain", "submit b S:4 out=1 salt=y", "drain"))),
)
JUNCTION = Trace(
    config=CacheConfig(num_blocks=24, groups=(FULL, WINDOW), max_num_batched_tokens=1),
    ops=tuple(
        map(
            parse_op,
            ("submit a S:8 out=1", "drain", "submit b S:8 u:1 out=1", "submit c S:5 v:3 out=1", "drain"),
        )
    ),
)
COARSE_KEYS = Trace(
    config=CacheConfig(num_blocks=40, groups=(COARSE, WINDOW)),
    ops=tuple(map(parse_op, ("submit a S:8 out=1", "drain", "submit b S:8 u:2 out=1", "drain"))),
)

TWO_FULL = Trace(
    config=CacheConfig(
        num_blocks=9,
        groups=(
            Group(kind="full", block_size=4),
            Group(kind="sliding_window", block_size=2, window=2),
            Group(kind="full", block_size=2),
        ),
        max_num_batched_tokens=1,
    ),
    ops=tuple(map(parse_op, ("submit a U:7 out=1", "submit b U:7 out=1", "drain"))),
)


def keys(run):
    return [seen.keys for seen in run.observations if seen.call == "add"]


@pytest.mark.parametrize(
    ("rules", "second"), [("0.25.0", (0, 5, 6, 7)), ("0.30.0", (0, 5, 6, 7)), ("0.31.0", (5, 6, 7, 8))]
)
def test_salt_and_lora_of_one_word_share_the_first_block_only(rules, second):
    """Before tagged keys a salt enters only the first block's hash, a LoRA name every block's."""
    run = ModelTarget(semantics=rules).run(SAME_WORD)
    assert keys(run) == [(0, 1, 2, 3), second]


@pytest.mark.parametrize("rules", RELEASES)
def test_junction_is_shown_from_0_26_on(rules):
    """Before 0.26.0 a lookup does not tell how far one group had cached beyond the hit."""
    trace = attrs.evolve(JUNCTION, config=without_tails(rules))
    junctions = [seen.hit.junction for seen in ModelTarget().run(trace).observations if seen.call == "lookup"]
    assert any(junctions) == (parse_release(rules) >= (0, 26, 0))


def without_tails(rules):
    """Retention 0, where it exists, writes no window tail at the place where c leaves a and b."""
    retention = 0 if parse_release(rules) >= (0, 23, 0) else None
    return attrs.evolve(JUNCTION.config, semantics=rules, retention_interval=retention)


@pytest.mark.parametrize(
    ("rules", "left"),
    [("0.14.0", 0), ("0.15.0", 0), ("0.15.1", 2), ("0.28.0", 2), ("0.29.0", 0)],
)
def test_second_full_group_is_cut_to_the_hit_in_some_releases(rules, left):
    """From 0.14.0 to 0.15.0 and from 0.29.0 every full-attention group is cut, else the first alone."""
    run = ModelTarget(semantics=rules).run(TWO_FULL)
    hits = [seen.hit for seen in run.observations if seen.call == "lookup"]
    assert max(len(hit.blocks[2]) for hit in hits if hit.hit_tokens == 0) == left


@pytest.mark.vllm
@pytest.mark.parametrize(
    "trace",
    [SAME_WORD, JUNCTION, COARSE_KEYS, TWO_FULL],
    ids=["same word", "junction", "coarse", "two full"],
)
def test_found_traces_agree(target, trace):
    """Every trace that once differed agrees now, on every tested release that accepts it."""
    try:
        under(trace, target.tree.semantics)
    except BadInput as refusal:
        pytest.skip(str(refusal))
    (found,) = target.conform([trace])
    assert found.divergence is None
    assert found.calls
