"""``Lockstep``: the model's manager and vLLM's side by side, compared after every call."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import attrs

from hitproof.model import Event, ManagerFault, ModelManager, Observation, Run, Scheduler, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hitproof.model import Lookup, Manager, Request, Trace
    from hitproof.model.observation import Tables


@attrs.frozen(kw_only=True, slots=True)
class Divergence:
    """The first difference: at which call (counted from 0) of which op, and both values as text.

    ``field`` is "result", "fault", "events" or a field of ``Snapshot``.
    """

    call_index: int
    op: int
    call: str
    field: str
    model: str
    real: str

    def __str__(self) -> str:
        return (
            f"call {self.call_index} ({self.call}, op {self.op}): {self.field} differs\n"
            f"  model: {self.model}\n  vLLM:  {self.real}"
        )


@attrs.frozen(kw_only=True, slots=True)
class Conformance:
    """One trace compared: how many manager calls agreed, and the first that did not."""

    calls: int
    divergence: Divergence | None


class _Diverged(Exception):
    def __init__(self, field: str, model: object, real: object) -> None:
        super().__init__(field)
        self.field, self.model, self.real = field, model, real


def canonical(events: Sequence[Event]) -> list[Event]:
    """``events`` with each run of removals in one group sorted.

    vLLM keeps the further keys of a block in a set, so when such a block is evicted the order of its
    removals is unspecified. Removals of neighbouring blocks are indistinguishable from them in the
    events alone; their order is still compared, in ``Snapshot.free_queue``.
    """
    found: list[Event] = []
    for (kind, _), group in groupby(events, key=lambda event: (event.kind, event.group)):
        run = list(group)
        found += sorted(run, key=lambda event: event.keys) if kind == "removed" else run
    return found


class Lockstep:
    """A ``Manager`` that forwards every call to both and compares results, faults, events, state."""

    def __init__(self, model: Manager, real: Manager) -> None:
        self._model = model
        self._real = real
        self.calls = 0
        self.call = ""

    def _both(self, call: str, function: Callable[[Manager], Any]) -> Any:
        self.call = call
        model, real = _attempt(function, self._model), _attempt(function, self._real)
        _same("fault", model.fault and model.fault.kind, real.fault and real.fault.kind)
        if model.fault is not None:
            raise model.fault
        _same("result", model.result, real.result)
        _same("events", canonical(model.events), canonical(real.events))
        if model.state != real.state:
            for field in attrs.fields(Snapshot):
                _same(field.name, getattr(model.state, field.name), getattr(real.state, field.name))
        self.calls += 1
        return model.result

    def add(self, request: Request) -> tuple[int, ...]:
        """See ``Manager``."""
        keys: tuple[int, ...] = self._both("add", lambda manager: manager.add(request))
        return keys

    def append(self, request: Request) -> tuple[int, ...]:
        """See ``Manager``."""
        keys: tuple[int, ...] = self._both("append", lambda manager: manager.append(request))
        return keys

    def step(self) -> None:
        """See ``Manager``."""
        self._both("step", lambda manager: manager.step())

    def lookup(self, request: Request) -> Lookup:
        """See ``Manager``."""
        found: Lookup = self._both("lookup", lambda manager: manager.lookup(request))
        return found

    def allocate(
        self, request: Request, new_tokens: int, hit: Lookup | None, *, must_fit: bool, beside: bool
    ) -> Tables | None:
        """See ``Manager``."""
        blocks: Tables | None = self._both(
            "allocate",
            lambda manager: manager.allocate(request, new_tokens, hit, must_fit=must_fit, beside=beside),
        )
        return blocks

    def free(self, request: Request) -> None:
        """See ``Manager``."""
        self._both("free", lambda manager: manager.free(request))

    def reset(self) -> bool:
        """See ``Manager``."""
        done: bool = self._both("reset", lambda manager: manager.reset())
        return done

    def take_events(self) -> tuple[Event, ...]:
        """None are left: every call compares and drops them."""
        return ()

    def snapshot(self) -> Snapshot:
        """The state, which is the same in both."""
        return self._model.snapshot()


def conform(trace: Trace, real: Manager) -> Conformance:
    """Run ``trace`` on the model and on ``real``, both with an empty cache, up to a difference."""
    lockstep = Lockstep(ModelManager(trace.config), real)
    scheduler = Scheduler(trace, lockstep, record=False)
    try:
        scheduler.run()
    except _Diverged as found:
        return Conformance(
            calls=lockstep.calls,
            divergence=Divergence(
                call_index=lockstep.calls,
                op=scheduler.op,
                call=lockstep.call,
                field=found.field,
                model=repr(found.model),
                real=repr(found.real),
            ),
        )
    return Conformance(calls=lockstep.calls, divergence=None)


def compare(model: Run, real: Run) -> Conformance:
    """Compare two runs of one trace, made apart, observation by observation and then as wholes.

    In 0.19.0 to 0.20.2 the scheduler asks the admission gate before it tells the manager how many
    tokens it would compute: where the gate refuses, ``new_tokens`` of the real side is 0, unseen.
    """
    for i, (ours, theirs) in enumerate(zip(model.observations, real.observations, strict=False)):
        refused = theirs.call == "allocate" and theirs.must_fit and not theirs.ok
        for field in attrs.fields(Observation):
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            if field.name == "events":
                left, right = canonical(left), canonical(right)
            if left != right and not (field.name == "new_tokens" and refused and right == 0):
                return _differs(i, ours, field.name, left, right)
    calls = min(len(model.observations), len(real.observations))
    last = model.observations[calls - 1] if calls else Observation(op=0, call="step")
    following = [run.observations[calls : calls + 1] for run in (model, real)]
    if following[0] != following[1]:
        return _differs(calls, last, "next call", *following)
    for name in ("requests", "stuck"):
        if getattr(model, name) != getattr(real, name):
            return _differs(calls, last, name, getattr(model, name), getattr(real, name))
    return Conformance(calls=calls, divergence=None)


def _differs(at: int, seen: Observation, field: str, model: object, real: object) -> Conformance:
    divergence = Divergence(
        call_index=at, op=seen.op, call=seen.call, field=field, model=repr(model), real=repr(real)
    )
    return Conformance(calls=at, divergence=divergence)


@attrs.frozen(kw_only=True, slots=True)
class _Outcome:
    """What one call did to one manager; without a fault the events and the state after it."""

    result: Any = None
    events: tuple[Event, ...] = ()
    state: Snapshot | None = None
    fault: ManagerFault | None = None


def _attempt(function: Callable[[Manager], Any], manager: Manager) -> _Outcome:
    try:
        result = function(manager)
        return _Outcome(result=result, events=manager.take_events(), state=manager.snapshot())
    except ManagerFault as fault:
        return _Outcome(fault=fault)


def _same(field: str, model: object, real: object) -> None:
    if model != real:
        raise _Diverged(field, model, real)
