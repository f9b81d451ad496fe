"""What is drawn lies in the range that a bound names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitproof.fuzz.draw import Range, configs
from hitproof.fuzz.random_traces import random_trace
from hitproof.fuzz.search import random_trace_in


@pytest.mark.parametrize(("word", "interval"), [("7", 7), ("32", 32), ("dense", None), ("0", 0)])
def test_every_config_has_the_retention_of_its_range(word, interval):
    """Also where the first draw was refused and its plain neighbour was taken."""

    @settings(max_examples=60, database=None)
    @given(configs(Range(semantics="0.32.0", retention=word)))
    def drawn(config):
        assert config.retention == interval

    drawn()


@settings(max_examples=60, database=None)
@given(st.integers(0, 10_000))
def test_random_traces_keep_to_the_range(seed):
    """Retention as named, no EAGLE where there is none; a refused config, or a window of one token, is no trace."""
    trace = random_trace_in(Range(semantics="0.32.0", retention="0", eagle=False), seed)
    wide = random_trace(seed, "0.32.0")
    assert (trace is None) is any(group.window == 1 for group in wide.config.groups)
    assert trace is None or (trace.config.retention, trace.config.use_eagle) == (0, False)
    odd = random_trace_in(Range(semantics="0.32.0", retention="7919"), seed)
    assert odd is None or odd.config.retention == 7919
