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

LAYERS = """
import json, sys, tempfile
import torch
import vllm
from vllm import LLM, SamplingParams
import vllm.v1.worker.gpu_model_runner, vllm.v1.worker.gpu_worker
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CompilationConfig
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.platforms import current_platform

print("platform", type(current_platform).__name__, vllm.__file__)
torch.set_default_dtype(torch.float32)
arguments = json.loads(sys.argv[1])
arguments["compilation_config"] = CompilationConfig(**arguments["compilation_config"])
for folder in sys.argv[2:]:
    config = EngineArgs(**(arguments | {"model": folder})).create_engine_config()
    with set_current_vllm_config(config):
        if folder == sys.argv[2]:
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1, backend="gloo")
        config.kernel_config.ir_op_priority.set_default()
        model = get_model_architecture(config.model_config)[0](vllm_config=config)
        x = torch.randn(5, config.model_config.get_hidden_size())
        for layer in model.layers:
            assert type(layer.attention.impl).__name__ == "TritonAttentionImpl"
            layer.attention.forward = lambda q, k, v: torch.zeros(5, q.shape[1])
        assert model(torch.arange(5), torch.arange(5)).shape == x.shape
        assert model.compute_logits(x).shape == (5, 512)
        print("layers", [type(layer.attention).__name__ for layer in model.layers])
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
    """With NVML counting one card, vLLM 0.25.0 takes its CUDA path: every import of an engine, and every layer of
    the tiny models but attention itself, runs on PyTorch's own operators.
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
    arguments = engine_arguments(config, "", "cuda") | NATIVE
    del arguments[RETENTION]
    variables = tiny_model.variables(
        folders[0],
        {**os.environ, **NATIVE_VARIABLES, "PYTHONPATH": str(tmp_path / "site"), "VLLM_NO_USAGE_STATS": "1"},
    )
    done = subprocess.run(
        [python, "-c", LAYERS, json.dumps(arguments), *map(str, folders)],
        capture_output=True,
        text=True,
        env=variables | {"HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("platform", "layers", "no kernel"))
    ]
    assert lines == [
        f"platform NvmlCudaPlatform {tmp_path}/site/vllm/__init__.py",
        "layers ['Attention', 'Attention', 'Attention']",
        "layers ['Attention', 'Attention']",
        "layers ['ChunkedLocalAttention', 'Attention']",
        "no kernel",
    ]
