"""The probe of one's own server: its table and verdict, and what it refuses to send."""

import json
import re

import pytest

from hitproof.cli import main as cli


@pytest.fixture
def hitproof(monkeypatch, capsys):
    """A function that runs a command line and returns (exit code, standard output, standard error)."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["hitproof", *map(str, words)])
        with pytest.raises(SystemExit) as leave:
            cli.main()
        return leave.value.code or 0, *capsys.readouterr()

    return run


def timeless(text):
    """Without the measured times."""
    return re.sub(r" +[0-9]+\.[0-9] ms", " TIME", text)


def test_full(hitproof, fake):
    """A server that keeps everything: the plan, the table, the verdict."""
    fake.labels["kv_cache_size_tokens"] = "400"
    code, out, err = hitproof("probe", "--url", fake.url, "--seats", 2, "--tokens", 50)
    assert (code, err) == (0, "")
    assert timeless(out) == (
        f"To send to {fake.url}: 8 requests, one at a time: 58 prompt tokens each (464 in all), 1 to generate; "
        "2 seats, 3 rounds, after one prompt sent twice alone\n"
        "vLLM 0.32.0, tiny: 100 blocks, block_size 4; combined prefixes 100 tokens, 25 % of the 400 tokens that the "
        "server says it holds\n"
        "Times are medians; hit tokens are the least and the most of a round.\n"
        "                   first token        hit tokens  full hits\n"
        "  alone, first TIME                 0     0 of 1\n"
        "  alone, again TIME                48     1 of 1\n"
        "  round 1 TIME                 0     0 of 2\n"
        "  round 2 TIME                48     2 of 2\n"
        "  round 3 TIME                48     2 of 2\n"
        "FULL: every later round hits what a prompt sent twice in a row hits\n"
    )
    assert len(fake.bodies) == 8
    assert len({body["cache_salt"] for body in fake.bodies}) == 1


def test_collapsed_and_partial(hitproof, fake, monkeypatch):
    """No hits in later rounds, and hits of some seats."""
    complete = fake.complete

    def forgetful(lost):
        def answer(body):
            fake.forgets = len(fake.bodies) % 14 in lost
            return complete(body)

        return answer

    words = ("probe", "--url", fake.url, "--seats", 4, "--tokens", 50, "--in-use")
    monkeypatch.setattr(fake, "complete", forgetful(range(2, 14)))
    code, out, _ = hitproof(*words)
    assert code == 1
    assert out.endswith(
        "COLLAPSED: no request of a later round hits anything, though a prompt sent twice in a row does\n"
    )
    monkeypatch.setattr(fake, "complete", forgetful({2, 6, 10}))
    code, out, _ = hitproof(*words)
    assert code == 1
    assert "  round 2 TIME           0 to 48     3 of 4\n" in timeless(out)
    assert out.endswith("PARTIAL: later rounds hit less than a prompt sent twice in a row\n")


def test_nothing_can_be_said_without_any_hit(hitproof, fake):
    """A prompt shorter than a block never hits: no verdict, exit code 2."""
    code, out, _ = hitproof("probe", "--url", fake.url, "--seats", 2, "--tokens", 3, "--suffix", 1)
    assert code == 2
    assert out.endswith("NO HITS AT ALL: not even a prompt sent twice in a row hits: prefix caching is off, or --tokens is too short\n")  # fmt: skip


def test_server_in_use_is_left_alone(hitproof, fake):
    """A server that has served requests is refused until told, and nothing is sent to it."""
    fake.queries = 1000
    words = ("probe", "--url", fake.url, "--seats", 2, "--tokens", 50)
    code, _, err = hitproof(*words)
    assert code == 2
    assert err == (
        f"hitproof: {fake.url}: this server is in use: 0 requests under way, 1000 prompt tokens looked up so far; a "
        "probe evicts what others have cached. Say --in-use to probe it all the same\n"
    )
    assert fake.bodies == []
    assert hitproof(*words, "--in-use")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seats 200 --tokens 50", "602 requests: the most is 500; lower --seats or --rounds"),
        (
            "--seats 4 --tokens 400000",
            "5600112 prompt tokens in all: more than --most-tokens 4000000; lower --seats, --tokens or --rounds, or raise it",
        ),
        (
            "--seats 4 --tokens 250",
            "--tokens 250: with 8 fresh and 1 generated tokens more than the server's max_model_len 256; lower it",
        ),
    ],
)
def test_too_much_is_refused(hitproof, fake, words, message):
    """The number of requests and of tokens is bounded, and so is the length by the server's."""
    code, _, err = hitproof("probe", "--url", fake.url, *words.split())
    assert (code, err) == (2, f"hitproof: {message}\n")
    assert fake.bodies == []


def test_plan_alone_sends_nothing(hitproof, fake):
    """--plan says what would be sent."""
    code, out, _ = hitproof("probe", "--url", fake.url, "--seats", 2, "--tokens", 50, "--plan")
    assert code == 0
    assert out.startswith(f"To send to {fake.url}: 8 requests")
    assert fake.bodies == []


def test_hidden_hits(hitproof, fake):
    """A server that hides cached tokens gets no verdict."""
    fake.hides = True
    code, _, err = hitproof("probe", "--url", fake.url, "--seats", 2, "--tokens", 50)
    assert code == 2
    assert "the server hides cached tokens; start it with --enable-prompt-tokens-details" in err


def test_for_machines(hitproof, fake):
    """JSON has every hit and time."""
    code, out, _ = hitproof("probe", "--url", fake.url, "--seats", 2, "--tokens", 50, "--json")
    assert code == 0
    data = json.loads(out)
    assert (data["verdict"], data["best"]) == ("full", 48)
    assert [each["hits"] for each in data["rounds"]] == [[0, 0], [48, 48], [48, 48]]
    assert all(time > 0 for each in data["rounds"] for time in each["first_token_s"])
