"""A tiny model with random weights whose KV-cache groups are the ones a trace asks for.

A folder with a ``config.json`` and the model's own layers (``tiny_layers``) as a plugin of vLLM's, which
it finds where the folder is on ``PYTHONPATH``. Nothing is downloaded, and nothing of a real model is in the
way: a layer is an attention of vLLM's, so its KV-cache spec is one.

vLLM collects layers of equal spec and splits the larger collections into groups as large as the
smallest one, then gives layers with smaller pages larger blocks until all pages are equal
(``_get_kv_cache_groups_uniform_page_size`` and ``unify_kv_cache_spec_page_size`` in
``vllm/v1/core/kv_cache_utils.py``, in 0.33.0 ``kv_cache_planning.py``). With one layer per group, one kind of which there is a single layer, and
more key-value heads where blocks are smaller, the groups are the trace's, in its order.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from hitproof.model import BadInput, CacheConfig, Drain, Group, NotModelled, Submit, Trace
from hitproof.model.groups import cdiv
from hitproof.model.semantics import parse_release
from hitproof.replay.scale import CUDA_BLOCK, KERNEL_BLOCK, fitting, scaled
from hitproof.replay.token_ids import VOCABULARY

DTYPE = "float32"
"""Rounding must not hide what the content check looks for."""

HEAD = 32
"""Head size: the smallest that vLLM's CPU and Triton attention take."""

MOST_ADAPTERS = 8
"""LoRA adapters that one engine serves at once."""

OLDEST = (0, 19, 0)
"""Of the releases whose ``LLM`` takes the arguments that a trace needs."""

KINDS = ("full", "sliding_window", "chunked_local")

_LAYERS = Path(__file__).with_name("tiny_layers.py")
_PLUGIN = "hitproof_tiny"


def refusal(trace: Trace) -> str:
    """Why the engine of the trace's release would not take it at its kernels' scale; empty if it would."""
    try:
        check(scaled(trace, fitting(trace)))
    except BadInput as error:
        return str(error)
    return ""


def check(trace: Trace, device: str = "cpu") -> None:
    """BadInput or NotModelled if the engine of the trace's release would refuse it, or form other groups."""
    check_config(trace.config, device)
    flying: set[tuple[str | None, str | None]] = set()
    named = set()
    for i, op in enumerate(trace.ops):
        if isinstance(op, Drain):
            flying.clear()
        if isinstance(op, Submit) and op.identity.lora is not None:
            adapter = (op.identity.lora, op.identity.lora_path)
            named.add(adapter)
            flying.add(adapter)
            if len({name for name, _ in flying}) < len(flying):
                raise BadInput(
                    f"engine: ops[{i}]: {op.request}: another request with an adapter named {op.identity.lora} from "
                    "another path may run beside it, and vLLM knows adapters of one batch by their names: drain before"
                )
    if len(named) > MOST_ADAPTERS:
        raise NotModelled(f"engine: {len(named)} adapters; it serves {MOST_ADAPTERS} at once")


def check_config(config: CacheConfig, device: str = "cpu") -> None:
    """The same of a config alone.

    From 0.20.1 a pool must hold one request of ``max_model_len``, from 0.29.0 beside the null block
    (``get_kv_cache_configs`` in ``vllm/v1/core/kv_cache_utils.py``, in 0.33.0 ``kv_cache_planning.py``;
    ``max_admission_blocks_per_request`` of the specs); before, vLLM compares the machine's memory instead.
    """
    if config.use_eagle:
        raise NotModelled("engine: no tiny model has a draft model; set use_eagle to false")
    release = parse_release(config.semantics)
    if release < OLDEST:
        raise NotModelled(f"engine: releases before 0.19.0, such as {config.semantics}, are not driven")
    unit = math.gcd(*(group.block_size for group in config.groups))
    if config.enable_prefix_caching and config.key_block_size != unit:
        raise NotModelled(
            f"engine: no hash_block_size but {unit}, what vLLM takes for these groups; remove it"
        )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise BadInput(
            f"engine: max_num_batched_tokens {config.max_num_batched_tokens} is less than max_num_seqs "
            f"{config.max_num_seqs}, which vLLM refuses"
        )
    _check_groups(config.groups)
    if _windows_choose(release) and all(group.kind == "sliding_window" for group in config.groups):
        least = KERNEL_BLOCK if device == "cpu" and release >= (0, 29, 0) else CUDA_BLOCK
        if least != min(group.block_size for group in config.groups):
            raise BadInput(
                f"engine: windows without other layers have blocks of {least} tokens in {config.semantics}, not of "
                f"{min(group.block_size for group in config.groups)}: add a full group, or scale the trace otherwise"
            )
    length = config.max_model_len
    needed = sum(
        rules.admission_cap(config.max_num_batched_tokens, length) or cdiv(length, group.block_size)
        for rules, group in zip(config.group_rules(), config.groups, strict=True)
    )
    needed += release >= (0, 29, 0)
    if release >= (0, 20, 1) and config.num_blocks < needed:
        raise BadInput(
            f"engine: num_blocks {config.num_blocks} cannot hold one request of max_model_len {length}, which needs "
            f"{needed}: raise num_blocks or lower max_model_len"
        )


