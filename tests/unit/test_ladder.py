"""The ladder: every verdict of a replay, word by word, and what a climb makes of them."""

import json
from contextlib import nullcontext
from pathlib import Path

import attrs
import pytest

from hitproof.cli import main as cli
from hitproof.model import (
    BadInput,
    CacheConfig,
    Group,
    HarnessFault,
    ModelTarget,
    Run,
    Trace,
    parse_op,
    under,
)
from hitproof.replay.content import Answer, Content
from hitproof.replay.engine import EngineTarget
from hitproof.replay.ladder import RUNGS, TOLERANCES, climb, replayed

CONFIG = CacheConfig(
    num_blocks=21,
    groups=(Group(kind="sliding_window", block_size=4, window=2),) * 2 + (Group(kind="full", block_size=4),),
    semantics="0.25.0",
)
OPS = ("submit r0 A:5 out=1", "drain", "submit r1 B:21 out=1", "drain", "submit r2 A:5 out=1", "drain")


def trace(*ops):
    return Trace(config=CONFIG, ops=tuple(map(parse_op, ops or OPS)))


class Rung:
    """A target that shows the model's hits, changed by ``edit(run, results)`` of each run in turn."""

    name, version, sees = "rung", "0.25.0", frozenset({"hits"})

    def __init__(self, *edits):
        self.edits = list(edits)

    def run(self, trace):
        """As the model does, and then edited."""
        ran = ModelTarget().run(trace)
        results = [attrs.evolve(result) for result in ran.requests]
        edit = self.edits.pop(0) if self.edits else None
        more = (edit(results) if edit else None) or {}
        return Run(trace=trace, target=self.name, version=self.version, requests=tuple(results), **more)


def hit(k, tokens):
    """An edit: request ``k`` hit so many tokens."""

    def edit(results):
        results[k].hit_tokens = tokens

    return edit


def refuse(results):
    raise BadInput("groups: the engine has full:32; the trace asks for full:4")


def break_down(results):
    raise HarnessFault("rung: it crashed\nend of its output:\nboom")


def said(*edits, property_id="", ops=OPS):
    found = replayed(trace(*ops), Rung(*edits), "rung", property_id)
    return "\n".join([found.headline, *found.lines()])


TABLE = """\
  request  prompt        expected        observed
  r0            5               0               0
  r1           21               0               0
  r2            5               0{}"""


@pytest.mark.parametrize(
    ("edits", "text"),
    [
        ((), "rung 0.25.0: as expected\n" + TABLE.format("               0")),
        (
            (hit(2, 4), hit(2, 4)),
            "rung 0.25.0: differs at request r2\n"
            "  request 2 of 3, r2 (ops[4]): expected hit 0, observed 4\n"
            + TABLE.format("               4  <<"),
        ),
        (
            (None, hit(2, 4)),
            "rung 0.25.0: UNSTABLE\n"
            "  two runs differ: request 2 of 3, r2 (ops[4]): first run hit 0, second run 4\n"
            + TABLE.format("               4  <<"),
        ),
        (
            (refuse,),
            "rung 0.25.0: refused\n  groups: the engine has full:32; the trace asks for full:4",
        ),
        (
            (break_down,),
            "rung 0.25.0: harness fault\n  rung: it crashed\n  end of its output:\n  boom",
        ),
        (
            (lambda _: {"fault": "assertion: x"},) * 2,
            "rung 0.25.0: differs\n  the hits are the same, but it failed: assertion: x\n"
            + TABLE.format("               0"),
        ),
        (
            (lambda _: {"stuck": 5},) * 2,
            "rung 0.25.0: differs\n  the hits are the same, but no progress was possible at ops[5]\n"
            + TABLE.format("               0"),
        ),
        (
            (lambda results: results.pop() and None,) * 2,
            "rung 0.25.0: differs at request r2\n"
            "  request 2 of 3, r2 (ops[4]): expected hit 0, observed not submitted\n"
            + TABLE.format("   not submitted  <<"),
        ),
    ],
)
def test_verdict_of_a_trace(edits, text):
    """Each verdict has its words; the first difference is marked."""
    assert said(*edits) == text


def test_counterexample_that_happens():
    """The same hits, and the promise is broken."""
    text = said(property_id="hit-survives-half-pool")
    assert text.startswith("rung 0.25.0: as expected\n")
    assert text.endswith("  hit-survives-half-pool VIOLATED, judged on the model's run with the same hits")


def test_counterexample_that_does_not_happen():
    """The same hits, but the promise is kept."""
    text = said(property_id="hit-content")
    assert text.startswith("rung 0.25.0: not reproduced\n  under the rules of 0.25.0 the promise is kept\n")
    assert text.endswith("  hit-content kept, judged on the model's run with the same hits")


