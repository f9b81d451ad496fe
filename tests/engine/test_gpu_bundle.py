"""A bundle's vLLM on the CUDA path, as far as importing it goes: no card, no compiled extension."""

import os
import subprocess

import pytest

from hitproof.replay import env, gpu_bundle
from hitproof.replay.gpu_bundle import make, unpack

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

IMPORTS = """
import vllm
from vllm.platforms import current_platform
from vllm import LLM, SamplingParams
import vllm.v1.attention.backends.triton_attn
import vllm.model_executor.models.gemma3, vllm.model_executor.models.gemma4, vllm.model_executor.models.llama4
import vllm.v1.worker.gpu_model_runner, vllm.v1.worker.gpu_worker
import torch
print(vllm.__file__, type(current_platform).__name__, torch.ops._C.cutlass_scaled_mm_supports_fp8(90))
try:
    torch.ops._C.silu_and_mul(torch.zeros(1), torch.zeros(2))
except NotImplementedError:
    print("no kernel")
"""


def test_a_bundle_imports_on_the_cuda_path(monkeypatch, tmp_path):
    """With NVML counting one card, vLLM 0.25.0 takes its CUDA path and imports all that an engine needs."""
    python = env.make(progress=print)
    monkeypatch.setattr(gpu_bundle, "_download", lambda folder, python, say: None)
    make(tmp_path / "bundle", "0.25.0", "3.12", print)
    unpack(tmp_path / "bundle", tmp_path / "site")
    assert not list((tmp_path / "site").rglob("*.so"))
    (tmp_path / "site" / "vllm" / "third_party" / "pynvml.py").write_text(NVML)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [python, "-c", IMPORTS], capture_output=True, text=True, env=variables, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert f"{tmp_path}/site/vllm/__init__.py NvmlCudaPlatform False" in lines
    assert lines[-1] == "no kernel"
