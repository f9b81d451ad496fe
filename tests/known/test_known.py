"""Known violations are demanded: each entry of the table has a trace that shows it, and stays covered by it."""

from pathlib import Path

import pytest

from hitproof.model import ModelTarget, Trace
from hitproof.properties.known import KNOWN, known_for
from hitproof.properties.registry import BY_ID, PROPERTIES
from hitproof.properties.story import Story
from hitproof.replay.counterexample import stored

ROOT = Path(__file__).resolve().parents[2]
TRACES = {
    path.stem: Trace.loads(path.read_text()) for path in sorted((ROOT / "tests/known/traces").glob("*.json"))
}
TRACES |= {case.name: case.trace for case in stored(ROOT / "counterexamples")}


def findings(trace):
    """Everything that the model breaks on ``trace``."""
    story = Story(ModelTarget().run(trace), ModelTarget().run)
    return [f for p in PROPERTIES if (f := p.check(story).finding) is not None]


SHOWN = [known_for(finding, trace) for trace in TRACES.values() for finding in findings(trace)]


@pytest.mark.parametrize("name", [name for name in TRACES if not name.startswith("CE-")])
def test_each_trace_breaks_the_promise_that_names_it(name):
    """The file's name starts with the property, and the table has the violation."""
    (wanted,) = [p for p in BY_ID if name.startswith(p)]
    (finding,) = [f for f in findings(TRACES[name]) if f.property_id == wanted]
    assert known_for(finding, TRACES[name]) is not None


@pytest.mark.parametrize(
    "known", {(k.report, k.since, k.because): k for k in KNOWN}.values(), ids=lambda k: k.when
)
def test_each_known_violation_is_shown(known):
    """For each report and reason, some stored trace breaks one of its promises."""
    assert (known.report, known.since, known.because) in {
        (k.report, k.since, k.because) for k in SHOWN if k is not None
    }


def test_nothing_shown_is_unlisted():
    """No stored trace breaks a promise in a way that the table does not have."""
    assert None not in SHOWN
