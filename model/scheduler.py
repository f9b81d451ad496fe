"""``Scheduler``: first come, first served, turning ops into manager calls.

Read beside ``vllm/v1/core/sched/scheduler.py``: ``schedule``, ``update_from_output``,
``finish_requests``. One step is one forward pass with its output processed before the next step
starts. The same scheduler drives the model's manager and vLLM's, so both see the same calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hitproof.model.driver import Driver
from hitproof.model.errors import ManagerFault
from hitproof.model.observation import Lookup
from hitproof.model.request import Request

if TYPE_CHECKING:
    from hitproof.model.observation import Tables


class Scheduler(Driver):
    """The modelled scheduler: first come, first served, with a token budget and preemption."""

    def enqueue(self, request: Request) -> None:
        """See ``Driver``."""
        self.waiting.append(request)

    def abort(self, name: str) -> None:
        """See ``Driver``."""
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.id == name:
                    queue.remove(request)
                    self.results[name].aborted = True
                    self._free(request)
                    return

    def reset(self) -> None:
        """See ``Driver``."""
        ok = self.manager.reset()
        self.note("reset", ok=ok)

    def step(self) -> bool:
        """See ``Driver``."""
        self.manager.step()
        self.note("step")
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
            self.waiting.pop(0)
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
                self.note("append", request, keys=keys)
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
        self.waiting.insert(0, request)

    def _lookup(self, request: Request) -> Lookup:
        hit = self.manager.lookup(request)
        if self.record:
            again = self.manager.lookup(request)
            self.note("lookup", request, hit=hit, again=again)
        return hit

    def _allocate(self, request: Request, new: int, hit: Lookup | None = None) -> Tables | None:
        waiting, config = hit is not None, self.trace.config
        beside = bool(self.running) if waiting else True
        must_fit = waiting and config.scheduler_reserve_full_isl and config.rules.admission_gate
        blocks, fault = None, ""
        try:
            blocks = self.manager.allocate(request, new, hit, must_fit=must_fit, beside=beside)
        except ManagerFault as error:
            fault = error.kind
            raise
        finally:
            self.note(
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
        self.note("free", request)
