"""The tiny model as vLLM runs it: attention layers of vLLM's in plain PyTorch, loaded as a plugin.

``tiny_model`` copies this file beside a model's ``config.json``. What the model says depends on every token
that a layer attends to and on its place, strongly enough for the content check. Its weights come from a
fixed seed and lie in buffers that ``load_format="dummy"`` leaves alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.linear import ReplicatedLinear

SEED = 48435
RANK = 8
"""Of adapters; ``max_lora_rank`` is 16 unless told."""

SHARPNESS = 2.0
"""Standard deviation of the attention scores of random tokens: from about 2 on, a few tokens decide."""


def register() -> None:
    """Make the architecture known to vLLM, in each of its processes."""
    ModelRegistry.register_model("HitproofForCausalLM", HitproofForCausalLM)


class HitproofForCausalLM(nn.Module):
    """One layer per entry of the config's ``hitproof_layers``."""

    supports_lora = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}
    is_3d_moe_weight = is_non_gated_moe = False
    lora_skip_prefixes: ClassVar[list[str]] = []
    lora_manager = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = model = vllm_config.model_config.hf_config
        random = torch.Generator("cpu").manual_seed(SEED)
        _keep(self, tokens=torch.randn(model.vocab_size, model.hidden_size, generator=random, device="cpu"))
        _keep(self, logits=_weights(random, model.hidden_size, model.vocab_size))
        _keep(self, pace=4096 ** -torch.linspace(0, 1, model.hidden_size // 2, device="cpu"))
        self.layers = nn.ModuleList(Layer(vllm_config, i, random) for i in range(len(model.hitproof_layers)))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What tokens are, apart from their places."""
        return self.tokens[input_ids]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the scheduled tokens."""
        angles = positions[:, None] * self.pace
        x = self.embed_input_ids(input_ids) + torch.cat((angles.sin(), angles.cos()), -1)
        for layer in self.layers:
            x = layer(x)
        return _normal(x)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """A score for each token of the vocabulary."""
        return hidden_states @ self.logits


class Layer(nn.Module):
    """Attention of one kind and the residual connection around it.

    With LoRA enabled its input also goes through ``adapted``, where adapters put what they add.
    """

    def __init__(self, vllm_config: Any, index: int, random: torch.Generator) -> None:
        super().__init__()
        model = vllm_config.model_config.hf_config
        kind, reach, kv_heads = model.hitproof_layers[index]
        width, size, heads = model.hidden_size, model.head_dim, model.num_attention_heads
        _keep(self, query=_weights(random, width, heads * size))
        _keep(self, key=_weights(random, width, kv_heads * size))
        _keep(self, value=_weights(random, width, kv_heads * size))
        _keep(self, out=_weights(random, heads * size, width))
        common = {
            "num_heads": heads,
            "head_size": size,
            "scale": SHARPNESS / size**0.5,
            "num_kv_heads": kv_heads,
            "cache_config": vllm_config.cache_config,
            "prefix": f"layers.{index}.attention",
        }
        self.adapted = None
        if vllm_config.lora_config is not None:
            self.adapted = ReplicatedLinear(width, width, bias=False, prefix=f"layers.{index}.adapted")
        if kind == "chunked_local":
            self.attention = ChunkedLocalAttention(attention_chunk_size=reach, **common)
        else:
            self.attention = Attention(per_layer_sliding_window=reach, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states in and out, one row a token."""
        normal = _normal(x)
        if self.adapted is not None:
            normal = normal + self.adapted(normal)[0]
        return x + self.attention(normal @ self.query, normal @ self.key, normal @ self.value) @ self.out


def write_adapter(folder: Path, name: str, layers: int, width: int) -> None:
    """Write an adapter into ``folder``: random, another for each ``name``, and as strong as a layer's input."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    random = torch.Generator("cpu").manual_seed(seed)
    tensors = {}
    for i in range(layers):
        module = f"base_model.model.layers.{i}.adapted"
        tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, width, generator=random) / width**0.5
        tensors[f"{module}.lora_B.weight"] = torch.randn(width, RANK, generator=random) / RANK**0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["adapted"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def _weights(random: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """A matrix that keeps the scale of what it is applied to; drawn on the CPU, so equal on every device."""
    return torch.randn(rows, columns, generator=random, device="cpu") / rows**0.5


def _keep(module: nn.Module, **tensors: torch.Tensor) -> None:
    """Buffers on the model's device that no loader fills."""
    for name, tensor in tensors.items():
        place = tensor.to(torch.get_default_device(), torch.get_default_dtype())
        module.register_buffer(name, place, persistent=False)


def _normal(x: torch.Tensor) -> torch.Tensor:
    """Rows of mean square 1."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