def test_promise_is_judged_on_the_target_that_shows_enough():
    """The model's own run shows calls and state."""
    found = replayed(trace(), ModelTarget(), "model", "hit-survives-half-pool")
    assert (found.verdict, found.promise) == ("as expected", "hit-survives-half-pool VIOLATED, judged here")


class Answering(EngineTarget):
    """An engine of 0.28.0 with the model's hits, and answers that are so far off the cold ones."""

    def __init__(self, **off):
        super().__init__(Path("none"), version="0.28.0")
        self.off = off

    def run(self, trace):
        """As the model does."""
        ran = ModelTarget().run(under(trace, self.version))
        return Run(trace=ran.trace, target=self.name, version=self.version, requests=ran.requests)

    def content(self, trace, *, bug=""):
        """What it was made with."""
        return Content(
            answers=tuple(
                Answer(request=r, tokens=1, largest=n, where=f"at {r}") for r, n in self.off.items()
            )
        )


GHOST = ("submit r0 A:5 out=1 lora=a", "drain", "submit r1 A:5 out=1 salt=a", "drain")
EQUAL = "the model finds blocks of other content under r1, but its answer from them is the cold one"


@pytest.mark.parametrize(
    ("ops", "property_id", "off", "verdict", "reason"),
    [
        (GHOST, "hit-content", {"r1": 1.0}, "as expected", ""),
        (GHOST, "hit-content", {"r1": 1.0, "r2": 1.0}, "as expected", ""),
        (GHOST, "hit-content", {}, "as expected", ""),
        (GHOST, "hit-content", {"r1": 0.0}, "content differs", EQUAL),
        (GHOST, "hit-content", {"r0": 1.0, "r1": 1.0}, "content differs", "at r0"),
        (GHOST, "hit-content", {"r1": 0.0, "r2": 1.0}, "content differs", "at r2"),
        (GHOST, "resend-hits", {"r1": 1.0}, "content differs", "at r1"),
        (GHOST, "", {"r1": 1.0}, "content differs", "at r1"),
        (OPS, "hit-content", {"r2": 1.0}, "content differs", "at r2"),
        (OPS, "", {"r2": 0.0}, "as expected", ""),
    ],
)
def test_contents_on_the_engine(ops, property_id, off, verdict, reason):
    """Other contents are a finding of their own, but where the model's finding names that request first; there,
    equal contents are.
    """
    found = replayed(trace(*ops), Answering(**off), "engine", property_id)
    assert (found.verdict, found.reason) == (verdict, reason)
    assert found.stops is (verdict == "content differs")


def test_hit_that_a_rung_cannot_show_is_not_compared():
    """A request aborted before its first output shows no hit: unseen, counted, no difference."""
    ops = ("submit a A:12 out=9", "drain", "submit b A:12 out=9", "step", "abort b")

    def unseen(results):
        results[1].hit_tokens = None

    assert said(unseen, unseen, ops=ops) == (
        "rung 0.25.0: as expected\n"
        "  request  prompt        expected        observed\n"
        "  a            12               0               0\n"
        "  b            12       8 aborted          unseen\n"
        "  1 of 2 requests show no hit here: they had no output"
    )
    assert "expected hit 8 aborted, observed - unfinished" in said(
        *(lambda r: setattr(r[1], "hit_tokens", None) or setattr(r[1], "aborted", False),) * 2, ops=ops
    )


def test_unequal_run_among_many_is_found():
    """All of ``times`` runs are compared with the first; a single run is compared with the model alone."""
    edits = (None, None, None, hit(2, 4))
    assert replayed(trace(), Rung(*edits), "rung", times=4).verdict == "unstable"
    assert replayed(trace(), Rung(*edits), "rung", times=3).verdict == "as expected"
    assert replayed(trace(), Rung(hit(2, 4)), "rung", times=1).verdict == "differs"


def test_long_trace_shows_the_surroundings_of_the_first_difference():
    """Twelve requests at most, and how many are left out on both sides."""
    ops = [op for i in range(30) for op in (f"submit r{i} S{i}:4 out=1", "drain")]
    lines = said(hit(20, 4), hit(20, 4), ops=ops).splitlines()
    assert lines[0] == "rung 0.25.0: differs at request r20"
    assert lines[3] == "  14 requests before"
    assert lines[-1] == "  4 requests after"
    assert len(lines) == 4 + 12 + 1


def opener(rung):
    return lambda: nullcontext(rung)


