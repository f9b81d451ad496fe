"""``hunt``: search, shrink, confirm, explain and store, until the budget ends."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs

from hitproof.fuzz.draw import Range
from hitproof.fuzz.explain import explain
from hitproof.fuzz.reduce import Reduced, reduce
from hitproof.fuzz.search import Slice, SliceResult, search
from hitproof.model import BadInput, ModelTarget, Run, Trace, under
from hitproof.properties.known import Known, known_for
from hitproof.properties.registry import BY_ID, HIT_QUALITY
from hitproof.properties.story import Story
from hitproof.properties.verdict import Finding, Judgement
from hitproof.replay.confirm import sight, status_of
from hitproof.replay.counterexample import Counterexample, Sighting, store
from hitproof.replay.manager_target import HEIGHTS, ManagerTarget, SchedulerTarget
from hitproof.replay.store import Tree
from hitproof.replay.tiny_model import refusal

SLICE_SECONDS = 5.0
HYBRID_PROMISES = frozenset({"hit-survives-half-pool", "hit-survives-fit"})
"""Promises about full attention beside windows: wanted alone, they are hunted on such configs only."""

CONTEXT = multiprocessing.get_context("spawn")


@attrs.frozen(kw_only=True, slots=True)
class Real:
    """Real vLLM to run traces on: a tree, and whether its manager or its scheduler too."""

    tree: Tree
    height: str = "manager"


@attrs.frozen(kw_only=True, slots=True)
class Unlike:
    """Only what this release keeps counts: on ``real``, or on the model if that is None.
    ``retention``: the interval to set there, in tokens, "keep" to leave it.
    """

    release: str
    retention: int | Literal["keep"] | None = "keep"
    real: Real | None = None

    def keeps(self, trace: Trace, property_id: str) -> bool:
        """Whether the promise is kept there, and looked at; a trace that is refused there is not."""
        try:
            other = under(trace, self.release, self.retention)
        except BadInput:
            return False
        run = _runner(self.real)
        check = BY_ID[property_id].check(Story(run(other), run))
        return check.finding is None and check.evidence > 0


@attrs.frozen(kw_only=True, slots=True)
class Only:
    """Which findings count."""

    unlike: Unlike | None = None
    for_engine: bool = False

    def accepts(self, trace: Trace, property_id: str) -> bool:
        """Whether a finding on this trace counts."""
        if self.for_engine and refusal(trace):
            return False
        return self.unlike is None or self.unlike.keeps(trace, property_id)


@attrs.frozen(kw_only=True, slots=True)
class Plan:
    """What to hunt. ``trees``: the real vLLM to confirm each semantics on, where there is one.
    ``target``: what is searched, the model or a height of real vLLM. ``for_engine``: only traces count that
    vLLM's engine takes.

    ``budget_s`` is for the search of all ``semantics`` together; shrinking and confirming add to it.
    """

    semantics: tuple[str, ...]
    properties: tuple[str, ...]
    budget_s: float = 60
    seed: int = 0
    workers: int = attrs.Factory(lambda: os.cpu_count() or 1)
    target: str = "model"
    retention: str = "default"
    unlike: Unlike | None = None
    for_engine: bool = False
    trees: dict[str, Tree] = attrs.Factory(dict)
    out: Path | None = None


@attrs.frozen(kw_only=True, slots=True)
class Find:
    """One counterexample, with what found it and whether the violation was known."""

    counterexample: Counterexample
    known: Known | None
    seconds: float
    path: Path | None


@attrs.define(kw_only=True, slots=True)
class Report:
    """What a hunt saw: finds in order, and per semantics a verdict for every property."""

    finds: list[Find] = attrs.Factory(list)
    judgements: dict[str, list[Judgement]] = attrs.Factory(dict)
    interrupted: bool = False


class Watcher:
    """Told of progress; the CLI shows it."""

    def searching(self, semantics: str, elapsed_s: float, budget_s: float, runs: int) -> None:
        """Some traces more were judged."""

    def shrinking(self, finding: Finding) -> None:
        """A violation was found and is being made small."""

    def found(self, find: Find) -> None:
        """A counterexample is ready."""


def hunt(plan: Plan, watcher: Watcher | None = None) -> Report:
    """Hunt until the budget ends or every property has a violation that was not known."""
    watcher = watcher or Watcher()
    report = Report()
    pool = ProcessPoolExecutor(plan.workers, mp_context=CONTEXT, initializer=_ignore_interrupts)
    try:
        for semantics in plan.semantics:
            _Hunter(plan, semantics, pool, watcher, report).run()
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(cancel_futures=True)
    return report


class _Hunter:
    """The hunt on one release's semantics."""

    def __init__(
        self, plan: Plan, semantics: str, pool: ProcessPoolExecutor, watcher: Watcher, report: Report
    ) -> None:
        self.plan, self.semantics, self.pool, self.watcher, self.report = (
            plan,
            semantics,
            pool,
            watcher,
            report,
        )
        self.budget = plan.budget_s / len(plan.semantics)
        self.wanted = set(plan.properties)
        self.skip_known: set[str] = set()
        self.runs = dict.fromkeys(plan.properties, 0)
        self.evidence = dict.fromkeys(plan.properties, 0)
        self.violated: set[str] = set()
        self.interrupted = False
        self.seeds = (plan.seed * 1_000_003 + n for n in itertools.count())

    def run(self) -> None:
        """Search slices in parallel; deal with each violation as it comes."""
        started = time.monotonic()
        slices = self._slices()
        pending: set[Future[SliceResult]] = set()
        try:
            while self.wanted:
                elapsed = time.monotonic() - started
                while len(pending) < self.plan.workers and elapsed < self.budget:
                    work = next(slices)
                    pending.add(self._submit(_search, work, self._searched(), self._only))
                if not pending:
                    break
                done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    with self._deferring_interrupts():
                        self._take(future.result(), time.monotonic() - started)
                if self.interrupted:
                    raise KeyboardInterrupt
                runs = max(self.runs.values())
                self.watcher.searching(self.semantics, min(elapsed, self.budget), self.budget, runs)
        finally:
            for future in pending:
                future.cancel()
            self.report.judgements[self.semantics] = self._judgements()

    def _slices(self) -> Iterator[Slice]:
        """Three kinds in turn: plain hybrids for hit quality, everything varied for all, and random
        traces; promises about plain hybrids, wanted alone, get the first kind only.
        """
        quality = tuple(p.id for p in HIT_QUALITY)
        for n in itertools.count():
            focus = [name for name in quality if name in self.wanted]
            plain = False
            if self.plan.unlike is not None or not self.wanted <= HYBRID_PROMISES:
                plain = n % 3 == 2
                focus = focus if n % 3 == 0 else []
            wide = Range(
                semantics=self.semantics,
                retention=self.plan.retention,
                hybrid=bool(focus),
                odd=not focus,
                eagle=self.plan.target != "scheduler" and not self.plan.for_engine,
            )
            yield Slice(
                wide=wide,
                properties=tuple(focus or sorted(self.wanted)),
                seed=next(self.seeds),
                seconds=SLICE_SECONDS,
                skip_known=frozenset(self.skip_known),
                plain=plain,
            )

    @property
    def _only(self) -> Only:
        return Only(unlike=self.plan.unlike, for_engine=self.plan.for_engine)

    @property
    def _is_fork(self) -> bool:
        """Whether real vLLM is a tree of its own: then the model need not do what it does."""
        tree = self.plan.trees.get(self.semantics)
        return tree is not None and tree.version != self.semantics

    def _searched(self) -> Real | None:
        """Real vLLM if it is searched itself, None for the model."""
        tree = self.plan.trees.get(self.semantics)
        if self.plan.target == "model" or tree is None:
            return None
        return Real(tree=tree, height=self.plan.target)

    def _take(self, result: SliceResult, elapsed: float) -> None:
        for name, runs in result.runs.items():
            self.runs[name] += runs
            self.evidence[name] += result.evidence[name]
        if result.trace is None:
            return
        for finding in result.findings:
            name = finding.property_id
            known = known_for(finding, result.trace)
            if name not in self.wanted or (known is not None and name in self.skip_known):
                continue
            self.skip_known.add(name) if known else self.wanted.discard(name)
            if len(self.plan.properties) == 1:
                self.wanted.discard(name)
            self.violated.add(name)
            self.watcher.shrinking(finding)
            find = self._make(result.trace, finding, elapsed)
            self.report.finds.append(find)
            self.watcher.found(find)

    def _make(self, trace: Trace, first: Finding, elapsed: float) -> Find:
        """Shrink, confirm, explain, store."""
        small = self._shrink(trace, first)
        name = first.property_id
        prop = BY_ID[name]
        searched = _runner(self._searched())
        finding = prop.check(Story(searched(small.trace), searched)).finding
        assert finding is not None
        sightings: list[Sighting] = [sight(small.trace, name, ModelTarget())]
        tree = self.plan.trees.get(self.semantics)
        if tree is not None and not self.interrupted:
            with ManagerTarget(tree) as real:
                sightings.append(sight(small.trace, name, real))
            if self.plan.target == "scheduler":
                with SchedulerTarget(tree) as real:
                    sightings.append(sight(small.trace, name, real))
        known = known_for(finding, small.trace)
        explained = sightings[0].verdict == "reproduced" and not self.interrupted
        found = Counterexample(
            name="find",
            trace=small.trace,
            finding=finding,
            status="confirmed" if self._is_fork and _reproduced(sightings) else status_of(sightings),
            report=known.report if known else "",
            found_by=f"hunt, seed {self.plan.seed}, after {elapsed:.0f} s",
            minimality=f"{small.stopped} ({small.runs} runs)",
            sightings=tuple(sightings),
            counterfactuals=tuple(c.text for c in explain(small.trace, prop)) if explained else (),
        )
        try:
            path = store(found, self.plan.out) if self.plan.out is not None else None
        except BadInput:
            self.watcher.found(Find(counterexample=found, known=known, seconds=elapsed, path=None))
            raise
        if path is not None:
            found = attrs.evolve(found, name=path.stem)
        return Find(counterexample=found, known=known, seconds=elapsed, path=path)

    def _submit(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        """Work for the pool; a process that this starts is deaf to Ctrl-C from its first moment."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self.pool.submit(function, *arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @contextmanager
    def _deferring_interrupts(self) -> Iterator[None]:
        """Ctrl-C only says so while a find is dealt with: it is kept first."""

        def defer(*_: object) -> None:
            self.interrupted = True

        before = signal.signal(signal.SIGINT, defer)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _shrink(self, trace: Trace, first: Finding) -> Reduced:
        """The smaller trace; after Ctrl-C, which ends the hunt, the trace as it was found."""
        work: Future[Reduced] = self._submit(shrink, trace, first, real=self._searched(), only=self._only)
        while not self.interrupted:
            if wait((work,), timeout=0.1).done:
                return work.result()
        return Reduced(trace=trace, runs=0, stopped="not shrunk: interrupted")

    def _judgements(self) -> list[Judgement]:
        text = Range(semantics=self.semantics, retention=self.plan.retention).text
        if self.plan.unlike is not None:
            text += f"; only what {self.plan.unlike.release} keeps counts"
        if self.plan.for_engine:
            text += "; only what vLLM's engine takes counts"
        return [
            Judgement.of(
                name,
                violated=name in self.violated,
                runs=self.runs[name],
                evidence=self.evidence[name],
                bound=f"{self.runs[name]} traces, some of them plain random ones; {text}"
                if self.runs[name]
                else "",
            )
            for name in self.plan.properties
        ]


def _reproduced(sightings: list[Sighting]) -> bool:
    return any(s.target != "model" and s.verdict == "reproduced" for s in sightings)


def shrink(
    trace: Trace,
    finding: Finding,
    most_runs: int = 10_000,
    real: Real | None = None,
    only: Only = Only(),
) -> Reduced:
    """The smallest trace of the same kind: same property and cause, known or new as before, hybrid
    if it was, and still one of ``only``. On the model, or on ``real``.
    """
    prop = BY_ID[finding.property_id]
    run = _runner(real)
    known = known_for(finding, trace)
    hybrid = trace.config.is_hybrid

    def fails(candidate: Trace) -> bool:
        if candidate.config.is_hybrid is not hybrid:
            return False
        seen = prop.check(Story(run(candidate), run)).finding
        if seen is None or seen.cause != finding.cause or known_for(seen, candidate) is not known:
            return False
        return only.accepts(candidate, prop.id)

    return reduce(trace, fails, most_runs)


_targets: dict[Real, ManagerTarget] = {}


def _runner(real: Real | None) -> Callable[[Trace], Run]:
    """The model, or one real target that this process keeps."""
    if real is None:
        return ModelTarget().run
    if real not in _targets:
        _targets[real] = HEIGHTS[real.height](real.tree)
    return _targets[real].run


def _search(work: Slice, real: Real | None, only: Only) -> SliceResult:
    """A slice in a pool process."""
    return search(work, _runner(real), lambda trace, finding: only.accepts(trace, finding.property_id))


def _ignore_interrupts() -> None:
    """Ctrl-C ends the hunt in the parent, which keeps what was found. A pool process whose parent
    was killed ends too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
