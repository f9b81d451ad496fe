"""A bundle's vLLM on the CUDA path, as far as it goes without a card: no compiled extension anywhere."""

import json
import os
import subprocess

import pytest

from hitproof.model import CacheConfig, Group
from hitproof.replay import env, gpu_bundle, tiny_model
from hitproof.replay.engine_worker import RETENTION, engine_arguments
from hitproof.replay.gpu_bundle import make, unpack
from hitproof.replay.gpu_check import NATIVE, NATIVE_VARIABLES

pytestmark = [pytest.mark.engine, pytest.mark.vllm]

NVML = """
class NVMLError(Exception):
    pass

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetCudaComputeCapability(handle): return (9, 0)
def nvmlDeviceGetName(handle): return "no card"

def __getattr__(name):
    def missing(*args, **values):
        raise NVMLError(name)
    return missing
"""

ATTENTION = """
import json, sys, tempfile
import torch
import vllm
import vllm.utils.torch_utils
from vllm import LLM, SamplingParams
import vllm.v1.worker.gpu_model_runner, vllm.v1.worker.gpu_worker
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CompilationConfig
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

print("platform", type(current_platform).__name__, vllm.__file__)
torch.set_default_dtype(torch.float32)
torch.cuda.get_device_capability = lambda *device: (9, 0)
vllm.utils.torch_utils.PIN_MEMORY = False
arguments = json.loads(sys.argv[1])
arguments["compilation_config"] = CompilationConfig(**arguments["compilation_config"])
BLOCKS, LENGTH = 60, 150


def steps(attention, config):
    # One request of LENGTH tokens in three steps, through vLLM's own metadata and Triton kernels.
    spec = attention.get_kv_cache_spec(config)
    heads, kv_heads, size, block = attention.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size
    backend = attention.get_attn_backend()
    cache = torch.zeros(backend.get_kv_cache_shape(BLOCKS, block, kv_heads, size))
    builder = backend.get_builder_cls()(spec, [attention.layer_name], config, torch.device("cpu"))
    q, k, v = (torch.randn(LENGTH, n, size) for n in (heads, kv_heads, kv_heads))
    table = torch.randperm(BLOCKS - 1)[: -(-LENGTH // block)].int() + 1
    at = torch.arange(LENGTH)
    slots = table[at // block].long() * block + at % block
    out = torch.empty_like(q)
    for start, end in ((0, 64), (64, LENGTH - 1), (LENGTH - 1, LENGTH)):
        now = slice(start, end)
        common = CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            query_start_loc_cpu=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor([end], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=end - start,
            max_query_len=end - start,
            max_seq_len=end,
            block_table_tensor=table[None],
            slot_mapping=slots[now],
        )
        attention.impl.do_kv_cache_update(attention, k[now], v[now], cache, slots[now])
        attention.impl.forward(attention, q[now], k[now], v[now], cache, builder.build(0, common), out[now])
    return q, k, v, out


def plain(q, k, v, scale, kind, reach):
    # The same in a few lines of PyTorch.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    seen = j <= i
    if kind == "sliding_window":
        seen &= j > i - reach
    if kind == "chunked_local":
        seen &= j // reach == i // reach
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


for folder in sys.argv[2:]:
    config = EngineArgs(**(arguments | {"model": folder})).create_engine_config()
    assert not config.use_v2_model_runner
    config.cache_config.num_gpu_blocks = BLOCKS
    with set_current_vllm_config(config):
        if folder == sys.argv[2]:
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1, backend="gloo")
        model = get_model_architecture(config.model_config)[0](vllm_config=config)
        for (kind, reach, _), layer in zip(config.model_config.hf_config.hitproof_layers, model.layers):
            attention = layer.attention
            q, k, v, out = steps(attention, config)
            away = (out - plain(q, k, v, attention.impl.scale, kind, reach)).abs().max().item()
            print("layer", kind, type(attention.impl).__name__, "right" if away < 1e-5 else away)
            attention.forward = lambda q, k, v: torch.zeros_like(q)
        x = model(torch.arange(5), torch.arange(5))
        assert model.compute_logits(x).shape == (5, 512)
try:
    torch.ops._C.silu_and_mul(torch.zeros(1), torch.zeros(2))
except NotImplementedError:
    print("no kernel")
"""

WINDOW = Group(kind="sliding_window", block_size=32, window=64)
FULL = Group(kind="full", block_size=32)
CHUNK = Group(kind="chunked_local", block_size=32, chunk=64)
CONFIGS = [(WINDOW, WINDOW, FULL), (WINDOW, Group(kind="full", block_size=96)), (CHUNK, FULL)]


def test_a_bundle_has_all_but_the_card(monkeypatch, tmp_path):
    """With NVML counting one card, vLLM 0.25.0 takes its CUDA path: every import of an engine, the tiny models on
    PyTorch's own operators, and Triton's attention kernels, interpreted, over every kind of group.
    """
    python = env.make(progress=print)
    monkeypatch.setattr(gpu_bundle, "_download", lambda folder, python, say: None)
    make(tmp_path / "bundle", "0.25.0", "3.12", print)
    unpack(tmp_path / "bundle", tmp_path / "site")
    assert not list((tmp_path / "site").rglob("*.so"))
    (tmp_path / "site" / "vllm" / "third_party" / "pynvml.py").write_text(NVML)
    folders = []
    for i, groups in enumerate(CONFIGS):
        config = CacheConfig(num_blocks=60, groups=groups, semantics="0.25.0", max_model_len=512)
        folders.append(tmp_path / f"model{i}")
        folders[-1].mkdir()
        tiny_model.write(config, folders[-1])
    arguments = engine_arguments(config, "", "cuda", "0.25.0") | NATIVE
    del arguments[RETENTION]
    variables = {
        **os.environ,
        **NATIVE_VARIABLES,
        "PYTHONPATH": str(tmp_path / "site"),
        "VLLM_NO_USAGE_STATS": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    variables |= tiny_model.variables(folders[0], variables)
    done = subprocess.run(
        [python, "-c", ATTENTION, json.dumps(arguments), *map(str, folders)],
        capture_output=True,
        text=True,
        env=variables | {"HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("platform", "layer", "no kernel"))]
    assert lines == [
        f"platform NvmlCudaPlatform {tmp_path}/site/vllm/__init__.py",
        *(f"layer {group.kind} TritonAttentionImpl right" for groups in CONFIGS for group in groups),
        "no kernel",
    ]
