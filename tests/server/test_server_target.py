"""A trace over HTTP: what is compared, what is refused, and one message for every failure."""

import pytest

from hitproof.model import BadInput, CacheConfig, Group, HarnessFault, Trace, parse_op
from hitproof.replay import server
from hitproof.replay.ladder import replayed
from hitproof.replay.server import ServerTarget
from hitproof.replay.token_ids import tokens_of

CONFIG = CacheConfig(
    num_blocks=100,
    groups=(Group(kind="full", block_size=4),),
    semantics="0.32.0",
    max_model_len=256,
    retention_interval=None,
)
OPS = ("submit a S:10 out=2", "drain", "submit b S:10 @a u:3 out=1", "drain", "submit c S:9 out=1", "drain")


def trace(*ops):
    return Trace(config=CONFIG, ops=tuple(map(parse_op, ops or OPS)))


def test_trace_over_http(fake):
    """Token ids are sent one request at a time and the hits are those of the model, run after run."""
    target = ServerTarget(fake.url)
    found = replayed(trace(), target, "server")
    assert (found.verdict, found.version) == ("as expected", "0.32.0")
    assert [row.observed for row in found.rows] == ["0", "8", "8"]
    tokens = tokens_of(trace())["b"]
    body = fake.bodies[1]
    assert body["prompt"] == list(tokens.prompt)
    assert body["allowed_token_ids"] == [tokens.output_token]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (1, 0, True)
    assert "cache_salt" not in body
    assert found.notes == (
        "not shown by this server, not compared: groups, max_num_batched_tokens, max_num_seqs, asynchronous scheduling",
    )


def test_salt_isolates_where_the_cache_cannot_be_reset(fake):
    """Each run has a salt of its own beside the trace's, and the second run is not the first's."""
    fake.resettable = False
    ops = ("submit a S:10 salt=x out=1", "drain", "submit b S:10 salt=x", "drain", "submit c S:10", "drain")
    found = replayed(trace(*ops), ServerTarget(fake.url), "server")
    assert [row.observed for row in found.rows] == ["0", "8", "0"]
    assert found.verdict == "as expected"
    salts = [body["cache_salt"] for body in fake.bodies]
    assert salts[0] == salts[1] == f"{salts[2]}-x"
    assert salts[5] != salts[2]
    assert found.notes[1] == "no /reset_prefix_cache here: a salt keeps the run apart"


@pytest.mark.parametrize("resettable", [True, False])
def test_reset_in_a_trace(fake, resettable):
    """A reset empties the cache, or changes the salt."""
    fake.resettable = resettable
    ops = ("submit a S:10", "drain", "reset", "submit b S:10", "drain", "submit c S:10", "drain")
    found = replayed(trace(*ops), ServerTarget(fake.url), "server")
    assert (found.verdict, [row.observed for row in found.rows]) == ("as expected", ["0", "0", "8"])


def test_server_that_hits_less_differs(fake):
    """A server that loses its cache is a finding, with the request named."""
    fake.forgets = True
    found = replayed(trace(), ServerTarget(fake.url), "server")
    assert found.headline == "server 0.32.0: differs at request b"
    assert found.reason == "request 1 of 3, b (ops[2]): expected hit 8, observed 0"


def test_late_counters_are_waited_for(fake):
    """Counters that lag behind the answer are read again until they show the request."""
    fake.late = 5
    assert ServerTarget(fake.url).run(trace()).hits == (0, 8, 8)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_size", "16", "block_size: the server has 16; the trace asks for 4; start a server with"),
        ("num_gpu_blocks", "21", "num_gpu_blocks: the server has 21; the trace asks for 100; start"),
        (
            "enable_prefix_caching",
            "False",
            "enable_prefix_caching: the server has False; the trace asks for True",
        ),
        (
            "prefix_cache_retention_interval",
            "0",
            "interval: the server has 0; the trace asks for None; start",
        ),
    ],
)
def test_other_cache_config_is_refused_with_both_values(fake, name, value, message):
    """What /metrics says of the cache is compared with the trace."""
    fake.labels[name] = value
    found = replayed(trace(), ServerTarget(fake.url), "server")
    assert found.verdict == "refused"
    assert message in found.reason
    assert fake.bodies == []


def test_other_model_length_is_refused(fake):
    """So is what /v1/models says."""
    fake.max_model_len = 128
    with pytest.raises(BadInput, match="max_model_len: the server has 128; the trace asks for 256"):
        ServerTarget(fake.url).run(trace())


def test_scheduling_is_compared_where_it_is_shown(fake):
    """A server in development mode shows its step budget and asynchronous scheduling."""
    fake.scheduler = {"max_num_batched_tokens": 2048, "max_num_seqs": 8, "async_scheduling": True}
    with pytest.raises(BadInput, match="async_scheduling: the server has True; the trace asks for False"):
        ServerTarget(fake.url).run(trace())
    fake.scheduler["async_scheduling"] = False
    target = ServerTarget(fake.url)
    assert target.run(trace()).hits == (0, 8, 8)
    assert target.notes == ("not shown by this server, not compared: groups",)


