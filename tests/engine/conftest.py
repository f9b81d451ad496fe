"""Engines are slow to start (about 20 s): one target serves every test, in the order of their configs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hitproof.model import BadInput
from hitproof.replay import env
from hitproof.replay.engine import EngineTarget


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineTarget]:
    """The engine of the newest environment; skipped where none was made."""
    try:
        python = env.python()
    except BadInput as error:
        pytest.skip(str(error))
    with EngineTarget(python) as target:
        yield target
