"""``Scheduler``: first come, first served, turning ops into manager calls.

Read beside ``vllm/v1/core/sched/scheduler.py``: ``schedule``, ``update_from_output``,
``finish_requests``. One step is one forward pass with its output processed before the next step
starts. The same scheduler drives the model's manager and vLLM's, so both see the same calls.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hitproof.model.errors import ManagerFault
from hitproof.model.observation import UNSEEN, Call, Lookup, Observation, RequestResult, Run
from hitproof.model.ops import Abort, Drain, Op, Reset, Step, Submit
from hitproof.model.request import Request
from hitproof.model.trace import Trace, resolve

if TYPE_CHECKING:
    from hitproof.model.manager import Manager
    from hitproof.model.observation import Tables


class Scheduler:
    """Runs one trace on one manager. ``record``: keep an observation of every call."""

    def __init__(self, trace: Trace, manager: Manager, *, record: bool = True) -> None:
        self.trace = trace
        self.manager = manager
        self.record = record
        self.observations: list[Observation] = []
        self.results: dict[str, RequestResult] = {}
        self.waiting: deque[Request] = deque()
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
                self._submit(op)
            case Step(count=count):
                for _ in range(count):
                    self._step()
            case Drain():
                self._drain()
            case Abort(request=name):
                self._abort(name)
            case Reset():
                self._reset()

    def _submit(self, op: Submit) -> None:
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
        self.waiting.append(request)
        self._note("add", request, keys=keys)

    def _drain(self) -> None:
        """Step until idle. Stuck: more steps without a new furthest token than recomputing all
        unfinished requests one after another can take.
        """
        idle_steps = 0
        while self.running or self.waiting:
            alive = [*self.running, *self.waiting]
            patience = 2 + sum(2 + r.num_tokens // self.trace.config.max_num_batched_tokens for r in alive)
            moved = self._step()
            idle_steps = 0 if moved else idle_steps + 1
            if idle_steps > patience or (idle_steps and not self.running):
                self.stuck = self.op
                return

    def _abort(self, name: str) -> None:
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.id == name:
                    queue.remove(request)
                    self.results[name].aborted = True
                    self._free(request)
                    return

    def _reset(self) -> None:
        ok = self.manager.reset()
        self._note("reset", ok=ok)

    def _step(self) -> bool:
        """One step; True if some request got further than ever before."""
        self.manager.step()
        self._note("step")
        budget = self.trace.config.max_num_batched_tokens
        scheduled: list[tuple[Request, int]] = []
        preempted = False
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            new = min(request.num_tokens - request.computed, budget)
            new = min(new, self.trace.config.max_model_len - request.computed - 1)
            if new == 0:
                i += 1
                continue
            while (blocks := self._allocate(request, new)) is None:
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if blocks is None:
                break
            scheduled.append((request, new))
            budget -= new
            i += 1
        if not preempted:
            self._admit(budget, scheduled)
        for request, new in scheduled:
            request.computed += new
        return self._update(scheduled)

    def _admit(self, budget: int, scheduled: list[tuple[Request, int]]) -> None:
        config = self.trace.config
        while self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting[0]
            hit = self._lookup(request)
            request.junction = hit.junction
            new = min(request.num_tokens - hit.hit_tokens, budget)
            if self._allocate(request, new, hit) is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            result = self.results[request.id]
            if result.hit_tokens is None:
                result.hit_tokens = hit.hit_tokens
            request.running = True
            request.computed = hit.hit_tokens
            scheduled.append((request, new))
            budget -= new

    def _update(self, scheduled: list[tuple[Request, int]]) -> bool:
        """The forward pass is done: a request with no more tokens to compute gets its next one."""
        moved = False
        for request, _ in scheduled:
            if request.computed > request.furthest:
                request.furthest = request.computed
                moved = True
            if request.computed < request.num_tokens:
                continue
            at = request.generated
            request.tokens.append((f"@{request.id}", at, at + 1))
            keys = self.manager.append(request)
            if keys:
                self._note("append", request, keys=keys)
            if (
                request.generated >= request.output_tokens
                or request.num_tokens >= self.trace.config.max_model_len
            ):
                self.running.remove(request)
                self.results[request.id].finished = True
                self._free(request)
        return moved

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.computed = 0
        request.running = False
        self.results[request.id].preemptions += 1
        self.waiting.appendleft(request)

    def _lookup(self, request: Request) -> Lookup:
        hit = self.manager.lookup(request)
        if self.record:
            again = self.manager.lookup(request)
            self._note("lookup", request, hit=hit, again=again)
        return hit

    def _allocate(self, request: Request, new: int, hit: Lookup | None = None) -> Tables | None:
        waiting = hit is not None
        beside = bool(self.running) if waiting else True
        must_fit = waiting and self.trace.config.scheduler_reserve_full_isl
        blocks, fault = None, ""
        try:
            blocks = self.manager.allocate(request, new, hit, must_fit=must_fit, beside=beside)
        except ManagerFault as error:
            fault = error.kind
            raise
        finally:
            self._note(
                "allocate",
                request,
                computed=hit.hit_tokens if hit is not None else request.computed,
                new_tokens=new,
                must_fit=must_fit,
                beside=beside,
                hit=hit,
                blocks=blocks,
                ok=blocks is not None,
                fault=fault,
            )
        return blocks

    def _free(self, request: Request) -> None:
        self.manager.free(request)
        self._note("free", request)

    def _note(self, call: Call, request: Request | None = None, *, fault: str = "", **shown: Any) -> None:
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
