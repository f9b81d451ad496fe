"""A bundle: hitproof, a vLLM release's Python files and the wheels they need, for a machine without a network.

vLLM's compiled extensions stay behind. Where its Python files ask for one while they are imported, a
stand-in says that it supports nothing, and raises when it is called; each is listed in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hitproof.model import BadInput
from hitproof.replay import store

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "MANIFEST.json"

OURS = ("model", "properties", "replay", "counterexamples")
"""What of hitproof a bundle holds; ``cli`` and ``fuzz`` need more packages and are not needed."""

WHEELS = (
    "attrs==26.1.0",
    "platformdirs==4.14.9",
    "annotated-types==0.8.0",
    "apache-tvm-ffi==0.1.15.post2",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "compressed-tensors==0.17.0",
    "fastapi==0.136.3",
    "httpcore2==2.16.2",
    "httpx2==2.16.2",
    "llguidance==1.7.6",
    "loguru==0.7.3",
    "msgspec==0.23.0",
    "openai==3.57.0",
    "oss-harmony==0.0.11",
    "partial-json-parser==0.2.1.1.post7",
    "pybase64==1.5.1",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "pyzmq==27.3.0",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "truststore==0.10.5",
    "typing-inspection==0.4.5",
    "xgrammar==0.2.8",
)
"""What hitproof needs, and what `from vllm import LLM` and an engine's start import beside torch, Triton,
transformers and what commonly comes with them; in the versions of the environment of vLLM 0.32.0, in
which the bundled 0.25.0 was imported with all packages but these hidden."""

PLATFORMS = (
    *(f"manylinux_2_{n}_x86_64" for n in range(35, 16, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)

STAND_INS = {
    "vllm/_C_stable_libtorch.py": '''\
"""hitproof's stand-in for a compiled extension of vLLM: it supports nothing."""

import torch

_LIBRARY = torch.library.Library("_C", "FRAGMENT")
for _name in (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
):
    _LIBRARY.define(f"{_name}(int capability) -> bool")
    _LIBRARY.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
for _name in (
    "silu_and_mul",
    "mul_and_silu",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gelu_new",
    "gelu_fast",
    "gelu_quick",
    "gelu_tanh",
    "rotary_embedding",
    "fused_add_rms_norm",
    "fused_qk_norm_rope",
    "static_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "silu_and_mul_quant",
    "silu_and_mul_per_block_quant",
):
    _LIBRARY.define(f"{_name}(Tensor! out, Tensor input) -> ()")
''',
    "vllm/vllm_flash_attn/_vllm_fa2_C.py": '''\
"""hitproof's stand-in for FlashAttention's compiled extension: it lets vLLM be imported."""
''',
}
"""Files beside vLLM's: capability questions are answered with no; operators are declared, for layers and
compiler passes that look them up when they are built, without an implementation, so that a call raises."""


def make(folder: Path, release: str, python: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Make a bundle in ``folder``, which must not exist; its manifest.

    ``python``: the version that the wheels are for, on Linux x86-64. Needs a network.
    """
    if folder.exists():
        raise BadInput(f"{folder}: exists already; name a folder to be made")
    if not store.is_release(release):
        raise BadInput(f"--release {release}: a bundle is made from a release such as 0.25.0")
    tree = store.add(release, progress=say)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        for name in OURS:
            shutil.copytree(
                ROOT / name, part / "hitproof" / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copytree(
            tree.root / "vllm", part / "vllm", ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
        for name, text in STAND_INS.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_text(text)
        info = part / f"vllm-{release}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
        (part / "gpu_check.py").write_text(LAUNCHER)
        (part / "wheels").mkdir()
        _download(part / "wheels", python, say)
        manifest = {
            "release": release,
            "python": python,
            "wheels": {p.name: _sha256(p) for p in sorted((part / "wheels").iterdir())},
            "stand_ins": sorted(STAND_INS),
        }
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        part.rename(folder)
    except OSError as error:
        raise BadInput(f"{folder}: cannot write it: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return manifest


def unpack(bundle: Path, folder: Path) -> dict[str, Any]:
    """Lay out a bundle's vLLM and its wheels in ``folder``, to be put on the path; the manifest."""
    try:
        manifest: dict[str, Any] = json.loads((bundle / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--bundle {bundle}: not a bundle: {error}; make one with `gpu_check bundle`"
        ) from None
    for name, digest in manifest["wheels"].items():
        wheel = bundle / "wheels" / name
        if not wheel.is_file() or _sha256(wheel) != digest:
            raise BadInput(
                f"--bundle {bundle}: wheels/{name} is missing or was changed; make the bundle again"
            )
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    shutil.copytree(bundle / "vllm", folder / "vllm")
    info = f"vllm-{manifest['release']}.dist-info"
    shutil.copytree(bundle / info, folder / info)
    return manifest


LAUNCHER = '''\
"""Runs hitproof's GPU check from this bundle: python gpu_check.py run --bundle <this folder>."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for name in ("attrs", "platformdirs"):
    sys.path += map(str, (HERE / "wheels").glob(f"{name}-*.whl"))
sys.argv[0] = str(HERE / "hitproof" / "replay" / "gpu_check.py")
runpy.run_path(sys.argv[0], run_name="__main__")
'''


def _download(folder: Path, python: str, say: Callable[[str], None]) -> None:
    if not WHEELS:
        return
    say(f"fetching {len(WHEELS)} wheels for Python {python}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for name in PLATFORMS:
        command += ["--platform", name]
    done = subprocess.run([*command, *WHEELS], capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise BadInput(f"the wheels cannot be fetched; check the network:\n{done.stderr.strip()[-1500:]}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
