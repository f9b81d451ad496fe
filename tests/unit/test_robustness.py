"""What must not break hitproof: code that crashes, hangs or floods, Ctrl-C, closed pipes, odd sizes.

A harness fault exits with 3 and is never a verdict; an interrupt exits with 130 and keeps the finds.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hitproof.cli import common
from hitproof.cli import main as cli
from hitproof.model import CacheConfig, Group, HarnessFault, ModelTarget, Trace, parse_op
from hitproof.properties.verdict import Finding
from hitproof.replay import store
from hitproof.replay.core import EXECUTED
from hitproof.replay.counterexample import Counterexample
from hitproof.replay.counterexample import store as keep
from hitproof.replay.manager_target import ManagerTarget
from hitproof.replay.process import Worker

HITPROOF = Path(sys.executable).with_name("hitproof")


def trace(*ops, num_blocks=50, groups=({"kind": "full", "block_size": 4},), **settings):
    """A trace as its file has it."""
    config = {"num_blocks": num_blocks, "semantics": "0.32.0", "groups": list(groups), **settings}
    return json.dumps({"schema": 1, "config": config, "ops": list(ops)})


@pytest.fixture
def hitproof(monkeypatch, capsys, tmp_path):
    """A function that runs a command line in an empty folder: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hitproof", *map(str, words)])
        with pytest.raises(SystemExit) as leave:
            cli.main()
        return leave.value.code, *capsys.readouterr()

    return run


FAULT = "hitproof: harness fault (says nothing about any promise): "
MANAGER = f"{FAULT}manager (core) 0.32.0: "


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A function that makes a source tree whose manager module is ``code``; calls may take 2 s."""
    monkeypatch.setitem(common.HEIGHTS, "manager", functools.partial(ManagerTarget, timeout_s=2))

    def make(code):
        file = tmp_path / "fork/vllm/v1/core/kv_cache_manager.py"
        file.parent.mkdir(parents=True)
        file.write_text(f"import os, sys, time\nprint('last', 'words', flush=True)\n{code}\n")
        (tmp_path / "fork/vllm/_version.py").write_text("version = '0.32.0'\n")
        Path("trace").write_text(trace("submit a S:8", "drain"))
        return tmp_path / "fork"

    return make


@pytest.mark.parametrize(
    ("code", "starts", "ends"),
    [
        ("1 / 0", "start raised in the worker:\nTraceback", "\nend of its output:\nlast words\n"),
        ("sys.exit(0)", "it crashed during start (exit status 0)", "\nend of its output:\nlast words\n"),
        ("os._exit(7)", "it crashed during start (exit status 7)", "\nend of its output:\nlast words\n"),
        ("os.abort()", "it crashed during start (exit status -6)", "last words\n"),
        ("while True: time.sleep(9)", "no answer to start within 2 s", "\nend of its output:\nlast words\n"),
        ("while True: print('x' * 9999)", "its output flooded during start (exit status -9)", "x\n"),
        ("print('\\x1b[31mred')", "start raised in the worker:\n", "last words\n\\x1b[31mred\n"),
    ],
)
def test_tree_that_does_not_load_is_a_harness_fault(hitproof, tree, code, starts, ends):
    """Whatever a tree does when it is imported, exit 3 with what it printed last, and no verdict."""
    code, out, err = hitproof("run", "trace", "--target", "manager", "--vllm", tree(code))
    assert (code, out) == (3, "")
    assert err.startswith(MANAGER + starts)
    assert err.endswith(ends)
    assert len(err) < 100_000


LOOKUP = "def get_computed_blocks(self, request"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "run raised in the worker:"),
        (
            "return self.empty_kv_cache_blocks, '16', 0",
            "vLLM's get_computed_blocks says that the hit is '16' tokens",
        ),
        (
            "return self.empty_kv_cache_blocks, -4, 0",
            "vLLM's get_computed_blocks says that the hit is -4 tokens",
        ),
        ("return 5, 0, 0", "run raised in the worker:"),
        ("raise KeyError('lost')", "vLLM raised Traceback"),
        ("raise SystemExit(0)", "manager (core) 0.32.0: it crashed during run (exit status 0)"),
        ("import time; time.sleep(60)", "manager (core) 0.32.0: no answer to run within 2 s"),
    ],
)
def test_tree_that_breaks_in_a_call_is_a_harness_fault(hitproof, tree, tmp_path, body, message):
    """A lookup that raises, hangs or answers nonsense: exit 3, for `run` as for `replay`."""
    fork, origin = tree(""), store.add("0.32.0").root
    for module in EXECUTED:
        for name in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
            if (origin / name).is_file():
                (fork / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin / name, fork / name)
    file = fork / "vllm/v1/core/kv_cache_manager.py"
    text = file.read_text()
    assert text.count(LOOKUP) == 1
    file.write_text(
        text.replace(
            LOOKUP, f"def get_computed_blocks(self, request):\n        {body}\n\n    def _{LOOKUP[4:]}"
        )
    )
    code, out, err = hitproof("run", "trace", "--target", "manager", "--vllm", fork)
    assert (code, out) == (3, "")
    assert err.startswith(FAULT)
    assert message in err
    Path("case").write_text(json.dumps(case("a").to_json()))
    code, out, _ = hitproof("replay", "case", "--target", "manager", "--vllm", fork)
    assert code == 3
    assert ": harness fault\n" in out


WORKER = """
import os, subprocess, sys, time

