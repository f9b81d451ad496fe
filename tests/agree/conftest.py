"""Trees and targets for the tests that drive vLLM's own manager.

HITPROOF_RELEASES names the releases (default: one of each third; "all" for every one). Each is
fetched once into the cache folder.
"""

import os
import shutil

import pytest

from hitproof.model import RELEASES
from hitproof.replay import store
from hitproof.replay.core import EXECUTED
from hitproof.replay.manager_target import ManagerTarget

_NAMED = os.environ.get("HITPROOF_RELEASES", "0.14.1 0.25.0 0.32.0")
TESTED = list(RELEASES) if _NAMED == "all" else _NAMED.split()


def pytest_generate_tests(metafunc):
    if "release" in metafunc.fixturenames:
        metafunc.parametrize("release", TESTED, scope="session")


@pytest.fixture(scope="session")
def target(release):
    """The release's manager under the core loader, one worker for all tests."""
    with ManagerTarget(store.add(release)) as started:
        yield started


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
