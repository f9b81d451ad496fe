"""Engines are slow to start (about 20 s): one target serves every test, in the order of their configs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hitproof.replay import env
from hitproof.replay.engine import EngineTarget


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineTarget]:
    """The engine of the newest environment, which is made first where there is none."""
    with EngineTarget(env.make(progress=print)) as target:
        yield target
