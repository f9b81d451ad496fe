"""The GPU check, as far as a machine without a GPU goes: what it says it did not do, and bundles."""

import json
import subprocess
import sys
import zipfile
from contextlib import nullcontext

import attrs
import pytest

from hitproof.model import BadInput, HarnessFault, ModelTarget, Run
from hitproof.replay import gpu_bundle, gpu_check
from hitproof.replay.gpu_bundle import make, unpack
from hitproof.replay.store import Tree

HAS = {
    "python": "3.12.3",
    "torch": "2.11.0",
    "cuda": "13.0",
    "gpu": "a card",
    "triton": "3.6.0",
    "vllm": True,
}
NAMES = [name for name, _, _ in gpu_check.traces("cuda")]


class Card:
    """A target that does what the model does, but for the requests of the traces in ``odd``."""

    name, version, sees = "engine", "0.25.0", frozenset({"hits"})

    def __init__(self, odd=(), broken=()):
        self.odd, self.broken = odd, broken

    def run(self, trace):
        """One trace, as the model of its own release."""
        if trace.config.num_blocks in self.broken:
            raise HarnessFault("engine: it crashed")
        ran = ModelTarget().run(trace)
        results = [attrs.evolve(result) for result in ran.requests]
        if trace.config.num_blocks in self.odd:
            results[0].hit_tokens = 32
        return Run(
            trace=trace,
            target="engine",
            version="0.25.0",
            requests=tuple(results),
            stuck=ran.stuck,
            fault=ran.fault,
        )


@pytest.fixture
def check(monkeypatch, tmp_path, capsys):
    """A function that runs ``gpu_check run`` and returns (exit code, JSON, table)."""

    def run(*words, has=HAS, card=None):
        monkeypatch.setattr(gpu_check, "facts", lambda python: has)
        if card is not None:
            monkeypatch.setattr(gpu_check, "_target", lambda *_: nullcontext(card))
        code = gpu_check.main(["run", "--out", str(tmp_path / "out"), *words])
        text = (tmp_path / "out" / "gpu-check.txt").read_text()
        assert capsys.readouterr().out.endswith(text)
        return code, json.loads((tmp_path / "out" / "gpu-check.json").read_text()), text

    return run


@pytest.mark.parametrize(
    ("edit", "words", "message"),
    [
        ({"gpu": None}, (), "torch 2.11.0 (built for CUDA 13.0) sees no GPU here: nothing was run"),
        (
            {"gpu": None, "cuda": None},
            (),
            "torch 2.11.0 (built without CUDA) sees no GPU here: nothing was run",
        ),
        (
            {"torch": None},
            ("--python", "py"),
            "py: it has no torch; give an interpreter that has, with --python",
        ),
        ({"vllm": False}, (), "this interpreter has no vLLM: install `vllm`, or bring a bundle (--bundle)"),
    ],
)
def test_what_is_missing_is_said_and_nothing_claimed(check, edit, words, message):
    """Both files are written all the same: every case is "not run", with the reason once."""
    code, report, text = check(*words, has=HAS | edit)
    assert code == 2
    assert (report["rows"], report["not_run"], report["could_not"]) == ([], NAMES, [message])
    assert text.splitlines()[0].startswith("vLLM None on cuda: Python 3.12.3, torch")
    assert text.count("  not run\n") == len(NAMES)
    assert f"could not: {message}\n" in text


def test_everything_as_expected(check):
    """The whole corpus and the trace of contents, each with its verdict."""
    code, report, text = check(card=Card())
    assert [row["name"] for row in report["rows"]] == NAMES
    assert {row["verdict"] for row in report["rows"]} == {"as expected"}
    assert (code, report["not_run"]) == (0, [])
    assert text.startswith(
        "vLLM 0.25.0 on cuda: Python 3.12.3, torch 2.11.0, Triton 3.6.0, GPU a card\n\nCE-0001 x4          as expected"
    )
    assert report["rows"][0]["rows"][0] == {
        "request": "r0",
        "prompt_tokens": 20,
        "expected": "0",
        "observed": "0",
        "unseen": False,
        "same": True,
    }


def test_difference_and_fault(check):
    """A difference is exit code 1, above a fault."""
    code, report, text = check(card=Card(odd={21}, broken={400}))
    assert code == 1
    assert [row["verdict"] for row in report["rows"][:3]] == ["differs", "harness fault", "harness fault"]
    assert "\nCE-0001 x4          differs  " in text
    assert check(card=Card(broken={400}))[0] == 3


