"""The command ``hitproof prove``: exit codes, what it prints, bad input, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from hitproof.cli.main import cli
from hitproof.model import BadInput, Trace


def ran(*words):
    return CliRunner().invoke(cli, ["prove", *words])


def test_a_violation_exits_with_1_and_says_how_small_it_is(tmp_path):
    """The report names bound, steps, expected, seen, minimality and the solver's statistics."""
    result = ran("hit-survives-half-pool", "--semantics", "0.25.0", "-o", str(tmp_path / "t.json"))
    assert result.exit_code == 1
    assert result.stdout.startswith(
        "VIOLATED  hit-survives-half-pool\nBound     3 turns x 2 sessions; vLLM 0.25.0;"
    )
    assert "Seen      hit 0 of 4\n" in result.stdout
    assert (
        "Minimal   no earlier bound is broken; blocks 21, none smaller (in this class of runs)\n"
        in result.stdout
    )
    assert "conflicts" in result.stdout
    assert Trace.loads((tmp_path / "t.json").read_text()).config.num_blocks == 21
    assert "2 turns x 1 sessions: holds" in result.stderr


def test_a_proof_exits_with_0_and_json_says_the_same():
    """HOLDS with its bound, every bound asked, and statistics."""
    result = ran("hit-survives-fit", "--turns", "4", "--sessions", "2", "--json")
    said = json.loads(result.stdout)
    assert (result.exit_code, said["verdict"]) == (0, "HOLDS")
    assert said["bound"].startswith("2 turns x 1 sessions to 4 turns x 2 sessions; by induction")
    assert [row["answer"] for row in said["bounds"]] == ["unsat"] * 6
    assert said["statistics"]["memory"] > 0


def test_a_given_pool_is_kept():
    """With a pool and a group count given, the counterexample has them."""
    said = json.loads(ran("hit-survives-half-pool", "--pool", "40", "--groups", "5", "--json").stdout)
    trace = Trace.from_json(said["trace"])
    assert (trace.config.num_blocks, len(trace.config.groups)) == (40, 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("keys-injective",), "no encoding states this promise"),
        (("nonsense",), "no such property"),
        (("hit-survives-fit", "--retention", "64"), "the run level knows dense and 0"),
        (("hit-survives-fit", "--semantics", "0.22.0", "--retention", "0"), "needs vLLM 0.23.0 or newer"),
        (("hit-survives-fit", "--eagle", "on"), "for the mask level"),
        (("mask-covers-lookup", "--pool", "9"), "for the run level"),
        (("mask-covers-lookup", "--level", "run"), "not stated at the run level"),
    ],
)
def test_bad_input_is_one_message(words, message):
    """What is wrong and what to do."""
    result = ran(*words)
    assert isinstance(result.exception, BadInput)
    assert message in str(result.exception)


def test_too_little_time_is_unknown_and_no_pass():
    """A time-out is a verdict with the bounds that were done; only a proof exits with 0."""
    result = ran("hit-survives-fit", "--turns", "40", "--sessions", "8", "--budget", "2s")
    assert result.exit_code == 1
    assert result.stdout.startswith("UNKNOWN  hit-survives-fit\nBound     2 turns x 1 sessions to ")


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.25, 0.6])
def test_ctrl_c_keeps_the_largest_bound_done(after_s):
    """Interrupted, inside the solver or between its checks: exit code 130, UNKNOWN, what was proven so far."""
    words = ["prove", "hit-survives-fit", "--turns", "40", "--sessions", "8", "--budget", "5m"]
    code = "from hitproof.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for line in process.stderr:
            if line.startswith("3 turns x 2 sessions: holds"):
                break
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out.startswith("UNKNOWN  hit-survives-fit\nBound     2 turns x 1 sessions to ")
    assert "Reason    interrupted\n" in out
