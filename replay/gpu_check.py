"""Everything that hitproof checks on a GPU, as one script: ``python -m hitproof.replay.gpu_check``.

``run`` replays the corpus on vLLM's engine with CUDA and writes one JSON file and one table. vLLM is the
interpreter's own ``vllm`` package, or that of a bundle: a release's Python files with no compiled
extension, for a machine that has torch with CUDA and Triton but neither vLLM nor a network. ``bundle``
makes one. The file also runs by its path, without hitproof being installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: hitproof is the folder above
    _package = types.ModuleType("hitproof")
    _package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["hitproof"] = _package

from hitproof.model import BadInput, HarnessFault, Trace, parse_op
from hitproof.replay.counterexample import stored, write_whole
from hitproof.replay.engine import EngineTarget
from hitproof.replay.gpu_bundle import MANIFEST, make, unpack
from hitproof.replay.ladder import Replayed, replayed
from hitproof.replay.scale import CUDA_BLOCK, KERNEL_BLOCK, fitting, scaled

ROOT = Path(__file__).resolve().parent.parent

FACTS = """
import importlib.util, json, platform
out = {"python": platform.python_version(), "torch": None, "cuda": None, "gpu": None, "triton": None, "vllm": False}
if importlib.util.find_spec("torch"):
    import torch
    out["torch"] = torch.__version__
    out["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name(0)
if importlib.util.find_spec("triton"):
    import triton
    out["triton"] = triton.__version__
out["vllm"] = importlib.util.find_spec("vllm") is not None
print(json.dumps(out))
"""

NATIVE = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"mode": 0, "custom_ops": ["none"]},
    "kernel_config": {
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
        "enable_flashinfer_autotune": False,
        "enable_cutedsl_warmup": False,
    },
}
"""Arguments of ``LLM`` for a vLLM without compiled extension: Triton attention, PyTorch's own operators."""

NATIVE_VARIABLES = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TORCH_COMPILE_DISABLE": "1",
}
"""The second model runner, 0.25's choice for such a model, maps host memory with a compiled operator."""

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
"""The corpus is about lost hits; these requests have some, so that contents are compared."""

CONTENT_CONFIG = "CE-0002"
"""The case whose config, and engine, they use."""


def traces(device: str) -> Iterator[tuple[str, str, Trace]]:
    """Name, property and trace of everything to replay, scaled to blocks that the device's kernels take."""
    for case in stored(ROOT / "counterexamples"):
        factor = fitting(case.trace, CUDA_BLOCK if device == "cuda" else KERNEL_BLOCK)
        name = case.name + (f" x{factor}" if factor > 1 else "")
        yield name, case.finding.property_id, scaled(case.trace, factor)
        if case.name == CONTENT_CONFIG:
            yield "contents of hits", "", Trace(config=case.trace.config, ops=tuple(map(parse_op, CONTENT)))


