"""``hitproof bisect`` and ``hunt --unlike``: where a verdict changes between two releases' own code."""

import json
import shutil
from pathlib import Path

import pytest

from hitproof.cli.main import cli
from hitproof.model import BadInput
from hitproof.replay.counterexample import Counterexample

pytestmark = pytest.mark.vllm

CASES = Path(__file__).resolve().parents[2] / "counterexamples"
WORDS = ("--good", "0.23.0", "--bad", "0.22.1")


@pytest.fixture
def bisect(capsys, tmp_path):
    """Runs the command on a copy of CE-0020: exit code and output."""
    case = tmp_path / "case.json"
    shutil.copy(CASES / "CE-0020.json", case)

    def run(*words):
        code = cli.main(["bisect", str(case), *words], standalone_mode=False)
        return code or 0, capsys.readouterr().out

    run.case = case
    return run


def test_table_and_boundary(bisect):
    """One row a release, oldest first, and the boundary in words."""
    code, out = bisect(*WORDS)
    assert code == 0
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0.22.1", "reproduced", "hits 0 0 0"],
        ["0.23.0", "not reproduced", "hits 0 0 16"],
    ]
    assert out.splitlines()[-1] == "boundary: 0.22.1 reproduced; 0.23.0 not reproduced"


def test_ends_that_are_not_so_are_said(bisect):
    """Exit code 1 with the verdict that was found instead."""
    code, out = bisect("--good", "0.22.1", "--bad", "0.22.1")
    assert code == 1
    assert out.splitlines()[-1] == "0.22.1: reproduced, not 'not reproduced' as it was said"


def test_retention_is_set_where_there_is_one(bisect):
    """Under dense retention 0.23.0 keeps the promise too."""
    code, out = bisect(*WORDS, "--retention", "dense", "--json")
    assert code == 0
    assert json.loads(out)["spans"] == ["0.22.1 reproduced", "0.23.0 not reproduced"]


def test_verdicts_are_kept_in_the_file(bisect):
    """--keep replaces what the file said of these releases and nothing else."""
    before = Counterexample.load(bisect.case)
    edited = json.loads(bisect.case.read_text())
    for sighting in edited["sightings"]:
        if sighting["version"] == "0.23.0":
            sighting["verdict"] = "reproduced"
    bisect.case.write_text(json.dumps(edited))
    assert bisect(*WORDS, "--keep")[0] == 0
    after = Counterexample.load(bisect.case)
    assert set(after.sightings) == set(before.sightings)
    assert after.finding == before.finding


def test_a_changed_trace_is_not_kept(bisect):
    """What was run with another retention is not the file's case."""
    with pytest.raises(BadInput, match="for a counterexample file as it is"):
        bisect(*WORDS, "--keep", "--retention", "0")


def test_unlike_finds_only_what_the_other_release_keeps(capsys, tmp_path, monkeypatch):
    """The admission gate of 0.19.1 refuses what 0.20.2 admits; the stored find says so of both."""
    monkeypatch.chdir(tmp_path)
    words = ("--semantics", "0.19.1", "--unlike", "0.20.2", "--property", "fits-alone-runs")
    code = cli.main(["hunt", *words, "--budget", "60s", "--out", "out"], standalone_mode=False)
    assert code == 1
    (file,) = Path("out").iterdir()
    capsys.readouterr()
    code = cli.main(["bisect", str(file), "--bad", "0.19.1", "--good", "0.20.2"], standalone_mode=False)
    assert (code or 0) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("boundary: 0.19.1 reproduced; 0.20.0 ")
