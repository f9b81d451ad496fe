"""``RealScheduler``: vLLM's own ``Scheduler`` running the ops of a trace, with made-up model output.

Runs only in a worker process. The scheduler and the ``KVCacheManager`` inside it are vLLM's; between
them stands a ``_Recorder`` that notes each call as ``model.Scheduler`` notes its own, so that a run
of one can be compared with a run of the other, observation by observation.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from hitproof.model import Lookup, ManagerFault, Request, Trace
from hitproof.model.driver import Driver
from hitproof.replay.adapter import LoadedVllm, build_scheduler, model_output
from hitproof.replay.real_manager import RealManager, lookup_of, tables_of

if TYPE_CHECKING:
    from collections.abc import Callable


class RealScheduler(Driver):
    """Runs one trace on one new ``Scheduler``. ``record``: keep an observation of every call."""

    def __init__(self, vllm: LoadedVllm, trace: Trace, *, record: bool = True) -> None:
        self.vllm = vllm
        self._scheduler = build_scheduler(vllm, trace.config, record_events=record)
        self.real = RealManager(vllm, trace.config, built=self._scheduler.kv_cache_manager)
        super().__init__(trace, self.real, record=record)
        self._steps_are_told = hasattr(self._scheduler.kv_cache_manager, "new_step_starts")
        self._scheduler.kv_cache_manager = _Recorder(self, self._scheduler.kv_cache_manager)
        self.requests: dict[str, Request] = {}

    def enqueue(self, request: Request) -> None:
        """``add_request``; output tokens that vLLM appends are noted from now on."""
        real = self.real.requests[request.id]
        self.requests[request.id] = request
        append = real.append_output_token_ids

        def append_and_note(ids: Any) -> None:
            before = len(real.block_hashes)
            append(ids)
            request.tokens.append((f"@{request.id}", request.generated, request.generated + 1))
            if keys := self.real.intern(real.block_hashes[before:]):
                self.note("append", request, keys=keys)

        real.append_output_token_ids = append_and_note
        self.real.guard(self._scheduler.add_request, real)
        self._refresh()

    def step(self) -> bool:
        """``schedule``, a forward pass that is made up, ``update_from_output``."""
        if not self._steps_are_told:
            self.note("step")
        output = self.real.guard(self._scheduler.schedule)
        scheduled = list(output.num_scheduled_tokens)
        tokens, moved = [], False
        for name in scheduled:
            request, real = self.requests[name], self.real.requests[name]
            if real.num_computed_tokens > request.furthest:
                request.furthest, moved = real.num_computed_tokens, True
            at = request.generated
            done = real.num_computed_tokens >= real.num_tokens
            tokens.append(self.real.tokens.ids([(f"@{name}", at, at + 1)]) if done else [])
        self.real.guard(
            self._scheduler.update_from_output, output, model_output(self.vllm, scheduled, tokens)
        )
        self._refresh()
        return moved

    def abort(self, name: str) -> None:
        """``finish_requests``, as when a client goes away."""
        if self.alive(name):
            self.results[name].aborted = True
            status = self.vllm.request.RequestStatus.FINISHED_ABORTED
            self.real.guard(self._scheduler.finish_requests, name, status)
            self._refresh()

    def reset(self) -> None:
        """``reset_prefix_cache``."""
        self.real.guard(self._scheduler.reset_prefix_cache)

    def alive(self, name: str) -> bool:
        """Whether vLLM's scheduler still has the request."""
        return name in self._scheduler.requests

    def _refresh(self) -> None:
        running = {real.request_id for real in self._scheduler.running}
        unfinished = [self.requests[name] for name in self._scheduler.requests]
        self.running = [request for request in unfinished if request.id in running]
        self.waiting = [request for request in unfinished if request.id not in running]

    @property
    def any_running(self) -> bool:
        """Whether some request runs at this moment of a step."""
        return bool(self._scheduler.running)


class _Recorder:
    """A ``KVCacheManager`` for a ``Scheduler``: forwards everything and notes what changes state."""

    def __init__(self, driver: RealScheduler, manager: Any) -> None:
        self._driver = driver
        self._manager = manager
        self._arguments = inspect.signature(manager.allocate_slots)
        self._gate_passed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def _request(self, real: Any) -> Request:
        return self._driver.requests[real.request_id]

    def take_events(self) -> list[Any]:
        """None are left for the scheduler to publish: each note takes those of its call."""
        return []

    def new_step_starts(self) -> None:
        self._manager.new_step_starts()
        self._driver.note("step")

    def get_computed_blocks(self, real: Any, *limit: Any) -> Any:
        found = self._manager.get_computed_blocks(real, *limit)
        if self._driver.record:
            again = lookup_of(self._manager.get_computed_blocks(real, *limit))
            self._driver.note("lookup", self._request(real), hit=lookup_of(found), again=again)
        return found

    def can_fit_full_sequence(self, real: Any, **adopted: Any) -> bool:
        """The gate of 0.19.1 to 0.20.2, asked before how many tokens to compute is passed on."""
        fits = bool(self._manager.can_fit_full_sequence(real, **adopted))
        self._gate_passed = fits
        if not fits:
            self._note_allocate(real, 0, adopted, must_fit=True, beside=None, call=lambda: None)
        return fits

    def allocate_slots(self, real: Any, num_new_tokens: int, *args: Any, **named: Any) -> Any:
        values = self._arguments.bind(real, num_new_tokens, *args, **named).arguments
        must_fit = values.get("full_sequence_must_fit", False) or self._gate_passed
        self._gate_passed = False
        return self._note_allocate(
            real,
            num_new_tokens,
            values,
            must_fit=must_fit,
            beside=values.get("has_scheduled_reqs"),
            call=lambda: self._manager.allocate_slots(real, num_new_tokens, *args, **named),
        )

    def _note_allocate(
        self,
        real: Any,
        new_tokens: int,
        values: dict[str, Any],
        *,
        must_fit: bool,
        beside: bool | None,
        call: Callable[[], Any],
    ) -> Any:
        """``beside``: None where the release's manager is not told; then the scheduler's own list."""
        driver, request = self._driver, self._request(real)
        hit = None
        if "new_computed_blocks" in values:
            hit = Lookup(
                hit_tokens=values["num_new_computed_tokens"],
                blocks=tables_of(values["new_computed_blocks"]),
                junction=getattr(real, "shared_prefix_boundary", 0),
            )
        if beside is None:
            beside = driver.any_running or hit is None
        blocks, fault = None, ""
        try:
            new = driver.real.guard(call)
            blocks = None if new is None else tables_of(new)
        except ManagerFault as error:
            fault = error.kind
            raise
        finally:
            driver.note(
                "allocate",
                request,
                computed=hit.hit_tokens if hit is not None else real.num_computed_tokens,
                new_tokens=new_tokens,
                must_fit=must_fit,
                beside=beside,
                hit=hit,
                blocks=blocks,
                ok=blocks is not None,
                fault=fault,
            )
        result = driver.results[request.id]
        if hit is not None and blocks is not None and result.hit_tokens is None:
            result.hit_tokens = hit.hit_tokens
        return new

    def free(self, real: Any) -> None:
        driver = self._driver
        driver.real.guard(self._manager.free, real)
        result = driver.results[real.request_id]
        if not real.is_finished():
            result.preemptions += 1
        elif not result.aborted:
            result.finished = True
        driver.note("free", self._request(real))

    def reset_prefix_cache(self) -> bool:
        ok = bool(self._manager.reset_prefix_cache())
        self._driver.note("reset", ok=ok)
        return ok
