"""Random concrete runs are models of the run-level encoding: hits, short hits and both promises."""

import random

import pytest

from hitproof.fuzz.bounded.odometer import (
    BLOCK,
    MOST_CHUNKS,
    MOST_WINDOWS,
    Setting,
    Sizes,
    Visit,
    broken,
    decode,
    premise,
    visits,
)
from hitproof.fuzz.bounded.terms import STATED, both
from hitproof.model import ModelTarget, Semantics, cdiv
from hitproof.properties.registry import property_of
from hitproof.properties.story import Story

PROMISES = ("hit-survives-half-pool", "hit-survives-fit")


def drawn(rng):
    """A random setting with sizes and visits in the class."""
    while True:
        release = rng.choice(STATED)
        retention = rng.choice((None, 0)) if Semantics.of(release).retention else None
        setting = Setting(release=release, retention=retention, chunked=rng.random() < 0.5)
        count, chunk = rng.randint(1, 4), rng.randint(1, 6)
        n = [rng.randint(1, 8) for _ in range(count)]
        steps = [cdiv(x + 1, chunk) for x in n]
        if setting.chunked and max(steps) > MOST_CHUNKS:
            continue
        sizes = Sizes(
            pool=rng.choice((rng.randint(4, 30), rng.randint(20, 90))),
            windows=rng.choice((1, 1, 2, 3, MOST_WINDOWS)),
            m=rng.randint(1, 4),
            chunk=chunk,
            n=n,
            steps=steps,
        )
        made = [(rng.randrange(count), rng.random() < 0.4) for _ in range(rng.randint(2, 10))]
        order = [Visit(by=[v == s for s in range(count)], single=single) for v, single in made]
        seen = visits(setting, sizes, order)
        # Up to the first visit that does not fit the pool, and up to the first short one.
        ends = [i for i, x in enumerate(seen) if not x.fits] + [i + 1 for i, x in enumerate(seen) if x.short]
        end = min(ends, default=len(seen))
        if end:
            return setting, sizes, made[:end], order[:end], seen[:end]


@pytest.mark.parametrize("seed", range(2))
def test_random_runs_are_models_of_the_encoding(seed):
    """1,000 runs each: every hit, whether anything of it is left, and both promises."""
    rng = random.Random(seed)
    returns = shorts = partial = found = 0
    for _ in range(1000):
        setting, sizes, made, order, seen = drawn(rng)
        assert sizes.sane(setting) is True
        story = Story(ModelTarget().run(decode(setting, sizes, made)))
        for x, (s, _), hit in zip(seen, made, story.run.hits, strict=True):
            whole = sizes.n[s] * BLOCK if x.returns else 0
            assert (hit < whole) == x.short
            assert x.short or hit == whole
            assert not x.short or (hit == 0) == x.nothing
            returns, shorts, partial = returns + x.returns, shorts + x.short, partial + (0 < hit < whole)
        for promise in PROMISES:
            finding = property_of(promise).check(story).finding
            said = both(premise(promise, sizes, order, seen), broken(promise, seen))
            assert (finding is not None) == said
            found += said
    assert returns > 2000
    assert shorts > 100
    assert partial > 0
    assert found > 5