def test_retention_that_is_not_shown(fake):
    """Before 0.29 retention is an environment variable of the server: said, not guessed."""
    del fake.labels["prefix_cache_retention_interval"]
    target = ServerTarget(fake.url)
    target.run(trace())
    assert "groups, retention interval, max_num" in target.notes[0]


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        ({"fail": {"/v1/completions": "hang"}}, HarnessFault, "no answer to POST /v1/completions within 1 s"),
        ({"fail": {"/v1/completions": "die"}}, HarnessFault, "the server went away during POST /v1/completions: "),
        (
            {"fail": {"/v1/completions": 503}},
            HarnessFault,
            r"POST /v1/completions failed with 503: '.*it went wrong",
        ),
        ({"fail": {"/v1/completions": "?"}}, HarnessFault, r"the answer to POST /v1/completions is not JSON: b'\?'"),
        ({"fail": {"/v1/completions": "[]"}}, HarnessFault, "the answer to POST /v1/completions is not an object"),
        ({"fail": {"/v1/completions": "{}"}}, HarnessFault, "the answer to POST /v1/completions has no usage"),
        ({"fail": {"/v1/completions": 400}}, BadInput, "POST /v1/completions is refused with 400: '.*it went wrong"),
        ({"fail": {"/metrics": 401}}, BadInput, "refused with 401; set HITPROOF_API_KEY to the server's key"),
        ({"fail": {"/metrics": "x 1"}}, BadInput, "/metrics has no vllm:cache_config_info, so block size"),
        ({"fail": {"/reset_prefix_cache": 500}}, HarnessFault, "POST /reset_prefix_cache failed with 500"),
        ({"fail": {"/reset_prefix_cache": '{"success": false}'}}, HarnessFault, "cannot be emptied: blocks are in use"),
        ({"engines": 2}, BadInput, r"2 engines \(data parallel\): which one answers cannot be chosen"),
        ({"hides": True}, BadInput, "b: the counters show a hit of 8 tokens and the answer hides it; start the "
         "server with --enable-prompt-tokens-details"),
        ({"running": 3}, BadInput, "the server has 3 requests under way; a replay needs it alone"),
        ({"stranger": 7}, HarnessFault, "a: 17 tokens were looked up, 10 of them by this request: somebody else uses"),
        ({"miscounts": 4}, HarnessFault, "a: the answer says 0 cached tokens, the counters 4"),
        ({"late": 10_000}, HarnessFault, "0 s after the answer, vllm:prefix_cache_queries_total grew by 0 tokens, not 10"),
    ],
)  # fmt: skip
def test_failure_is_one_message_and_no_verdict(fake, monkeypatch, edit, error, message):
    """Whatever a server does wrong is said once and is neither verdict."""
    monkeypatch.setattr(server, "LATE_S", 0)
    target = ServerTarget(fake.url, timeout_s=1)
    for name, value in edit.items():
        setattr(fake, name, value)
    if edit in ({"hides": True},):
        monkeypatch.setattr(server, "LATE_S", 10)
    with pytest.raises(error, match=message):
        target.run(trace())
    assert replayed(trace(), target, "server").verdict == (
        "refused" if error is BadInput else "harness fault"
    )


def test_hidden_zero_is_taken_from_the_counters(fake):
    """Without any hit, counters alone say so: there is nothing that the answer could hide."""
    fake.hides = True
    assert ServerTarget(fake.url).run(trace("submit a S:10", "drain")).hits == (0,)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (("submit a S:10", "step", "drain"), r"ops\[0\]: a is not drained at once: over HTTP"),
        (("submit a S:10", "submit b S:9", "drain"), r"ops\[0\]: a is not drained at once"),
        (("submit a S:10", "drain", "step 3"), r"ops\[2\]: step 3: steps and aborts cannot be timed"),
        (("submit a S:10", "drain", "abort a"), r"ops\[2\]: abort a: steps and aborts cannot be timed"),
        (("submit a S:10 lora=l", "drain"), r"ops\[0\]: a: adapters are not served; remove lora"),
    ],
)
def test_what_http_cannot_do_is_refused_by_name(fake, ops, message):
    """Nothing is sent for a trace that could not be timed."""
    with pytest.raises(BadInput, match=message):
        ServerTarget(fake.url).run(trace(*ops))
    assert fake.bodies == []


def test_other_release_follows_its_own_rules(fake):
    """The model that a server is compared with has the rules of the server's release."""
    fake.version = "0.28.0+cpu"
    assert replayed(trace(), ServerTarget(fake.url), "server").headline == "server 0.28.0: as expected"
    fake.version = "0.99.0"
    assert replayed(trace(), ServerTarget(fake.url), "server").verdict == "refused"


def test_key_is_sent(fake, monkeypatch):
    """A server's key comes from the environment and from nowhere else."""
    from hitproof.replay.server_client import Client

    monkeypatch.setenv("HITPROOF_API_KEY", "secret")
    seen = []
    client = Client(fake.url)
    monkeypatch.setattr(
        client._opener,
        "open",
        lambda request, timeout: seen.append(request) or (_ for _ in ()).throw(OSError("x")),
    )
    with pytest.raises(BadInput, match="no server answers: x"):
        client.version()
    assert seen[0].get_header("Authorization") == "Bearer secret"
