"""The real engine gives the hits that the model predicts."""

from __future__ import annotations

import random

import pytest

from hitproof.model import (
    BadInput,
    CacheConfig,
    Drain,
    Group,
    ModelTarget,
    Op,
    Trace,
    parse_op,
)
from hitproof.replay.content import TOLERANCE
from hitproof.replay.engine import EngineTarget
from hitproof.replay.ladder import replayed

pytestmark = pytest.mark.engine

SEATS, ROUNDS = 4, 3


def window(block_size: int = 32) -> Group:
    return Group(kind="sliding_window", block_size=block_size, window=64)


def full(block_size: int = 32) -> Group:
    return Group(kind="full", block_size=block_size)


def hybrid(retention: int | None) -> CacheConfig:
    return CacheConfig(
        num_blocks=400,
        groups=(window(),) * 5 + (full(),),
        semantics="0.32.0",
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        max_model_len=2048,
        retention_interval=retention,
    )


def small(*groups: Group, **settings: object) -> CacheConfig:
    values = {"num_blocks": 60, "max_num_batched_tokens": 128, "max_num_seqs": 4, "max_model_len": 512}
    return CacheConfig(groups=groups, semantics="0.32.0", **values | settings)  # type: ignore[arg-type]


def trace(config: CacheConfig, *lines: str) -> Trace:
    return Trace(config=config, ops=tuple(map(parse_op, lines)))


def round_robin(config: CacheConfig, prefix: int) -> Trace:
    """Each of four seats sends its own prefix and 8 fresh tokens, three rounds long."""
    ops: list[Op] = []
    for turn in range(ROUNDS):
        for seat in range(SEATS):
            ops += [parse_op(f"submit r{turn}s{seat} S{seat}:{prefix} u{turn}{seat}:8 out=2"), Drain()]
    return Trace(config=config, ops=tuple(ops))


def random_ops(seed: int) -> tuple[str, ...]:
    """Submits that share prefixes, beside steps, aborts and resets."""
    rng = random.Random(seed)
    lines: list[str] = []
    names: list[str] = []
    for _ in range(30):
        choice = rng.random()
        if choice < 0.5 or not names:
            names.append(f"r{len(names)}")
            line = f"submit {names[-1]} {rng.choice('AB')}:{rng.randint(1, 320)} u{rng.randrange(4)}:{rng.randint(1, 60)}"
            line += f" out={rng.choice((1, 2, 3, 36))}" + (" salt=x" if rng.random() < 0.2 else "")
            lines.append(line)
        elif choice < 0.85:
            lines.append(f"step {rng.randint(1, 5)}")
        elif choice < 0.95:
            lines.append(f"abort {rng.choice(names)}")
        else:
            lines.append("reset")
    return (*lines, "drain")


def same_hits(engine: EngineTarget, tried: Trace) -> int:
    """Check that engine and model agree request by request; how many requests showed a hit length."""
    seen, expected = engine.run(tried), ModelTarget().run(tried)
    compared = 0
    for ours, theirs in zip(expected.requests, seen.requests, strict=True):
        assert (ours.finished, ours.aborted) == (theirs.finished, theirs.aborted), ours.id
        if theirs.hit_tokens is None and (ours.aborted or ours.hit_tokens is None):
            continue
        assert ours.hit_tokens == theirs.hit_tokens, ours.id
        compared += 1
    return compared


@pytest.mark.parametrize(
    ("retention", "prefix", "hit"), [(None, 512, 512), (None, 768, 0), (0, 1280, 1280), (0, 1600, 0)]
)
def test_cliff(engine: EngineTarget, retention: int | None, prefix: int, hit: int) -> None:
    """Hits of rounds two and three are full on one side of the cliff and exactly 0 on the other."""
    tried = round_robin(hybrid(retention), prefix)
    run = engine.run(tried)
    assert run.hits == (0,) * SEATS + (hit,) * (SEATS * (ROUNDS - 1))
    assert run.hits == ModelTarget().run(tried).hits
    assert all(request.finished for request in run.requests)


TIGHT = small(window(), full(), num_blocks=24, retention_interval=None)


@pytest.mark.parametrize("seed", range(6))
def test_interleaved(engine: EngineTarget, seed: int) -> None:
    """Steps, aborts, resets and preemptions between requests leave engine and model in agreement."""
    assert same_hits(engine, trace(TIGHT, *random_ops(seed))) >= 5


def test_output_in_prompt(engine: EngineTarget) -> None:
    """A prompt that contains an earlier request's output hits the blocks which that request wrote."""
    grown = trace(TIGHT, "submit a S:90 out=40", "drain", "submit b S:90 @a u:8 out=1", "drain")
    assert engine.run(grown).hits == ModelTarget().run(grown).hits == (0, 128)


def test_output_of_unfinished_request(engine: EngineTarget) -> None:
    """Outputs are the trace's, so a prompt may contain one that is not generated yet."""
    ops = ("submit a S:90 out=40", "step 2", "submit b S:90 @a u:8 out=1", "drain", "submit c S:90 @a out=1")
    grown = trace(TIGHT, *ops, "drain")
    assert engine.run(grown).hits == ModelTarget().run(grown).hits == (0, 64, 128)


def test_same_run_twice(engine: EngineTarget) -> None:
    """A trace run twice on one engine gives the same run: nothing is left of the first."""
    tried = trace(TIGHT, *random_ops(7))
    assert engine.run(tried) == engine.run(tried)