def facts(python: Path) -> dict[str, Any]:
    """What the interpreter has: Python, torch, its CUDA, the GPU, Triton, whether vLLM."""
    done = subprocess.run([str(python), "-c", FACTS], capture_output=True, text=True, timeout=300)  # noqa: S603
    if done.returncode:
        raise BadInput(f"{python}: cannot say what it has:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(args: argparse.Namespace) -> int:
    """Replay everything; the exit code of the worst."""
    started = time.monotonic()
    has = facts(args.python)
    report: dict[str, Any] = {"device": args.device, "facts": has, "vllm": None, "could_not": [], "rows": []}
    todo = list(traces(args.device))
    try:
        _check(has, args)
        with (
            tempfile.TemporaryDirectory(prefix="hitproof-gpu-") as folder,
            _target(args, Path(folder), report) as target,
        ):
            report["vllm"] = target.version
            for name, property_id, trace in todo:
                if time.monotonic() - started > args.limit:
                    report["could_not"].append(f"{name}: the limit of {args.limit} s was reached")
                    continue
                report["rows"].append(_row(name, trace, property_id, target))
                print(_line(report["rows"][-1]), flush=True)
                _write(report, todo, started, args.out)
    except BadInput as error:
        report["could_not"].append(str(error))
    _write(report, todo, started, args.out)
    print(table(report), end="")
    codes = {row["exit_code"] for row in report["rows"] if row["verdict"] != "not reproduced"}
    return next((code for code in (1, 3) if code in codes), 2 if report["not_run"] else 0)


def _write(report: dict[str, Any], todo: list[tuple[str, str, Trace]], started: float, out: Path) -> None:
    """Both files, as far as it is: a run that is cut off loses one case."""
    ran = {row["name"] for row in report["rows"]}
    report["not_run"] = [name for name, _, _ in todo if name not in ran]
    report["seconds"] = round(time.monotonic() - started, 1)
    write_whole(out / "gpu-check.json", json.dumps(report, indent=2) + "\n")
    write_whole(out / "gpu-check.txt", table(report))


def _check(has: dict[str, Any], args: argparse.Namespace) -> None:
    if has["torch"] is None:
        raise BadInput(f"{args.python}: it has no torch; give an interpreter that has, with --python")
    if args.device == "cuda" and has["gpu"] is None:
        built = f"built for CUDA {has['cuda']}" if has["cuda"] else "built without CUDA"
        raise BadInput(f"torch {has['torch']} ({built}) sees no GPU here: nothing was run")
    if not has["vllm"] and args.bundle is None:
        raise BadInput("this interpreter has no vLLM: install `vllm`, or bring a bundle (--bundle)")


def _target(args: argparse.Namespace, folder: Path, report: dict[str, Any]) -> EngineTarget:
    """The engine of the interpreter's vLLM, or of the bundle's."""
    if args.bundle is None:
        return EngineTarget(args.python, device=args.device, timeout_s=args.case_limit)
    manifest = unpack(args.bundle, folder)
    report["stand_ins"] = manifest["stand_ins"]
    report["could_not"] += [
        "compiled extensions, FlashAttention and CUDA graphs: the bundle has none",
        "asynchronous scheduling: off on every rung",
    ]
    return EngineTarget(
        args.python,
        device=args.device,
        timeout_s=args.case_limit,
        version=manifest["release"],
        arguments=NATIVE,
        variables=NATIVE_VARIABLES | {"PYTHONPATH": str(folder)},
    )


def _row(name: str, trace: Trace, property_id: str, target: EngineTarget) -> dict[str, Any]:
    start = time.monotonic()
    said: Replayed = replayed(trace, target, "engine", property_id)
    return {
        "name": name,
        "seconds": round(time.monotonic() - start, 1),
        "exit_code": said.exit_code,
        **said.to_json(),
    }


def _line(row: dict[str, Any]) -> str:
    reason = row["reason"].splitlines()[0][:140] if row["reason"] else ""
    return f"{row['name']:18}  {row['verdict']:15}  {row['seconds']:>6.1f} s  {reason}".rstrip()


def table(report: dict[str, Any]) -> str:
    """What people read: where it ran, each row, what could not be done."""
    has = report["facts"]
    where = f"Python {has['python']}, torch {has['torch']}, Triton {has['triton']}, GPU {has['gpu']}"
    lines = [f"vLLM {report['vllm']} on {report['device']}: {where}", ""]
    lines += [_line(row) for row in report["rows"]]
    lines += [f"  {note}" for row in report["rows"] for note in row["notes"] if "HOLDS" in note]
    lines += [f"{name:18}  not run" for name in report["not_run"]]
    lines += [f"could not: {what}" for what in report["could_not"]]
    lines += [f"stand-in: {what}" for what in report.get("stand_ins", ())]
    return "\n".join([*lines, f"{report['seconds']} s in all"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 all as expected, 1 a difference, 2 not run, 3 a harness fault."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0] if __doc__ else "")
    verbs = parser.add_subparsers(dest="verb", required=True)
    runner = verbs.add_parser("run", help="replay the corpus and write gpu-check.json and gpu-check.txt")
    runner.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="interpreter that has torch"
    )
    runner.add_argument("--bundle", type=Path, help="folder that `bundle` made, for a machine without vLLM")
    runner.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    runner.add_argument("--out", type=Path, default=Path("."), help="folder for the two files")
    runner.add_argument(
        "--case-limit", type=int, default=180, help="seconds for an engine's start, and for a run"
    )
    runner.add_argument("--limit", type=int, default=540, help="start no case after so many seconds")
    bundler = verbs.add_parser("bundle", help="make a bundle (needs a network)")
    bundler.add_argument("folder", type=Path)
    bundler.add_argument("--release", default="0.25.0")
    bundler.add_argument("--for-python", default="3.12", help="Python of the machine that it is for")
    args = parser.parse_args(arguments)
    try:
        if args.verb == "bundle":
            manifest = make(
                args.folder, args.release, args.for_python, say=lambda line: print(line, flush=True)
            )
            print(
                f"{args.folder}: vLLM {manifest['release']}, {len(manifest['wheels'])} wheels; see {MANIFEST} in it"
            )
            return 0
        return run(args)
    except BadInput as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    except HarnessFault as error:
        print(f"gpu_check: harness fault: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
