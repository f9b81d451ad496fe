"""Reports, word by word, and the timeline's form."""

import os
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest

from hitproof.model import CacheConfig, Group, ModelTarget, Trace, parse_op
from hitproof.properties.registry import property_of
from hitproof.properties.story import Story
from hitproof.replay import report
from hitproof.replay.counterexample import Counterexample, Sighting

HERE = Path(__file__).parent
FULL = Group(kind="full", block_size=32)
WINDOW = Group(kind="sliding_window", block_size=32, window=32)
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = (
    "<script>alert(1)</script> | `rm` [x](y) &amp; \"q\" 'q' *b* \x00\x1b[31m\u202e\ufffe\ud800\n## head"
)


def counterexample(name, promise, config, *ops, **more):
    """A counterexample with the finding that this version's model makes."""
    trace = Trace(config=config, ops=tuple(map(parse_op, ops)))
    target = ModelTarget()
    finding = property_of(promise).check(Story(target.run(trace), target.run)).finding
    assert finding is not None
    return Counterexample(name=name, trace=trace, finding=finding, **more)


def in_turn(*prompts):
    """Requests r0, r1, ... one after another."""
    return [op for i, prompt in enumerate(prompts) for op in (f"submit r{i} {prompt}", "drain")]


HALF_POOL = counterexample(
    "CE-0001",
    "hit-survives-half-pool",
    CacheConfig(num_blocks=25, groups=(WINDOW, WINDOW, FULL), semantics="0.25.0"),
    *in_turn("A:97", "B:161", "A:97"),
    status="confirmed",
    report="vllm#48435",
    found_by="hunt, seed 0, after 3 s",
    minimality="nothing smaller fails, one change at a time (412 runs)",
    sightings=tuple(
        Sighting(target=target, version=version, verdict=verdict, detail=hits)
        for target, version, verdict, hits in (
            ("model", "0.25.0", "reproduced", "hits 0 0 0"),
            ("manager (core)", "0.25.0", "reproduced", "hits 0 0 0"),
            ("manager (core)", "0.26.0", "reproduced", "hits 0 0 0"),
            ("manager (core)", "0.32.0", "not reproduced", "hits 0 0 96"),
        )
    ),
    counterfactuals=(
        "one block more (26): holds (hits 0 0 32)",
        "prefill in chunks of one block (32 tokens): holds (hits 0 0 96)",
        "full attention only: no longer at stake (hits 0 0 96)",
        "blocks freed first to last instead of last to first: still violated (hits 0 0 0)",
    ),
)
FIVE_WINDOWS = counterexample(
    "CE-0002",
    "hit-survives-half-pool",
    CacheConfig(num_blocks=31, groups=(WINDOW,) * 5 + (FULL,), semantics="0.32.0", retention_interval=0),
    *in_turn("A:65", "B:97", "A:65"),
)
LORA = counterexample(
    "CE-0003",
    "hit-content",
    CacheConfig(num_blocks=20, groups=(Group(kind="full", block_size=4),), semantics="0.25.0"),
    "submit a S:8 lora=y@p1",
    "submit b S:9 lora=y@p2",
    "drain",
    "submit c S:9 lora=y@p2",
    report="vllm#30931",
    counterfactuals=("one block more (21): still violated (hits 0 8 8)",),
)
ROUND_ROBIN = counterexample(
    "CE-0004",
    "hit-survives-half-pool",
    CacheConfig(
        num_blocks=400,
        groups=(attrs.evolve(WINDOW, window=64),) * 5 + (FULL,),
        semantics="0.25.0",
        max_num_batched_tokens=128,
    ),
    *in_turn(*[f"{seat}:520 out=3" for seat in "ABCDEFG"] * 2),
    counterfactuals=tuple(
        f"change {n}: still violated (hits {' '.join(['640'] * 7 + ['0'] * 7)})" for n in range(10)
    ),
    sightings=tuple(
        Sighting(target=f"manager {n}", version="0.25.0", verdict="reproduced") for n in range(20)
    ),
)
CASES = (HALF_POOL, FIVE_WINDOWS, LORA, ROUND_ROBIN)
cases = pytest.mark.parametrize("ce", CASES, ids=lambda ce: ce.name)


