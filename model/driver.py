"""``Driver``: turns the ops of a trace into steps and calls, whoever schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from hitproof.model.errors import ManagerFault
from hitproof.model.observation import UNSEEN, Call, Observation, RequestResult, Run
from hitproof.model.ops import Abort, Drain, Op, Reset, Step, Submit
from hitproof.model.request import Request
from hitproof.model.trace import Trace, resolve

if TYPE_CHECKING:
    from hitproof.model.manager import Manager


class Driver(ABC):
    """Runs one trace on one manager. ``record``: keep an observation of every call.

    What a step does, and who waits or runs after it, is a subclass's to say. ``running``: requests
    that hold blocks; ``waiting``: the other unfinished ones.
    """

    def __init__(self, trace: Trace, manager: Manager, *, record: bool = True) -> None:
        self.trace = trace
        self.manager = manager
        self.record = record
        self.observations: list[Observation] = []
        self.results: dict[str, RequestResult] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.stuck: int | None = None
        self.op = 0
        self._outputs: dict[str, int] = {}

    def run(self, target: str = "model", version: str = "") -> Run:
        """Do all ops, or all up to the first that the manager fails on."""
        fault = ""
        try:
            for i, op in enumerate(self.trace.ops):
                self.op = i
                self._do(op)
        except ManagerFault as error:
            fault = str(error)
        return Run(
            trace=self.trace,
            target=target,
            version=version or self.trace.config.semantics,
            requests=tuple(self.results.values()),
            observations=tuple(self.observations),
            stuck=self.stuck,
            fault=fault,
        )

    def _do(self, op: Op) -> None:
        match op:
            case Submit():
                self.submit(op)
            case Step(count=count):
                for _ in range(count):
                    self.step()
            case Drain():
                self.drain()
            case Abort(request=name):
                self.abort(name)
            case Reset():
                self.reset()

    def submit(self, op: Submit) -> None:
        """A request arrives."""
        tokens = resolve(op, self._outputs)
        self._outputs[op.request] = op.output_tokens
        request = Request(
            id=op.request,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            output_tokens=op.output_tokens,
            identity=op.identity,
        )
        self.results[op.request] = RequestResult(id=op.request, prompt_tokens=len(tokens))
        keys = self.manager.add(request)
        self.note("add", request, keys=keys)
        self.enqueue(request)

    def drain(self) -> None:
        """Step until idle. Stuck: more steps without a new furthest token than recomputing all
        unfinished requests one after another can take.
        """
        idle_steps = 0
        while alive := [*self.running, *self.waiting]:
            patience = 2 + sum(2 + r.num_tokens // self.trace.config.max_num_batched_tokens for r in alive)
            moved = self.step()
            idle_steps = 0 if moved else idle_steps + 1
            if idle_steps > patience or (idle_steps and not self.running):
                self.stuck = self.op
                return

    @abstractmethod
    def enqueue(self, request: Request) -> None:
        """The request, known to the manager, waits from now on."""

    @abstractmethod
    def step(self) -> bool:
        """One step; True if some request got further than ever before."""

    @abstractmethod
    def abort(self, name: str) -> None:
        """Cancel a request, if it is not finished."""

    @abstractmethod
    def reset(self) -> None:
        """Empty the prefix cache."""

    def note(self, call: Call, request: Request | None = None, *, fault: str = "", **shown: Any) -> None:
        """Keep an ``Observation`` of ``call`` with the events and the state after it."""
        if not self.record:
            return
        self.observations.append(
            Observation(
                op=self.op,
                call=call,
                request=request.id if request is not None else None,
                fault=fault,
                events=self.manager.take_events(),
                snapshot=UNSEEN if fault else self.manager.snapshot(),
                **shown,
            )
        )
