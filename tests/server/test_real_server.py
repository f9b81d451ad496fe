"""vLLM's own API server on CPU with the tiny model: the cliff over HTTP."""

from pathlib import Path

import pytest

from hitproof.model import BadInput, Trace, parse_op, under
from hitproof.replay import env
from hitproof.replay.counterexample import Counterexample
from hitproof.replay.ladder import replayed
from hitproof.replay.probe import Plan, probe
from hitproof.replay.scale import fitting, scaled
from hitproof.replay.serve_tiny import TinyServer
from hitproof.replay.server import ServerTarget

pytestmark = pytest.mark.engine

CASE = Counterexample.load(Path(__file__).resolve().parents[2] / "counterexamples" / "CE-0001.json")


@pytest.fixture(scope="module")
def served():
    """CE-0001 at blocks of 32 tokens, under the server's release, and a server with its settings."""
    python = env.make(progress=print)
    trace = under(scaled(CASE.trace, fitting(CASE.trace)), env.release_of(python))
    with TinyServer(trace.config, python) as server:
        yield trace, server


def test_the_cliff_of_the_public_report_over_http(served):
    """CE-0001 happens in a live server: the resent prompt hits nothing at half the pool."""
    trace, server = served
    found = replayed(trace, ServerTarget(server.url), "server", CASE.finding.property_id)
    assert (found.verdict, found.version) == ("as expected", env.NEWEST_CPU)
    assert [(row.expected, row.observed) for row in found.rows] == [("0", "0")] * 3
    assert found.promise.startswith("hit-survives-half-pool VIOLATED")
    assert found.notes == ("not shown by this server, not compared: groups",)


OPS = (
    "submit a S:70 out=3",
    "drain",
    "submit b S:70 @a u:5 out=2",
    "drain",
    "submit c S:96 salt=x out=1",
    "drain",
    "submit d S:97 out=1",
    "drain",
    "reset",
    "submit e S:97 out=1",
    "drain",
    "submit f S:97 out=1",
    "drain",
)


@pytest.mark.parametrize("resettable", [True, False])
def test_hits_over_http_are_the_models(served, monkeypatch, resettable):
    """Hits, outputs in prompts, salts and resets: equal to the model, with a reset or with a salt alone."""
    config, server = served[0].config, served[1]
    target = ServerTarget(server.url)
    if not resettable:
        monkeypatch.setattr(target.client, "reset", lambda: False)
    found = replayed(Trace(config=config, ops=tuple(map(parse_op, OPS))), target, "server")
    assert found.verdict == "as expected"
    assert [row.observed for row in found.rows] == ["0", "64", "0", "64", "0", "96"]


def test_unscaled_case_is_refused_with_both_values(served):
    """The kernels lack blocks of 4 tokens: said by name."""
    found = replayed(CASE.trace, ServerTarget(served[1].url), "server")
    assert found.verdict == "refused"
    assert found.reason.startswith("block_size: the server has 32; the trace asks for 4")


def test_probe_sees_both_sides(served):
    """Two seats of two blocks fit and hit in full; four seats of four blocks collapse to nothing."""
    client = ServerTarget(served[1].url).client
    sides = [Plan(seats=2, tokens=64), Plan(seats=4, tokens=128)]
    found = [probe(client, plan, in_use=True, progress=print) for plan in sides]
    assert [(each.verdict, each.best) for each in found] == [("full", 64), ("collapsed", 128)]


def test_port_in_use_is_refused(served):
    """A second server on the same port is refused before it starts, and the first one still answers."""
    with pytest.raises(BadInput, match="something listens there already; choose another"):
        TinyServer(served[0].config, env.python(), port=served[1].port)
    assert ServerTarget(served[1].url).version == env.NEWEST_CPU