def test_climb_stops_at_the_first_rung_that_disagrees():
    """Refusals are passed over; what lies above a difference is not run."""

    def missing():
        raise BadInput("no environment")

    rungs = [
        ("model", opener(Rung())),
        ("manager", missing),
        ("engine", opener(Rung(hit(0, 4), hit(0, 4)))),
        ("server", opener(Rung())),
    ]
    found = list(climb(trace(), rungs))
    assert [(f.rung, f.verdict) for f in found] == [
        ("model", "as expected"),
        ("manager", "refused"),
        ("engine", "differs"),
    ]
    assert [f.exit_code for f in found] == [0, 2, 1]


def test_climb_stops_at_a_fault():
    """A rung that breaks says nothing, and nothing above it is run."""
    found = list(climb(trace(), [("engine", opener(Rung(break_down))), ("server", opener(Rung()))]))
    assert [(f.rung, f.verdict, f.exit_code) for f in found] == [("engine", "harness fault", 3)]


def test_every_rung_above_the_model_has_its_tolerances():
    """The table speaks of each rung, and of no other."""
    assert {tolerance.rung for tolerance in TOLERANCES} == set(RUNGS) - {"model"}


@pytest.fixture
def hitproof(monkeypatch, capsys, tmp_path):
    """A function that runs a command line in an empty folder and returns (exit code, standard output)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["hitproof", *map(str, words)])
        with pytest.raises(SystemExit) as leave:
            cli.main()
        return leave.value.code or 0, capsys.readouterr().out

    return run


def test_command_for_machines(hitproof, tmp_path):
    """JSON lists each replay with its rows; JUnit has a test case for each."""
    (tmp_path / "t.json").write_text(trace().dumps())
    (tmp_path / "u.json").write_text(trace(*OPS[:2]).dumps())
    words = ("t.json", "u.json", "--until-rung", "model", "--json", "--junit", "out/j.xml")
    code, out = hitproof("replay", *words)
    assert code == 0
    first, second = json.loads(out)["replays"]
    assert (first["case"], first["rung"], first["verdict"]) == ("t", "model", "as expected")
    assert first["rows"][2] == {
        "request": "r2",
        "prompt_tokens": 5,
        "expected": "0",
        "observed": "0",
        "unseen": False,
        "same": True,
    }
    assert len(second["rows"]) == 1
    assert (tmp_path / "out" / "j.xml").read_text() == (
        "<?xml version='1.0' encoding='utf-8'?>\n"
        '<testsuite name="hitproof replay" tests="2" failures="0" errors="0" skipped="0">\n'
        '  <testcase classname="t" name="model 0.25.0" />\n'
        '  <testcase classname="u" name="model 0.25.0" />\n'
        "</testsuite>\n"
    )


def test_command_reports_a_finding_above_all(hitproof, tmp_path, monkeypatch):
    """Of a refusal, a fault and a difference the exit code is the difference's; JUnit tells them apart."""
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_text(trace().dumps())
    rung = Rung(refuse, break_down, hit(2, 4), hit(2, 4))
    monkeypatch.setattr("hitproof.cli.replay.open_target", lambda *a, **k: nullcontext(rung))
    code, out = hitproof("replay", "a", "b", "c", "d", "--target", "model", "--junit", "j.xml")
    assert code == 1
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        "a on rung 0.25.0: refused",
        "b on rung 0.25.0: harness fault",
        "c on rung 0.25.0: differs at request r2",
        "d on rung 0.25.0: as expected",
    ]
    xml = (tmp_path / "j.xml").read_text()
    assert 'tests="4" failures="1" errors="1" skipped="1"' in xml
    assert '<failure message="rung 0.25.0: differs at request r2">' in xml


def test_scaled_case_is_named_by_its_scale(hitproof, tmp_path):
    """CE-0001 at blocks of 32 tokens: the same hits in blocks, and its name says the scale."""
    (tmp_path / "t").write_text(trace().dumps())
    code, out = hitproof("replay", "t", "--target", "model", "--scale", "fit")
    assert (code, out.splitlines()[0]) == (0, "t x8 on model 0.25.0: as expected")
    assert "  r1          168               0               0" in out


def test_interrupt_keeps_what_was_found(hitproof, tmp_path, monkeypatch):
    """Ctrl-C in the second case: the first is printed and in both files, and the exit code is 130."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(trace().dumps())

    def interrupt(results):
        raise KeyboardInterrupt

    rung = Rung(hit(2, 4), hit(2, 4), interrupt)
    monkeypatch.setattr("hitproof.cli.replay.open_target", lambda *a, **k: nullcontext(rung))
    code, out = hitproof("replay", "a", "b", "--target", "model", "--junit", "j.xml", "--json")
    assert code == 130
    assert [each["verdict"] for each in json.loads(out)["replays"]] == ["differs"]
    assert 'tests="1" failures="1"' in (tmp_path / "j.xml").read_text()