def test_limit(check):
    """After the limit no case is started, and each is said to be left out."""
    code, report, _ = check("--limit", "-1", card=Card())
    assert (code, report["rows"], report["not_run"]) == (2, [], NAMES)
    assert report["could_not"][0] == f"{NAMES[0]}: the limit of -1 s was reached"


@pytest.mark.parametrize(("device", "block"), [("cuda", 16), ("cpu", 32)])
def test_traces_have_blocks_that_kernels_take(device, block):
    """All cases at scale, and one trace that has hits for the content check."""
    found = list(gpu_check.traces(device))
    assert len(found) >= 17
    assert min(group.block_size for _, _, trace in found for group in trace.config.groups) == block
    assert all(group.block_size % block == 0 for _, _, trace in found for group in trace.config.groups)
    contents = next(trace for name, _, trace in found if name == "contents of hits")
    assert sum(1 for hit in ModelTarget().run(contents).hits if hit) >= 3


@pytest.fixture
def bundle(monkeypatch, tmp_path):
    """A bundle of a tree with one file, and one wheel."""
    root = tmp_path / "tree"
    (root / "vllm").mkdir(parents=True)
    (root / "vllm" / "__init__.py").write_text("")
    (root / "vllm" / "_C.abi3.so").write_text("")
    tree = Tree(version="0.25.0", semantics="0.25.0", root=root)
    monkeypatch.setattr(gpu_bundle.store, "add", lambda release, progress: tree)

    def download(folder, python, say):
        with zipfile.ZipFile(folder / "one-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("one.py", "HERE = True\n")

    monkeypatch.setattr(gpu_bundle, "_download", download)
    assert make(tmp_path / "bundle", "0.25.0", "3.12", print)["python"] == "3.12"
    return tmp_path / "bundle"


def test_bundle_holds_all_but_compiled_code(bundle, tmp_path):
    """Laid out, it has vLLM with stand-ins, its version for importlib.metadata, and the wheels' files."""
    manifest = unpack(bundle, tmp_path / "site")
    assert manifest["stand_ins"] == sorted(gpu_bundle.STAND_INS)
    files = {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*") if p.is_file()}
    assert files == {*gpu_bundle.STAND_INS, "vllm/__init__.py", "vllm-0.25.0.dist-info/METADATA", "one.py"}
    assert not list(bundle.rglob("__pycache__"))


def test_bundle_runs_by_itself(bundle, tmp_path):
    """Its gpu_check.py uses its own hitproof, in a Python where hitproof is not installed."""
    with pytest.raises(BadInput, match="exists already"):
        make(bundle, "0.25.0", "3.12", print)
    code = "import sys; sys.modules['hitproof'] = None; import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [str(bundle / "gpu_check.py"), "run", "--bundle", str(bundle), "--out", str(tmp_path / "out")]
    bare = tmp_path / "bare"
    bare.write_text(f"#!/bin/sh\necho '{json.dumps(HAS | {'gpu': None, 'vllm': False})}'\n")
    bare.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--python", str(bare)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert "could not: torch 2.11.0 (built for CUDA 13.0) sees no GPU here" in done.stdout
    assert done.stdout == (tmp_path / "out" / "gpu-check.txt").read_text()


@pytest.mark.parametrize("harm", ["change", "remove"])
def test_bundle_that_was_changed_is_refused(bundle, tmp_path, harm):
    """Wheels are checked against the manifest."""
    wheel = bundle / "wheels" / "one-1.0-py3-none-any.whl"
    wheel.write_bytes(b"other") if harm == "change" else wheel.unlink()
    with pytest.raises(BadInput, match=r"wheels/one-1\.0-py3-none-any\.whl is missing or was changed; make"):
        unpack(bundle, tmp_path / "site")


def test_no_bundle(tmp_path, capsys, monkeypatch):
    """A folder that is no bundle, and a release that is none."""
    with pytest.raises(BadInput, match=r"not a bundle: .* make one with `gpu_check bundle`"):
        unpack(tmp_path, tmp_path / "site")
    assert gpu_check.main(["bundle", str(tmp_path / "new"), "--release", "main"]) == 2
    assert capsys.readouterr().err == (
        "gpu_check: --release main: a bundle is made from a release such as 0.25.0\n"
    )
