"""The content check's own arithmetic and words."""

import math

from hitproof.model import RequestResult
from hitproof.replay.content import TOLERANCE, Content, compare

RESULT = RequestResult(id="r2", prompt_tokens=70, hit_tokens=64, finished=True)
COLD = [{7: -1.0, 8: -2.0}, {7: -1.5, 9: -1.25}]


def test_equal_answers_hold_with_their_evidence():
    """Requests and tokens are counted; rounding below the tolerance is none."""
    warm = [{7: -1.0, 8: -2.0}, {7: -1.5, 9: -1.250001}]
    found = compare(Content(), RESULT, warm, COLD)
    assert (found.requests, found.tokens, found.broken("cpu")) == (1, 2, False)
    assert found.text("cpu") == (
        "hit-content HOLDS: 1 requests with hits, 2 output tokens against cold runs, largest difference 1.0e-06 "
        "(tolerance 1e-04)"
    )


def test_other_answer_is_named():
    """Request, hit, output token, and what the greedy token's log-probability was on both sides."""
    warm = [{7: -1.0, 8: -2.0}, {7: -1.5, 9: -1.3}]
    found = compare(Content(requests=3, tokens=5), RESULT, warm, COLD)
    assert found.text("cpu") == (
        "hit-content VIOLATED: request r2 (hit 64), output token 1: log-probability of the greedy token 9: cold "
        "-1.250000, from the cache -1.300000; 4 requests with hits, 7 output tokens against cold runs, largest "
        "difference 5.0e-02 (tolerance 1e-04)"
    )


def test_greedy_token_that_is_not_among_the_likeliest():
    """Whichever side misses it, the answers differ without bound."""
    for warm in ([COLD[0], {7: -1.5, 6: -1.2}], [COLD[0], {5: -0.1, 9: -1.25, 7: -1.5}]):
        found = compare(Content(), RESULT, warm, COLD)
        assert math.isinf(found.largest)
        assert found.broken("cpu")
    assert "from the cache not among the 20 likeliest" in compare(
        Content(), RESULT, [COLD[0], {7: -1.5, 6: -1.2}], COLD
    ).text("cpu")


def test_nothing_compared_is_vacuous():
    """No request with a hit: no verdict in either direction."""
    assert Content().text("cpu") == "hit-content VACUOUS: no finished request had a hit to compare"
    assert set(TOLERANCE) == {"cpu", "cuda"}
