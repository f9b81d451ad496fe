"""Scaled traces: the same counterexamples, with blocks that kernels can run."""

from pathlib import Path

import pytest

from hitproof.model import BadInput, CacheConfig, Group, ModelTarget, Trace, parse_op, under
from hitproof.properties.registry import property_of
from hitproof.properties.story import Story
from hitproof.replay import tiny_model
from hitproof.replay.counterexample import stored
from hitproof.replay.scale import KERNEL_BLOCK, fitting, scaled

CASES = stored(Path(__file__).resolve().parents[2] / "counterexamples")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_counterexample_is_one_at_scale(case):
    """Blocks are multiples of 32, hits are as many blocks as before, and the promise is broken."""
    factor = fitting(case.trace)
    longer = scaled(case.trace, factor)
    assert all(group.block_size % KERNEL_BLOCK == 0 for group in longer.config.groups)
    before, after = ModelTarget().run(case.trace), ModelTarget().run(longer)
    assert after.hits == tuple(None if hit is None else hit * factor for hit in before.hits)
    finding = property_of(case.finding.property_id).check(Story(after, ModelTarget().run)).finding
    assert finding is not None
    assert (finding.op, finding.request) == (case.finding.op, case.finding.request)


def test_every_length_is_scaled():
    """Blocks, window, spans, outputs, budget and retention; counts stay; the longest request is the limit."""
    config = CacheConfig(
        num_blocks=30,
        groups=(Group(kind="sliding_window", block_size=4, window=6), Group(kind="full", block_size=8)),
        max_num_batched_tokens=20,
        retention_interval=16,
        hash_block_size=2,
    )
    longer = scaled(Trace(config=config, ops=tuple(map(parse_op, ("submit a S[3:13] out=3", "drain")))), 8)
    window, full = longer.config.groups
    assert (window.block_size, window.window, full.block_size) == (32, 41, 64)
    assert str(longer.ops[0]) == "submit a S[24:104] out=17"
    assert (longer.config.max_num_batched_tokens, longer.config.retention_interval) == (160, 128)
    assert (longer.config.hash_block_size, longer.config.num_blocks) == (16, 30)
    assert longer.config.max_model_len == 80 + 17


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (
            ("submit a S:9 out=2", "drain", "submit b S:9 @a"),
            r"ops\[2\]: @a: a prompt with an output cannot be",
        ),
        (
            ("submit a S:4 out=3", "step 2", "submit b S:5 out=1", "drain"),
            None,
        ),
    ],
)
def test_what_cannot_be_scaled(ops, message):
    """Outputs in prompts are refused; a trace whose hits would be others is refused by the model."""
    config = CacheConfig(num_blocks=30, groups=(Group(kind="full", block_size=4),))
    trace = Trace(config=config, ops=tuple(map(parse_op, ops)))
    if message is None:
        assert scaled(trace, 8).config.groups[0].block_size == 32
        return
    with pytest.raises(BadInput, match=message):
        scaled(trace, 8)


REFUSALS = {
    **dict.fromkeys(
        ("CE-0004", "CE-0005", "CE-0009", "CE-0016", "CE-0017", "CE-0019"), "no tiny model has a draft"
    ),
    **dict.fromkeys(("CE-0007", "CE-0010"), "a multiple of the block size"),
    "CE-0008": "num_blocks 5 cannot hold one request of max_model_len 49, which needs 6:",
    "CE-0011": "num_blocks 13 cannot hold one request of max_model_len 193, which needs 16:",
    "CE-0013": "num_blocks 10 cannot hold one request of max_model_len 321, which needs 15:",
    "CE-0014": "num_blocks 43 cannot hold one request of max_model_len 433, which needs 45:",
    "CE-0018": "num_blocks 5 cannot hold one request of max_model_len 193, which needs 8:",
    "CE-0020": "num_blocks 8 cannot hold one request of max_model_len 137, which needs 9:",
    "CE-0022": "num_blocks 9 cannot hold one request of max_model_len 105, which needs 10:",
}
"""As the engine of 0.32.0 says itself; docs/rungs.md has the others' verdicts."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_which_cases_an_engine_takes(case):
    """The others are refused by name, with what they lack."""
    said = tiny_model.refusal(under(case.trace, "0.32.0"))
    assert REFUSALS[case.name] in said if case.name in REFUSALS else said == ""
