"""``conformance``: the model against real vLLM on random traces, on the cores there are."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import attrs

from hitproof.fuzz.random_traces import coverage, random_trace
from hitproof.model import ModelTarget, Trace
from hitproof.properties.hits import missing
from hitproof.properties.story import Story
from hitproof.replay.lockstep import Conformance, Divergence
from hitproof.replay.manager_target import BATCH, HEIGHTS, ManagerTarget
from hitproof.replay.store import Tree

SAMPLED = 10
"""One trace in so many is run once more, for what happened in it."""


@attrs.define(kw_only=True, slots=True)
class Comparison:
    """One tree compared at one height. ``calls``: manager calls that agreed in every field.
    ``refused``: traces that the height does not model. ``covered``: traces that have a feature;
    ``sampled`` traces were looked into for ``seen``, what happened in them. ``first``: the first
    difference with its trace. ``ended``: False if a stop or a deadline came before the aim.
    """

    tree: Tree
    height: str
    traces: int = 0
    refused: int = 0
    calls: int = 0
    seconds: float = 0.0
    covered: Counter[str] = attrs.Factory(Counter)
    sampled: int = 0
    seen: Counter[str] = attrs.Factory(Counter)
    first: tuple[Trace, Divergence] | None = None
    ended: bool = False


@attrs.frozen(kw_only=True, slots=True)
class Aim:
    """When a comparison has seen enough: so many traces or so many calls, whichever is not None."""

    traces: int | None = None
    calls: int | None = None
    seed: int = 0
    seconds: float = float("inf")


def compare_tree(
    tree: Tree,
    height: str,
    aim: Aim,
    progress: Callable[[Comparison], None] = lambda _: None,
    stop: threading.Event | None = None,
    workers: int | None = None,
) -> Comparison:
    """Compare the model with ``tree`` at ``height`` up to the aim or to the first difference."""
    found = Comparison(tree=tree, height=height)
    stop = stop or threading.Event()
    lock = threading.Lock()
    started = time.monotonic()
    starts = iter(range(0, aim.traces if aim.traces is not None else 10**9, BATCH))

    def enough() -> bool:
        over = time.monotonic() - started > aim.seconds
        reached = aim.calls is not None and found.calls >= aim.calls
        return stop.is_set() or over or reached or found.first is not None

    def work() -> None:
        with HEIGHTS[height](tree) as target:
            while not enough():
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                count = BATCH if aim.traces is None else min(BATCH, aim.traces - start)
                seeds = range(aim.seed + start, aim.seed + start + count)
                batch = [random_trace(seed, tree.semantics) for seed in seeds]
                results = _results(target, batch)
                happened = [
                    outcomes(trace)
                    for trace, seed, result in zip(batch, seeds, results, strict=True)
                    if seed % SAMPLED == 0 and result is not None
                ]
                with lock:
                    _add(found, batch, results, happened)
                    found.seconds = time.monotonic() - started
                    progress(found)

    count = workers or os.cpu_count() or 1
    with ThreadPoolExecutor(count) as pool:
        try:
            for future in [pool.submit(work) for _ in range(count)]:
                future.result()
        except BaseException:
            stop.set()
            raise
    reached = aim.traces is not None or (aim.calls is not None and found.calls >= aim.calls)
    found.ended = reached and not stop.is_set() and time.monotonic() - started <= aim.seconds
    return found


def _results(target: ManagerTarget, batch: list[Trace]) -> list[Conformance | None]:
    """None for a trace that the target's height refuses."""
    refused = [target.height == "scheduler" and trace.config.use_eagle for trace in batch]
    results = iter(target.conform([trace for trace, no in zip(batch, refused, strict=True) if not no]))
    return [None if no else next(results) for no in refused]


def _add(
    found: Comparison,
    batch: list[Trace],
    results: list[Conformance | None],
    happened: list[set[str]],
) -> None:
    for trace, result in zip(batch, results, strict=True):
        if result is None:
            found.refused += 1
            continue
        found.traces += 1
        found.calls += result.calls
        found.covered.update(coverage(trace))
        if result.divergence is not None and found.first is None:
            found.first = trace, result.divergence
    found.sampled += len(happened)
    for words in happened:
        found.seen.update(words)


def outcomes(trace: Trace) -> set[str]:
    """What happened in a trace, in words, as the model runs it."""
    story = Story(ModelTarget().run(trace))
    return set(_outcomes(story))


def _outcomes(story: Story) -> Iterator[str]:
    if any(result.preemptions for result in story.run.requests):
        yield "preemption"
    if any(seen.call == "allocate" and not seen.ok for seen in story.observations):
        yield "refused allocation"
    if any(event.kind == "removed" for seen in story.observations for event in seen.events):
        yield "eviction"
    if any(hit for hit in story.run.hits):
        yield "hit"
    for back in story.returns:
        if back.hit.hit_tokens < back.expected:
            yield f"hit lost: {missing(story, back.at, back.subject, back.expected)['cause']}"
