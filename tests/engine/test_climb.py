"""The ladder up to the real engine, by the command that people type."""

import json
from pathlib import Path

import pytest

from hitproof.cli import main as cli
from hitproof.replay import env

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).resolve().parents[2] / "counterexamples"


@pytest.mark.parametrize("name", ["CE-0001", "CE-0015"])
def test_climb_to_the_engine(monkeypatch, capsys, name):
    """Model, manager and scheduler (imported whole from the environment) and engine agree at scale, all of one release."""
    env.make(progress=print)
    capsys.readouterr()
    words = (
        "replay",
        FOLDER / f"{name}.json",
        "--scale",
        "fit",
        "--until-rung",
        "engine",
        "--vllm",
        "env",
        "--json",
    )
    monkeypatch.setattr("sys.argv", ["hitproof", *map(str, words)])
    with pytest.raises(SystemExit) as leave:
        cli.main()
    found = json.loads(capsys.readouterr().out)["replays"]
    assert (leave.value.code or 0) == 0
    assert [(each["rung"], each["target"], each["version"], each["verdict"]) for each in found] == [
        ("model", "model", env.NEWEST_CPU, "as expected"),
        ("manager", "manager (env)", env.NEWEST_CPU, "as expected"),
        ("scheduler", "scheduler (env)", env.NEWEST_CPU, "as expected"),
        ("engine", "engine", env.NEWEST_CPU, "as expected"),
    ]
    assert [[row["observed"] for row in each["rows"]] for each in found] == [["0", "0", "0"]] * 4
