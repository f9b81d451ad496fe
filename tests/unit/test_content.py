"""The content check's own arithmetic and words."""

import math

from hitproof.model import RequestResult
from hitproof.replay.content import TOLERANCE, Answer, Content, compare

RESULT = RequestResult(id="r2", prompt_tokens=70, hit_tokens=64, finished=True)
COLD = [{7: -1.0, 8: -2.0}, {7: -1.5, 9: -1.25}]


def test_equal_answers_hold_with_their_evidence():
    """Requests and tokens are counted; rounding below the tolerance is none."""
    warm = [{7: -1.0, 8: -2.0}, {7: -1.5, 9: -1.250001}]
    found = Content(answers=(compare(RESULT, warm, COLD),))
    assert (found.requests, found.tokens, found.first("cpu")) == (1, 2, None)
    assert found.text("cpu") == (
        "hit-content HOLDS: 1 requests with hits, 2 output tokens against cold runs, largest difference 1.0e-06 "
        "(tolerance 1e-04)"
    )


def test_other_answer_is_named():
    """Request, hit, output token, and what the greedy token's log-probability was on both sides."""
    warm = [{7: -1.0, 8: -2.0}, {7: -1.5, 9: -1.3}]
    before = tuple(Answer(request=f"q{i}", tokens=5, largest=0.0) for i in range(3))
    worse = Answer(request="r3", tokens=1, largest=2.0, where="request r3")
    found = Content(answers=(*before, compare(RESULT, warm, COLD), worse))
    assert found.first("cpu").request == "r2"
    assert found.text("cpu") == (
        "hit-content VIOLATED: request r2 (hit 64), output token 1: log-probability of the greedy token 9: cold "
        "-1.250000, from the cache -1.300000; 5 requests with hits, 18 output tokens against cold runs, largest "
        "difference 2.0e+00 (tolerance 1e-04)"
    )


def test_greedy_token_that_is_not_among_the_likeliest():
    """Whichever side misses it, the answers differ without bound."""
    for warm in ([COLD[0], {7: -1.5, 6: -1.2}], [COLD[0], {5: -0.1, 9: -1.25, 7: -1.5}]):
        assert math.isinf(compare(RESULT, warm, COLD).largest)
    said = compare(RESULT, [COLD[0], {7: -1.5, 6: -1.2}], COLD)
    assert "from the cache not among the 20 likeliest" in said.where


def test_nothing_compared_is_vacuous():
    """No request with a hit: no verdict in either direction."""
    assert Content().text("cpu") == "hit-content VACUOUS: no finished request had a hit to compare"
    assert set(TOLERANCE) == {"cpu", "cuda"}
