"""Differences that were found between the model and real vLLM, each kept with the right value.

See docs/divergences.md. Every trace is checked on the model everywhere, and call by call against the
real manager where trees are at hand.
"""

import attrs
import pytest

from hitproof.model import RELEASES, CacheConfig, Group, ModelTarget, Trace, parse_op, under
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
    trace = under(attrs.evolve(JUNCTION, config=without_tails(rules)), rules)
    junctions = [seen.hit.junction for seen in ModelTarget().run(trace).observations if seen.call == "lookup"]
    assert any(junctions) == (parse_release(rules) >= (0, 26, 0))


def without_tails(rules):
    """Retention 0, where it exists, writes no window tail at the place where c leaves a and b."""
    retention = 0 if parse_release(rules) >= (0, 23, 0) else None
    return attrs.evolve(JUNCTION.config, semantics=rules, retention_interval=retention)


@pytest.mark.vllm
@pytest.mark.parametrize("trace", [SAME_WORD, JUNCTION, COARSE_KEYS], ids=["same word", "junction", "coarse"])
def test_found_traces_agree(target, trace):
    """Every trace that once differed agrees now, on every tested release."""
    (found,) = target.conform([trace])
    assert found.divergence is None
    assert found.calls
