"""The command line: what it prints for machines, its exit codes, and what it writes."""

import json
import sys
from pathlib import Path

import pytest

from hitproof.cli import main as cli
from hitproof.replay.counterexample import Counterexample
from hitproof.replay.tiny_model import refusal


@pytest.fixture
def hitproof(monkeypatch, capsys):
    """A function that runs a command line and returns (exit code, standard output)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hitproof", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = leave.code or 0
        return code, capsys.readouterr().out

    return run


def hits(text):
    """Hit tokens per request of `run --json`."""
    return [request["hit_tokens"] for request in json.loads(text)["requests"]]


@pytest.mark.parametrize(
    ("retention", "tokens", "expected"),
    [("dense", 512, 512), ("dense", 768, 0), ("0", 1280, 1280), ("0", 1600, 0)],
)
def test_the_cliff_of_the_public_report(hitproof, tmp_path, retention, tokens, expected):
    """Rounds 2 and 3 hit in full below the cliff and exactly 0 above it."""
    file = tmp_path / "trace.json"
    words = ("--retention", retention, "--tokens", tokens, "--semantics", "0.32.0", "-o", file)
    assert hitproof("scenario", "round-robin", *words) == (0, "")
    code, out = hitproof("run", file, "--json")
    assert code == 0
    assert hits(out) == [0] * 4 + [expected] * 8


def test_run_prints_what_became_of_each_request(hitproof, tmp_path):
    """id, prompt_tokens, hit_tokens, preemptions and finished, per request."""
    file = tmp_path / "trace.json"
    hitproof("scenario", "round-robin", "--seats", 1, "--rounds", 2, "-o", file)
    _, out = hitproof("run", file, "--json")
    request = {"id": "r1_0", "prompt_tokens": 520, "hit_tokens": 512, "preemptions": 0, "finished": True}
    assert json.loads(out)["requests"][1] == request


def test_hunt_finds_shrinks_and_stores(hitproof, tmp_path, monkeypatch):
    """From nothing: a violation, exit code 1, a stored case that replays on the model."""
    monkeypatch.setattr("hitproof.cli.hunt._trees", lambda releases, required: {})
    words = ("--semantics", "0.25.0", "--property", "hit-survives-half-pool", "--budget", "90s", "--seed", 2)
    code, out = hitproof("hunt", *words, "--out", tmp_path / "found", "--json")
    assert code == 1
    (find,) = json.loads(out)["finds"]
    case = find["counterexample"]
    assert (case["property"], find["known"]) == ("hit-survives-half-pool", "vllm#48435")
    assert sum(op.startswith("submit") for op in case["trace"]["ops"]) <= 3
    code, text = hitproof("report", find["path"])
    assert (code, text.splitlines()[0][:32]) == (0, "VIOLATED  hit-survives-half-pool")
    code, _ = hitproof("replay", find["path"], "--target", "model")
    assert code == 0


def test_hunt_for_what_an_engine_takes(hitproof, tmp_path, monkeypatch):
    """Only traces count, and remain while shrinking, whose pool holds one of their requests."""
    monkeypatch.setattr("hitproof.cli.hunt._trees", lambda releases, required: {})
    words = ("--semantics", "0.28.0", "--property", "hit-content", "--budget", "90s", "--for-engine")
    code, out = hitproof("hunt", *words, "--out", tmp_path / "found", "--json")
    assert code == 1
    report = json.loads(out)
    assert refusal(Counterexample.load(Path(report["finds"][0]["path"])).trace) == ""
    assert report["verdicts"]["0.28.0"]["hit-content"]["verdict"] == "VIOLATED"


def test_hunting_a_promise_that_holds_exits_with_0(hitproof, tmp_path, monkeypatch):
    """Nothing found: the verdict has its bound and the exit code is 0."""
    monkeypatch.setattr("hitproof.cli.hunt._trees", lambda releases, required: {})
    words = ("--semantics", "0.33.0", "--property", "pool-conserved", "--budget", "3s", "--out", tmp_path)
    code, out = hitproof("hunt", *words, "--json")
    assert code == 0
    verdict = json.loads(out)["verdicts"]["0.33.0"]["pool-conserved"]
    assert verdict["verdict"] == "HOLDS"
    assert verdict["evidence"] > 100
    assert "0.33.0" in verdict["bound"]


def test_properties_are_listed_for_machines(hitproof):
    """All 27 promises, with their formal statements."""
    code, out = hitproof("properties", "--json")
    assert code == 0
    assert len([p for p in json.loads(out) if p["statement"]]) == 27


def test_completion_prints_a_script(hitproof):
    """The bash completion script names the program."""
    code, out = hitproof("completion", "bash")
    assert code == 0
    assert "_hitproof_completion" in out


@pytest.mark.vllm
def test_an_adopted_case_gets_the_next_number(hitproof, tmp_path, monkeypatch):
    """Adopt writes CE-0001.json with what real vLLM said, and never overwrites it."""
    monkeypatch.setattr("hitproof.cli.hunt._trees", lambda releases, required: {})
    words = ("--semantics", "0.25.0", "--property", "hit-survives-fit", "--budget", "60s")
    _, out = hitproof("hunt", *words, "--out", tmp_path / "found", "--json")
    path = json.loads(out)["finds"][0]["path"]
    assert hitproof("adopt", path, "--into", tmp_path / "kept")[0] == 0
    kept = json.loads((tmp_path / "kept" / "CE-0001.json").read_text())
    assert kept["status"] == "confirmed"
    assert [s["verdict"] for s in kept["sightings"]] == ["reproduced", "reproduced"]
