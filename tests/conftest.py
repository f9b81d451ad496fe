"""The terminal summary of the fuzz properties, and forks: copies of a release's core files, edited."""

import shutil

import pytest

from hitproof.replay import store
from hitproof.replay.core import EXECUTED

_SURVEYS = pytest.StashKey()


def pytest_configure(config):
    config.stash[_SURVEYS] = []


@pytest.fixture(scope="session")
def fuzz_summary(request):
    """Surveys put here are printed at the end."""
    return request.config.stash[_SURVEYS]


def pytest_terminal_summary(terminalreporter, config):
    for found in config.stash[_SURVEYS]:
        terminalreporter.section(f"promises on the model of vLLM {found.release}")
        terminalreporter.write_line(f"bound: {found.bound}")
        for j in found.judgements():
            listed = found.known.get(j.property_id)
            note = f" (known: {listed.report})" if listed else " (NEW)" if j.property_id in found.new else ""
            terminalreporter.write_line(f"  {j.verdict.name:9}{j.property_id:25}{j.evidence:>9} checks{note}")


@pytest.fixture
def fork(tmp_path):
    """A function that makes a fork: the core files of 0.32.0, edited."""

    def make(*edits):
        origin = store.add("0.32.0")
        for module in EXECUTED:
            for name in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
                if (origin.root / name).is_file():
                    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(origin.root / name, tmp_path / name)
        for name, old, new in edits:
            file = tmp_path / "vllm" / name
            text = file.read_text()
            assert text.count(old) == 1, f"{name} has {text.count(old)} of {old!r}"
            file.write_text(text.replace(old, new))
        return store.find(str(tmp_path), semantics="0.32.0")

    return make