def handlers():
    return {
        "fork": lambda: subprocess.Popen(["sleep", "60"]).pid,
        "hang": lambda: time.sleep(60),
        "closed": lambda: (os.closerange(3, 99), time.sleep(60)),
        "long": lambda: int("x" * 10_000_000),
        "odd": lambda: (lambda: 0),
    }
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker that serves ``WORKER``; calls may take 2 s."""
    (tmp_path / "badly_behaved.py").write_text(WORKER)
    monkeypatch.chdir(tmp_path)
    with Worker("badly_behaved", name="bad", timeout_s=2) as started:
        yield started


def alive(pid):
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(holds):
    """Whether ``holds()`` within 15 s: a process that was killed takes a moment to go."""
    until = time.monotonic() + 15
    while not holds() and time.monotonic() < until:
        time.sleep(0.1)
    return holds()


def test_what_a_call_started_ends_with_a_call_that_hangs(worker):
    """After a time limit the whole process group of the worker is gone."""
    child = worker.call("fork")
    with pytest.raises(HarnessFault, match="no answer to hang within 2 s"):
        worker.call("hang")
    assert eventually(lambda: not alive(child))


def test_worker_that_closes_its_pipe_is_ended(worker):
    """A tree that closes every file and goes on is not waited for."""
    with pytest.raises(HarnessFault, match="it crashed during closed"):
        worker.call("closed")
    assert worker._process.poll() is not None


def test_fault_is_not_as_long_as_what_was_raised(worker):
    """The text of an error of any length is cut."""
    with pytest.raises(HarnessFault) as raised:
        worker.call("long")
    assert len(str(raised.value)) < 100_000


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (RuntimeError("odd"), f"{FAULT}RuntimeError: odd; please report it with the lines above"),
        (MemoryError(), f"{FAULT}out of memory"),
        (OSError(28, "No space left on device"), f"{FAULT}[Errno 28] No space left on device"),
    ],
)
def test_error_of_ours_is_no_verdict(hitproof, monkeypatch, error, last):
    """An error that nobody foresaw exits with 3, not with the 1 that means violated."""

    def broken(_):
        raise error

    monkeypatch.setattr("hitproof.cli.run.load_trace", broken)
    code, out, err = hitproof("run", "trace")
    assert (code, out, err.splitlines()[-1]) == (3, "", last)


def test_interrupt_exits_with_130(hitproof, monkeypatch):
    """Ctrl-C in any command is one word and exit code 130."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hitproof.cli.run.load_trace", interrupted)
    assert hitproof("run", "trace") == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize(
    "words", [["properties"], ["properties", "--json"], ["completion", "bash"], ["--help"]]
)
def test_closed_pipe_is_neither_well_nor_violated(words):
    """When nobody reads, exit 141 as shells say it, without a traceback."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([HITPROOF, *words], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def members(session):
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture
def hunting(tmp_path):
    """A hunt in a session of its own, without any real vLLM, that finds within seconds."""
    words = ("--semantics", "0.25.0", "--property", "hit-survives-fit", "--property", "pool-conserved")
    (tmp_path / "cache").touch()
    clean = {**os.environ, "HITPROOF_CACHE": str(tmp_path / "cache"), "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        [HITPROOF, "hunt", *words, "--budget", "10m", "--workers", "2", "--out", tmp_path / "found"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean,
    ) as process:
        yield process
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("when", ["shrinking", "searching"])
def test_interrupted_hunt_keeps_its_finds(hunting, tmp_path, when):
    """Ctrl-C while shrinking keeps the find as it is; afterwards it keeps the small one. No process
    is left and the exit code is 130.
    """
    line = next(line for line in hunting.stderr if line.startswith("hit-survives-fit: "))
    assert line
    if when == "searching":
        next(line for line in hunting.stdout if line.startswith("stored in "))
    os.killpg(hunting.pid, signal.SIGINT)
    try:
        out, err = hunting.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        hunting.send_signal(signal.SIGABRT)
        pytest.fail("not ended by Ctrl-C; where each thread is:\n" + hunting.communicate()[1])
    assert hunting.returncode == 130
    assert "Traceback" not in err
    assert err.endswith("interrupted: what was found before is kept\n")
    assert "VIOLATED" in out
    assert eventually(lambda: members(hunting.pid) == [])
    (file,) = (tmp_path / "found").iterdir()
    found = Counterexample.load(file)
    assert found.finding.property_id == "hit-survives-fit"
    assert found.minimality.startswith("not shrunk: interrupted") is (when == "shrinking")


def test_killed_hunt_leaves_no_process(hunting):
    """When the hunt itself is killed, its pool ends with it."""
    next(line for line in hunting.stderr if line.startswith("hit-survives-fit: "))
    hunting.kill()
    hunting.wait()
    assert eventually(lambda: members(hunting.pid) == [])


def case(request):
    """A counterexample with nothing special."""
    return Counterexample(
        name="find",
        trace=Trace.loads(trace(f"submit {request} S:8", "drain")),
        finding=Finding(property_id="progress", at=0, op=0, request=request, expected="x", seen="y"),
    )


def test_finds_of_the_same_kind_get_numbers(tmp_path):
    """Each goes to the first free name, and one that is there already is left alone."""
    (tmp_path / "progress-0.32.0-2.json").write_text("mine")
    names = [keep(case(request), tmp_path).name for request in "abc"]
    assert names == [f"progress-0.32.0-{n}.json" for n in (1, 3, 4)]
    assert (tmp_path / "progress-0.32.0-2.json").read_text() == "mine"
    assert Counterexample.load(tmp_path / names[1]).name == "progress-0.32.0-3"


def window(tokens, block_size=4):
    """A sliding-window group."""
    return {"kind": "sliding_window", "block_size": block_size, "window": tokens}


FULL = {"kind": "full", "block_size": 4}
TWICE = ("submit a S:64 out=3", "drain", "submit b S:64 out=3", "drain")
ODD = {
    "one block": (trace("submit a S:3", "drain", "submit b S:3", "drain", num_blocks=2), [0, 0]),
    "64 groups": (trace(*TWICE, num_blocks=3000, groups=[{**window(8), "count": 63}, FULL]), [0, 60]),
    "63 windows": (
        trace(*TWICE, num_blocks=3000, groups=[*(window(n) for n in range(2, 65)), FULL]),
        [0, 60],
    ),
    "windows of 2 and of 10**9": (
        trace(*TWICE, num_blocks=500, groups=[window(2), window(10**9), FULL]),
        [0, 60],
    ),
    "sizes without a common factor": (
        trace(*TWICE, num_blocks=500, groups=[window(9, 7), window(5, 11), window(3, 13), FULL]),
        [0, 0],
    ),
    "a token a step": (trace(*TWICE, max_num_batched_tokens=1, max_num_seqs=1), [0, 60]),
    "a token a block": (
        trace(
            "submit a S:2047",
            "drain",
            "submit b S:2047",
            "drain",
            num_blocks=5000,
            groups=[{"kind": "full", "block_size": 1}, window(9, 1)],
        ),
        [0, 2046],
    ),
    "ten million blocks": (trace(*TWICE, num_blocks=10_000_000), [0, 60]),
    "far tokens": (trace("submit a S[99999999999990:99999999999999]", "drain"), [0]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_but_valid(hitproof, name):
    """Extreme configs run and hit as their sizes say."""
    text, hits = ODD[name]
    Path("trace").write_text(text)
    code, out, _ = hitproof("run", "trace", "--json")
    assert code == 0
    assert [request["hit_tokens"] for request in json.loads(out)["requests"]] == hits


def test_five_thousand_requests_at_once():
    """A long queue is served in order and every request ends."""
    ops = [parse_op(f"submit r{i} S:64 u{i}:8") for i in range(5000)]
    config = CacheConfig(num_blocks=60, groups=(Group(kind="full", block_size=4),), max_num_seqs=1000)
    run = ModelTarget(record=False).run(Trace(config=config, ops=(*ops, parse_op("drain"))))
    assert all(result.finished for result in run.requests)
    assert run.observations == ()
    assert run.sees == {"hits"}


def test_what_a_file_says_does_not_reach_the_terminal_as_a_command(hitproof):
    """No escape sequence of a counterexample is printed as such."""
    Path("case").write_text(json.dumps({**case("a").to_json(), "name": "\u001b]0;owned\u0007"}))
    code, out, _ = hitproof("report", "case")
    assert code == 0
    assert "\u001b" not in out
    assert "]0;owned" in out
