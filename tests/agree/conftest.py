"""Trees and targets for the tests that drive vLLM's own manager.

HITPROOF_RELEASES names the releases (default: one of each third; "all" for every one). Each is
fetched once into the cache folder.
"""

import os

import pytest

from hitproof.model import RELEASES
from hitproof.replay import store
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
