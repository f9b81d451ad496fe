"""A tiny model with random weights whose KV-cache groups are the ones a trace asks for.

Only a ``config.json`` is written: vLLM makes the weights up (``load_format="dummy"``), so nothing is
downloaded. The model is a Gemma-3 text model with one layer per group, or a Llama-4 one for chunked
local attention. vLLM collects layers of equal
spec and splits the larger collections into groups as large as the smallest one
(``_get_kv_cache_groups_uniform_page_size`` in ``vllm/v1/core/kv_cache_utils.py``): with a single
layer of one kind, every layer becomes a group of its own, in order of each kind's first layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hitproof.model import BadInput, CacheConfig, NotModelled
from hitproof.replay.token_ids import VOCABULARY

DTYPE = "float32"
"""Rounding must not hide what the content check looks for: the weights are tiny, and so is what they say."""

HEAD = 32
_RATIOS = (1, 2, 4, 8)
"""Head sizes are 32 to 256; a page is a block's tokens times its layer's head size."""

_LAYER = {
    "full": "full_attention",
    "sliding_window": "sliding_attention",
    "chunked_local": "chunked_attention",
}


def write(config: CacheConfig, folder: Path) -> None:
    """Write ``config.json`` into ``folder``; BadInput or NotModelled if no such model can be made."""
    (folder / "config.json").write_text(json.dumps(model_config(config), indent=2) + "\n")


def model_config(config: CacheConfig) -> dict[str, Any]:
    """The model's ``config.json`` for one cache config."""
    kinds = [group.kind for group in config.groups]
    for kind in kinds:
        if kind not in _LAYER:
            raise NotModelled(f"engine: no tiny model has {kind} groups; use full and one other kind")
    if any(group.extra_retained_tokens for group in config.groups):
        raise NotModelled("engine: no tiny model keeps extra_retained_tokens; remove them")
    others = sorted(set(kinds) - {"full"})
    if len(others) > 1:
        raise BadInput(
            f"engine: no tiny model has {' and '.join(others)} groups; use full and one other kind"
        )
    other = others[0] if others else "sliding_window"
    reach = {group.window or group.chunk or 0 for group in config.groups if group.kind != "full"}
    sizes = {group.block_size for group in config.groups}
    if len(reach) > 1:
        what = "window" if other == "sliding_window" else "chunk"
        raise BadInput(f"engine: the tiny model has one {what}, not {sorted(reach)}; make them equal")
    ratio = max(sizes) // min(sizes)
    per_kind = {(group.kind, group.block_size) for group in config.groups}
    if len(per_kind) > len(set(kinds)) or ratio not in _RATIOS or max(sizes) % min(sizes):
        raise BadInput(
            f"engine: no tiny model has block sizes {sorted(sizes)}; give each kind of group one block size, "
            f"the larger {' or '.join(map(str, _RATIOS))} times the smaller"
        )
    if len(kinds) > 1 and 1 not in (kinds.count("full"), kinds.count(other)):
        raise BadInput(
            f"engine: vLLM would not form {kinds.count('full')} full and {kinds.count(other)} {other} groups from "
            "any number of layers; make one of the two counts 1"
        )
    if sorted(kinds, key=kinds.index) != kinds:
        raise BadInput("engine: vLLM puts groups of one kind side by side; reorder the groups")
    model = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": DTYPE,
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "query_pre_attn_scalar": HEAD,
        "layer_types": [_LAYER[kind] for kind in kinds],
        "sliding_window": max(reach, default=config.max_model_len),
        "max_position_embeddings": config.max_model_len,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    if ratio > 1:
        size = {group.kind: group.block_size for group in config.groups}
        model |= {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "head_dim": HEAD * max(sizes) // size["sliding_window"],
            "global_head_dim": HEAD * max(sizes) // size["full"],
            "hidden_size_per_layer_input": 0,
            "allow_global_per_layer_attribute_access": True,
        }
    if other == "chunked_local":
        if ratio > 1:
            raise BadInput("engine: the Llama-4 model has one head size; give all groups one block size")
        if max(reach) % max(sizes):
            raise BadInput(
                f"engine: vLLM's attention wants a chunk that is a multiple of the block size, not {max(reach)} with "
                f"blocks of {max(sizes)} (make_local_attention_virtual_batches)"
            )
        model |= {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "attention_chunk_size": max(reach),
            "no_rope_layers": [int(kind == "chunked_local") for kind in kinds],
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "num_local_experts": 1,
        }
    return model