CONTENT = (
    "submit a S:90 out=4",
    "drain",
    "submit b S:90 u:30 out=6",
    "submit c S:200 out=40",
    "step 2",
    "submit d S:190 salt=x out=2",
    "drain",
    "submit e S:190 salt=x v:9 out=5",
    "drain",
)


def assert_contents(engine: EngineTarget, tried: Trace) -> None:
    """Answers with hits equal cold ones, and do not once noise lies over the cache."""
    kept, broken = engine.content(tried), engine.content(tried, bug="noise")
    assert kept.requests == broken.requests >= 2
    assert kept.tokens >= kept.requests
    assert kept.text("cpu").startswith("hit-content HOLDS: ")
    assert broken.text("cpu").startswith("hit-content VIOLATED: request ")
    assert broken.largest > 100 * TOLERANCE["cpu"] > 1000 * kept.largest


def test_contents_of_hits(engine: EngineTarget) -> None:
    """Cached blocks answer as computed ones do, token by token; a cache written over is found out."""
    assert_contents(engine, trace(TIGHT, *CONTENT))


def test_content_violation_names_the_request(engine: EngineTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay on an engine that answers from a polluted cache has its own verdict."""
    content = engine.content
    monkeypatch.setattr(engine, "content", lambda tried: content(tried, bug="noise"))
    found = replayed(trace(TIGHT, *CONTENT), engine, "engine")
    assert (found.verdict, found.exit_code, found.stops) == ("content differs", 1, True)
    assert found.reason.startswith("request ")
    assert all(row.same for row in found.rows)


def test_content_without_hits_is_vacuous(engine: EngineTarget) -> None:
    """Nothing compared is no pass."""
    assert "VACUOUS" in engine.content(trace(TIGHT, "submit a S:90 out=4", "drain")).text("cpu")


def test_hit_that_the_engine_cannot_show(engine: EngineTarget) -> None:
    """A request aborted during its prefill has no output, so its hit is not compared."""
    ops = (
        "submit a S:130 out=1",
        "drain",
        "submit b S:128 u:300 out=1",
        "step",
        "abort b",
        "submit c S:130",
        "drain",
    )
    found = replayed(trace(TIGHT, *ops), engine, "engine")
    assert (found.verdict, [row.unseen for row in found.rows]) == ("as expected", [False, True, False])
    assert "1 of 3 requests show no hit here: they had no output" in found.notes


def test_different_block_sizes(engine: EngineTarget) -> None:
    """Groups of different block size are made by different numbers of key-value heads."""
    config = small(window(32), window(32), full(96), full(64 * 3), retention_interval=0)
    assert same_hits(engine, trace(config, *random_ops(8))) >= 5


def test_every_kind_at_once(engine: EngineTarget) -> None:
    """Two windows, chunks and full attention in one model: the same hits, and the same contents."""
    windows = (Group(kind="sliding_window", block_size=32, window=size) for size in (40, 97))
    config = small(*windows, Group(kind="chunked_local", block_size=32, chunk=64), full())
    assert same_hits(engine, trace(config, *random_ops(9))) >= 5
    assert_contents(engine, trace(config, *CONTENT))


ADAPTED = (
    *("submit a S:90 out=4 lora=x", "drain", "submit b S:90 out=4 lora=x", "drain"),
    *("submit c S:90 out=3 salt=x", "submit d S:90 out=3", "submit e S:90 out=3 lora=x@y", "drain"),
    *("submit f S:90 out=3 lora=x@y", "drain"),
)


def test_adapters(engine: EngineTarget) -> None:
    """LoRA adapters share blocks with themselves alone: not with a salt of their name, nor another path."""
    adapted = trace(TIGHT, *ADAPTED)
    assert engine.run(adapted).hits == ModelTarget().run(adapted).hits == (0, 64, 0, 0, 0, 64)
    kept = engine.content(adapted)
    assert (kept.requests, kept.first("cpu")) == (2, None)
    other = engine.content(adapted, bug="no adapter")
    assert all(answer.largest > 100 * TOLERANCE["cpu"] for answer in other.answers), (
        "adapters change no answer"
    )


def test_other_block_size_is_refused(engine: EngineTarget) -> None:
    """An engine with other groups than the trace's is refused with both."""
    with pytest.raises(
        BadInput,
        match="groups: the engine has window:32/64, full:32; the trace asks for window:16/64, full:16",
    ):
        engine.run(trace(small(window(16), full(16)), "submit a S:90", "drain"))


def test_device_that_vllm_does_not_run_on_is_refused(engine: EngineTarget) -> None:
    """A CPU build asked for CUDA says so, and claims no run on a GPU."""
    with EngineTarget(engine.python, device="cuda") as cuda:
        assert cuda.name == "engine (cuda)"
        with pytest.raises(BadInput, match="--device cuda: this interpreter's vLLM runs on cpu; give one"):
            cuda.run(trace(TIGHT, "submit a S:90", "drain"))


def test_pool_too_small_is_refused(engine: EngineTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that cannot hold one request of max_model_len is refused as vLLM refuses it, to the block."""
    short, enough = (
        trace(small(window(), full(), num_blocks=n, max_model_len=300), "submit a S:90", "drain")
        for n in (17, 18)
    )
    assert engine.run(enough).hits == (0,)
    with pytest.raises(
        BadInput, match="num_blocks 17 cannot hold one request of max_model_len 300, which needs 18"
    ):
        engine.run(short)
    monkeypatch.setattr("hitproof.replay.tiny_model.check", lambda trace, device: None)
    with pytest.raises(
        BadInput, match=r"config: the engine refuses it: To serve at least one request .*\(300\)"
    ):
        engine.run(short)
