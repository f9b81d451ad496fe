"""Every stored counterexample, replayed on the model and on real vLLM."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hitproof.cli import main as cli
from hitproof.model import ModelTarget, Trace
from hitproof.properties.registry import BY_ID
from hitproof.properties.story import Story
from hitproof.replay import env, store
from hitproof.replay.confirm import sight
from hitproof.replay.counterexample import Counterexample, stored
from hitproof.replay.engine import EngineTarget
from hitproof.replay.manager_target import ManagerTarget

FOLDER = Path(__file__).resolve().parents[2] / "counterexamples"
CASES = stored(FOLDER)


def test_there_is_a_corpus():
    """At least the first counterexample, the cliff of vllm#48435, is stored."""
    assert CASES[0].name == "CE-0001"
    assert CASES[0].report == "vllm#48435"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_model_still_breaks_the_promise_the_same_way(case):
    """The stored finding is what judging the stored trace finds now, to the letter."""
    run = ModelTarget().run(case.trace)
    finding = BY_ID[case.finding.property_id].check(Story(run, ModelTarget().run)).finding
    assert finding == case.finding


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_vllm_does_what_the_file_says(case):
    """Each release's own manager reproduces the case, or does not, as its sightings say."""
    tested = {"0.25.0", "0.32.0", case.trace.config.semantics}
    said = [s for s in case.sightings if s.target == "manager (core)" and s.version in tested]
    assert case.trace.config.semantics in {s.version for s in said}
    for sighting in said:
        with ManagerTarget(store.add(sighting.version)) as target:
            assert sight(case.trace, case.finding.property_id, target) == sighting


@pytest.mark.vllm
@pytest.mark.parametrize("scale", ["1", "fit"])
def test_the_corpus_is_the_same_on_every_rung_below_the_engine(scale, monkeypatch, capsys):
    """Model, manager and scheduler of each case's own release show the same hits, at either scale."""
    for release in {case.trace.config.semantics for case in CASES}:
        store.add(release)
    files = [str(FOLDER / f"{case.name}.json") for case in CASES]
    words = ["hitproof", "replay", *files, "--until-rung", "scheduler", "--scale", scale, "--json"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        cli.main()
    found = json.loads(capsys.readouterr().out)["replays"]
    eagle = sum(case.trace.config.use_eagle for case in CASES)
    assert Counter((each["rung"], each["verdict"]) for each in found) == {
        ("model", "as expected"): len(CASES),
        ("manager", "as expected"): len(CASES),
        ("scheduler", "as expected"): len(CASES) - eagle,
        ("scheduler", "refused"): eagle,
    }


SHOWN = [(case, s) for case in CASES for s in case.sightings if s.target == "engine"]


@pytest.mark.engine
@pytest.mark.parametrize(("case", "sighting"), SHOWN, ids=lambda value: getattr(value, "name", "engine"))
def test_the_engine_does_what_the_file_says(case, sighting):
    """VLLM's real engine shows the hits of the file."""
    with EngineTarget(env.make(sighting.version, print)) as target:
        assert sight(case.trace, case.finding.property_id, target) == sighting


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_files_survive_a_round_trip(case):
    """Reading back what is written gives the same case, and its trace the same text."""
    assert Counterexample.from_json(case.to_json(), "x") == case
    assert Trace.loads(case.trace.dumps()).dumps() == case.trace.dumps()
