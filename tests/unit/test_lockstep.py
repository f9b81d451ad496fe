"""Lockstep: the first difference between two managers, whatever it is."""

import attrs
import pytest

from hitproof.model import CacheConfig, Event, Group, Lookup, ManagerFault, ModelManager, Trace, parse_op
from hitproof.replay.lockstep import Lockstep, canonical, conform

TRACE = Trace(
    config=CacheConfig(num_blocks=20, groups=(Group(kind="full", block_size=4),)),
    ops=tuple(map(parse_op, ("submit a S:16 out=2", "drain", "submit b S:12 out=1", "drain", "reset"))),
)


class Bent(ModelManager):
    """The model's manager with one method replaced."""

    def __init__(self, method, function):
        super().__init__(TRACE.config)
        original = getattr(self, method)
        setattr(self, method, lambda *args, **kwargs: function(original, *args, **kwargs))


def fail(kind):
    def function(original, *args, **kwargs):
        raise ManagerFault(kind)

    return function


def nothing(*_):
    return None


def miss(original, request):
    return Lookup(hit_tokens=0, blocks=((),))


def rotate(original):
    state = original()
    return attrs.evolve(state, free_queue=state.free_queue[1:] + state.free_queue[:1])


@pytest.mark.parametrize(
    ("method", "function", "op", "call", "field"),
    [
        ("lookup", miss, 3, "lookup", "result"),
        ("allocate", fail("pool exhausted"), 1, "allocate", "fault"),
        ("free", nothing, 1, "free", "ref_count"),
        ("reset", nothing, 4, "reset", "result"),
        (
            "append",
            lambda original, request: (*original(request), *[99] * request.generated),
            1,
            "append",
            "result",
        ),
        ("take_events", lambda original: original()[1:], 1, "allocate", "events"),
        ("snapshot", rotate, 0, "add", "free_queue"),
    ],
)
def test_first_difference_is_named(method, function, op, call, field):
    """The op, the call and the field where a bent manager first differs from the model."""
    found = conform(TRACE, Bent(method, function)).divergence
    assert (found.op, found.call, found.field) == (op, call, field)
    assert found.model != found.real


def test_equal_managers_do_not_diverge():
    """Two managers of one kind agree on every call, and the calls are counted."""
    found = conform(TRACE, ModelManager(TRACE.config))
    assert found.divergence is None
    assert found.calls == 16


def test_equal_faults_agree():
    """Both failing the same way is an observation that ends the run; failing differently is found."""
    both = Lockstep(Bent("reset", fail("assertion")), Bent("reset", fail("assertion")))
    with pytest.raises(ManagerFault, match="assertion"):
        both.reset()
    assert conform(TRACE, Bent("reset", fail("assertion"))).divergence.model == "None"


def test_only_removals_in_a_row_are_put_in_order():
    """The order of removals in one group is unspecified, that of everything else is not."""
    one, two = Event(kind="removed", group=0, keys=(1,)), Event(kind="removed", group=0, keys=(2,))
    other, stored = Event(kind="removed", group=1, keys=(0,)), Event(kind="stored", group=0, keys=(3,))
    assert canonical([two, one]) == canonical([one, two])
    assert canonical([two, stored, one]) == [two, stored, one]
    assert canonical([two, other, one]) == [two, other, one]