def write(config: CacheConfig, folder: Path) -> None:
    """Write the model of a config that passed ``check`` into ``folder``."""
    (folder / "config.json").write_text(json.dumps(model_config(config), indent=2) + "\n")
    shutil.copy(_LAYERS, folder / f"{_PLUGIN}.py")
    about = folder / f"{_PLUGIN}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{_PLUGIN} = {_PLUGIN}:register\n")


def variables(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """What to set, beside what is ``given``, so that vLLM finds the model's layers."""
    path = given.get("PYTHONPATH")
    found = {"PYTHONPATH": os.pathsep.join([str(folder), *([path] if path else [])])}
    if "VLLM_PLUGINS" in given:
        found["VLLM_PLUGINS"] = f"{given['VLLM_PLUGINS']},{_PLUGIN}"
    return found


def block_size(config: CacheConfig, release: str) -> int:
    """The ``block_size`` to ask that release for, so that every group gets its own.

    From 0.25.0 to 0.29.0 it is that of layers without a window alone: layers with one begin with the smallest
    that their kernels take (``Attention.get_kv_cache_spec`` in ``model_executor/layers/attention/attention.py``).
    """
    chosen = [group.block_size for group in config.groups if group.kind != "sliding_window"]
    if chosen and _windows_choose(parse_release(release)):
        return min(chosen)
    return min(group.block_size for group in config.groups)


def _windows_choose(release: tuple[int, int, int]) -> bool:
    return (0, 25) <= release[:2] < (0, 30)


def model_config(config: CacheConfig) -> dict[str, Any]:
    """The model's ``config.json`` for one cache config."""
    largest = max(group.block_size for group in config.groups)
    heads = largest // min(group.block_size for group in config.groups)
    return {
        "architectures": ["HitproofForCausalLM"],
        "model_type": "llama",
        "dtype": DTYPE,
        "vocab_size": VOCABULARY,
        "hidden_size": HEAD * max(2, heads),
        "intermediate_size": HEAD,
        "num_hidden_layers": len(config.groups),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD,
        "max_position_embeddings": config.max_model_len,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "hitproof_layers": [
            [group.kind, group.window or group.chunk, largest // group.block_size] for group in config.groups
        ],
    }


def _check_groups(groups: tuple[Group, ...]) -> None:
    """Refuse what vLLM would make other groups of, or none."""
    for group in groups:
        if group.kind not in KINDS:
            raise NotModelled(f"engine: the tiny model has no {group.kind} layers; use {', '.join(KINDS)}")
        if group.extra_retained_tokens:
            raise NotModelled("engine: no layer of the tiny model keeps extra_retained_tokens; remove them")
        if group.chunk and group.chunk % group.block_size:
            raise BadInput(
                f"engine: vLLM's attention wants a chunk that is a multiple of the block size, not {group.chunk} "
                f"with blocks of {group.block_size} (make_local_attention_virtual_batches)"
            )
    sizes = {group.block_size for group in groups}
    if any(max(sizes) % size or size % min(sizes) for size in sizes):
        raise BadInput(
            f"engine: vLLM makes all pages equal and so has no block sizes {sorted(sizes)}; let the smallest divide "
            "all and all divide the largest"
        )
    runs = [(spec, len(list(run))) for spec, run in groupby(groups)]
    if len(runs) > len(set(groups)):
        raise BadInput("engine: vLLM puts equal groups side by side; reorder the groups")
    if len(groups) > 1 and len({(group.kind, group.window, group.chunk) for group in groups}) == 1:
        raise BadInput(f"engine: vLLM would make one group of {', '.join(group.label for group in groups)}")
    if min(count for _, count in runs) > 1:
        counts = " and ".join(f"{count} of {spec.label}" for spec, count in runs)
        raise BadInput(f"engine: vLLM forms {counts} from no number of layers; give one of them a count of 1")
