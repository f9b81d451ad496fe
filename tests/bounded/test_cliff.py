"""The law of the cliff: exact on random workloads; its closed form; vLLM's own figures."""

import pytest

from hitproof.fuzz.bounded.cliff import Workload, closed_form, errors, example, full, law, threshold


def test_the_law_is_exact():
    """500 random workloads: unequal block sizes, chunks, intervals, every release."""
    assert set(errors(500, 0)) == {0}


@pytest.mark.parametrize("release", ["0.22.0", "0.23.0", "0.33.0"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_closed_form_is_the_law(release, outputs):
    """Equal block sizes, one prefill step, K sessions of n blocks: the formula in the documents."""
    for retention in (None, 0) if release != "0.22.0" else (None,):
        for n in (2, 5, 9):
            for k in (2, 3, 5):
                config = example(release, retention)
                work = Workload(sessions=k, prefix=32 * n, outputs=outputs)
                said = closed_form(release, retention is None, 6, k, n, 2, outputs)
                assert said == law(config, work).needed


@pytest.mark.parametrize(
    ("release", "retention", "outputs", "tokens"),
    [("0.32.0", None, 2, 640), ("0.32.0", 0, 2, 1280), ("0.22.0", None, 2, 608), ("0.32.0", None, 1, 512)],
)
def test_where_the_example_falls(release, retention, outputs, tokens):
    """400 blocks of 32, 4 sessions: the longest prefix with full hits; one block more loses all."""
    config = example(release, retention)
    assert full(config, Workload(sessions=4, prefix=tokens, outputs=outputs))
    assert not full(config, Workload(sessions=4, prefix=tokens + 32, outputs=outputs))
    assert law(config, Workload(sessions=4, prefix=tokens, outputs=outputs)).needed <= 399
    assert law(config, Workload(sessions=4, prefix=tokens + 32, outputs=outputs)).needed > 399


def test_a_wrong_law_would_be_seen():
    """The least pool is searched on the model, not taken from the law."""
    config = example("0.32.0", 0)
    said, found = threshold(config, Workload(sessions=3, prefix=320, outputs=2))
    assert said == found
    assert not full(example("0.32.0", None), Workload(sessions=4, prefix=1280, outputs=2))