@pytest.mark.parametrize(("render", "ending"), [(report.text, "txt"), (report.markdown, "md")])
@cases
def test_report_is_as_stored(ce, render, ending):
    """Text and Markdown are exactly the stored files."""
    path = HERE / f"{ce.name}.{ending}"
    if os.environ.get("HITPROOF_WRITE_SNAPSHOTS"):
        path.write_text(render(ce) + "\n", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == render(ce) + "\n"


@cases
def test_text_fits_one_screen(ce):
    """At most 60 lines of at most 100 columns."""
    lines = report.text(ce).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100


@cases
def test_one_row_breaks(ce):
    """The last step is marked, and no other line."""
    marked = [line for line in report.text(ce).splitlines() if ">>" in line]
    assert len(marked) == 1
    assert f"hit {ce.finding.seen.removeprefix('hit ')}" in marked[0] or "b: hit 8" in marked[0]


@cases
def test_timeline_is_xml_with_nothing_from_outside(ce):
    """The timeline parses, is of bounded size, and refers to nothing but its own pattern."""
    drawn = report.svg(ce)
    root = ElementTree.fromstring(drawn)
    assert root.tag == f"{SVG}svg"
    assert len(drawn) < 400_000
    assert drawn.count("http") == 1
    assert "url(" not in drawn.replace("url(#hitproof-hatch)", "")


@cases
def test_timeline_marks_one_breaking_column(ce):
    """One frame marks the column where the promise breaks."""
    root = ElementTree.fromstring(report.svg(ce))
    assert len([rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "break"]) == 1


def test_timeline_cells_say_owner_key_count_and_place():
    """A block's tooltip names its holder, group, key, ref count and place in the free queue."""
    titles = [title.text for title in ElementTree.fromstring(report.svg(HALF_POOL)).iter(f"{SVG}title")]
    assert "block 3: held by r0, group 0 (window:32/32), block 2, key 2, ref 1" in titles
    assert (
        "block 3: cached for group 0 (window:32/32), block 2 of r0, needed, key 2, ref 0, "
        "place in the free queue: 15 of 24 in op 1"
    ) in titles


def test_timeline_says_what_it_leaves_out():
    """A large pool and a long trace are cut, and the picture says by how much."""
    drawn = report.svg(ROUND_ROBIN)
    assert "Left out: earlier events 11, blocks 351, requests 6." in drawn


@cases
def test_reports_repeat(ce):
    """Rendering twice gives the same characters."""
    for render in (report.text, report.markdown, report.svg):
        assert render(ce) == render(ce)


def hostile():
    """Every free text is hostile."""
    return attrs.evolve(
        HALF_POOL,
        name=HOSTILE,
        trace=attrs.evolve(HALF_POOL.trace, note=HOSTILE),
        finding=attrs.evolve(
            HALF_POOL.finding, request=HOSTILE, op=99, expected=HOSTILE, seen=HOSTILE, reasons=(HOSTILE,)
        ),
        report=HOSTILE,
        found_by=HOSTILE,
        minimality=HOSTILE,
        sightings=(Sighting(target=HOSTILE, version=HOSTILE, verdict=HOSTILE, detail=HOSTILE),),
        counterfactuals=(f"{HOSTILE}: holds (hits 0 0 0)", HOSTILE),
    )


def test_hostile_text_stays_text_in_the_terminal():
    """No control, bidirectional or unencodable character reaches a terminal."""
    shown = report.text(hostile())
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert not [line for line in shown.splitlines() if line.startswith("## head")]


def test_hostile_text_stays_text_in_markdown():
    """Outside the fenced commands no tag, entity, link, table cell or heading comes from free text."""
    prose, _, commands = report.markdown(hostile()).partition("```sh")
    assert "<" not in prose
    assert "&amp;amp;" in prose
    assert "](" not in prose.replace("\\](", "")
    assert "| \\`rm\\`" not in prose.replace("\\|", "")
    assert not [line for line in prose.splitlines() if line.startswith("## ")]
    assert commands.count("```") == 1


def test_hostile_text_stays_text_in_the_timeline():
    """The timeline parses and shows the text; nothing of it is an element."""
    root = ElementTree.fromstring(report.svg(hostile()))
    assert not list(root.iter(f"{SVG}script"))
    assert "<script>alert(1)</script>" in "".join(root.itertext())


def test_command_survives_a_shell():
    """A name with spaces and quotes is one word of the command."""
    ce = attrs.evolve(HALF_POOL, name="a b'c")
    assert "hitproof replay 'counterexamples/found/a b'\"'\"'c.json'" in report.text(ce)


def test_trace_that_no_longer_fails_is_not_called_violated():
    """If this version's model keeps the promise, the report says so and marks no step."""
    kept = attrs.evolve(HALF_POOL.trace, config=attrs.evolve(HALF_POOL.trace.config, num_blocks=60))
    shown = report.text(attrs.evolve(HALF_POOL, trace=kept))
    assert shown.startswith("STORED AS VIOLATED, BUT NOT BY THIS VERSION'S MODEL  hit-survives-half-pool")
    assert ">>" not in shown
    ElementTree.fromstring(report.svg(attrs.evolve(HALF_POOL, trace=kept)))
