"""The import rule: data flows one way, and the heavy packages stay in their rooms."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "model": {"model"},
    "properties": {"model", "properties"},
    "replay": {"model", "properties", "replay"},
    "fuzz": {"model", "properties", "replay", "fuzz"},
    "cli": {"model", "properties", "replay", "fuzz", "cli"},
}
FILES = [file for package in ALLOWED for file in sorted((ROOT / package).rglob("*.py"))]
WORKER_ONLY = {"adapter.py", "engine_worker.py", "tiny_layers.py"}


def imported(file):
    """Names of the modules that a file imports anywhere, as written."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_each_package_imports_only_what_lies_below_it(file):
    """Model <- properties <- replay <- fuzz <- cli, and never the other way."""
    package = file.relative_to(ROOT).parts[0]
    ours = {name.split(".")[1] for name in imported(file) if name.startswith("hitproof.")}
    assert ours <= ALLOWED[package]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_heavy_packages_stay_in_their_rooms(file):
    """Hypothesis only under fuzz/, vllm and torch only in the worker, z3 only in fuzz/bounded/."""
    package = file.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in imported(file)}
    assert file.parent == ROOT / "fuzz" / "bounded" or "z3" not in tops
    assert package == "fuzz" or "hypothesis" not in tops
    assert (package == "replay" and file.name in WORKER_ONLY) or not tops & {"vllm", "torch"}


def test_a_package_never_imports_itself_by_its_bare_name():
    """`import model` would be another module than `hitproof.model`."""
    bare = {(file.name, name) for file in FILES for name in imported(file) if name.split(".")[0] in ALLOWED}
    assert bare == set()


def test_the_model_reads_in_one_sitting():
    """No file of model/ is over 500 lines, and all together are under 2,500, blank ones aside."""
    texts = [file.read_text().splitlines() for file in (ROOT / "model").rglob("*.py")]
    assert max(map(len, texts)) <= 500
    assert sum(bool(line.strip()) for text in texts for line in text) < 2500
