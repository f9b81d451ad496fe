"""The words of a trace: spans, ops, configs and traces print and parse back; keys mean contents."""

import random

import pytest

from hitproof.fuzz.random_traces import random_trace
from hitproof.model import (
    RELEASES,
    CacheConfig,
    Group,
    Identity,
    KeyTable,
    NotModelled,
    Semantics,
    Span,
    Tokens,
    Trace,
    common_prefix,
    parse_op,
)


@pytest.mark.parametrize("text", ["S:512", "S[100:200]", "@r1", "u_7.x-y:1"])
def test_spans_print_as_they_parse(text):
    """A span's text is its only form."""
    assert str(Span.parse(text)) == text


@pytest.mark.parametrize(
    "line",
    [
        "submit r1 S:512 u0:8 out=2",
        "submit r2 @r1 S[8:16] out=1 salt=a lora=b@c priority=3",
        "submit r3 S:1 out=1 lora=b",
        "step",
        "step 7",
        "drain",
        "abort r1",
        "reset",
    ],
)
def test_ops_print_as_they_parse(line):
    """An op's line is its only form."""
    assert str(parse_op(line)) == line


@pytest.mark.parametrize("seed", range(30))
def test_traces_survive_their_file(seed):
    """Reading what was written gives the same trace, for traces of every kind."""
    trace = random_trace(seed, "0.33.0")
    assert Trace.loads(trace.dumps()) == trace


def test_tokens_merge_and_slice():
    """Pieces that meet are one piece, and a slice gives back exactly the tokens asked for."""
    tokens = Tokens([("S", 0, 5), ("S", 5, 9), ("u", 0, 2)])
    assert tokens.pieces == [("S", 0, 9), ("u", 0, 2)]
    assert tokens.slice(3, 11) == (("S", 3, 9), ("u", 0, 2))
    assert tokens.slice(9, 10) == (("u", 0, 1),)
    assert len(tokens) == 11


def test_common_prefix_counts_tokens():
    """Equal spans are equal tokens, however they are cut."""
    whole = Tokens([("S", 0, 10)])
    assert common_prefix(whole, Tokens([("S", 0, 4), ("S", 4, 7), ("u", 0, 9)])) == 7
    assert common_prefix(whole, Tokens([("S", 1, 10)])) == 0


def test_keys_are_equal_exactly_when_contents_are():
    """Over random cuts of two streams, a key is shared if and only if the prefix is."""
    rng = random.Random(5)
    table = KeyTable(4, tagged=True)
    seen = {}
    for _ in range(300):
        pieces = [(rng.choice("ST"), 0, rng.randint(1, 30))]
        if rng.random() < 0.5:
            pieces.append((rng.choice("ST"), rng.randint(0, 3), rng.randint(4, 20)))
        tokens, keys = Tokens(pieces), []
        table.extend(keys, tokens, Identity())
        assert len(keys) == len(tokens) // 4
        for i, key in enumerate(keys):
            assert seen.setdefault(key, tokens.slice(0, 4 * i + 4)) == tokens.slice(0, 4 * i + 4)
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_has_rules(release):
    """Semantics.of answers for each release that was read, and v-prefixed and short forms too."""
    assert Semantics.of(release) == Semantics.of("v" + release)
    assert Semantics.of(release).release == release


@pytest.mark.parametrize("release", ["0.11.0", "0.34.0", "1.0.0"])
def test_other_releases_are_refused_by_name(release):
    """Outside 0.11.1 to 0.33 there is no verdict."""
    with pytest.raises(NotModelled, match=f"semantics '{release}': not modelled"):
        Semantics.of(release)


def test_the_default_retention_is_the_releases():
    """Dense to 0.28, replay boundaries only from 0.29, dense again for hybrid EAGLE in 0.29."""
    groups = (Group(kind="sliding_window", block_size=4, window=5), Group(kind="full", block_size=4))

    def retention(release, **more):
        return CacheConfig(num_blocks=9, groups=groups, semantics=release, **more).retention

    assert [retention(r) for r in ("0.22.1", "0.25.0", "0.28.0", "0.29.0", "0.33.0")] == [
        None,
        None,
        None,
        0,
        0,
    ]
    assert [retention(r, use_eagle=True) for r in ("0.29.0", "0.30.0")] == [None, 0]
    assert retention("0.33.0", retention_interval=None) is None
