"""Searching for violated promises: slices of a Hypothesis search, run on the cores there are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from hitproof.fuzz.draw import Range
from hitproof.fuzz.machine import machine_for
from hitproof.fuzz.random_traces import random_trace
from hitproof.model import BadInput, ModelTarget, Run, Trace
from hitproof.model.config import DEFAULT
from hitproof.properties.known import known_for
from hitproof.properties.registry import BY_ID
from hitproof.properties.story import Story
from hitproof.properties.verdict import Finding, Tally

STEPS = 14
"""Rules per trace at most."""


class _Stop(KeyboardInterrupt):
    """Ends a slice at once: Hypothesis neither replays nor shrinks on a KeyboardInterrupt."""


@attrs.frozen(kw_only=True, slots=True)
class Slice:
    """One piece of search work: plain data, so that it can cross to a worker process.

    ``examples`` bounds it by count, ``seconds`` by time; the first violation ends it. Known
    violations of ``skip_known`` are passed over. ``plain``: random traces instead of the machine's.
    """

    wide: Range
    properties: tuple[str, ...]
    seed: int
    seconds: float
    examples: int = 1_000_000
    skip_known: frozenset[str] = frozenset()
    plain: bool = False


@attrs.frozen(kw_only=True, slots=True)
class SliceResult:
    """What a slice saw: evidence and runs per property, and the first violation."""

    runs: dict[str, int]
    evidence: dict[str, int]
    trace: Trace | None = None
    findings: tuple[Finding, ...] = ()


def search(
    work: Slice,
    run_trace: Callable[[Trace], Run] | None = None,
    counts: Callable[[Trace, Finding], bool] | None = None,
) -> SliceResult:
    """Search one slice on the model, or on ``run_trace``. Only findings that ``counts`` accepts end it."""
    tally = Tally(tuple(BY_ID[name] for name in work.properties))
    deadline = time.monotonic() + work.seconds
    found: list[tuple[Trace, list[Finding]]] = []

    def judge(story: Story) -> None:
        trace = story.run.trace
        findings = [f for f in tally.add(story) if not _skipped(f, trace, work)]
        findings = [f for f in findings if counts is None or counts(trace, f)]
        if findings:
            found.append((trace, findings))
        if findings or time.monotonic() > deadline:
            raise _Stop

    run = run_trace or ModelTarget().run
    try:
        if work.plain:
            for n in range(work.examples):
                drawn = random_trace_in(work.wide, work.seed * 1_000_003 + n)
                if drawn is not None:
                    judge(Story(run(drawn), run))
                elif time.monotonic() > deadline:
                    break
        else:
            _machine(work, run, judge)
    except _Stop:
        pass
    trace, findings = found[0] if found else (None, [])
    return SliceResult(runs=tally.runs, evidence=tally.evidence, trace=trace, findings=tuple(findings))


def _machine(work: Slice, run: Callable[[Trace], Run], judge: Callable[[Story], None]) -> None:
    """Traces made rule by rule, climbing towards pressure on the pool."""
    machine = machine_for(work.wide, run, judge)
    options = settings(
        max_examples=work.examples,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.target),
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    before = random.getstate()
    try:
        run_state_machine_as_test(hypothesis.seed(work.seed)(machine), settings=options)
    finally:
        random.setstate(before)


def random_trace_in(wide: Range, seed: int) -> Trace | None:
    """The random trace of a seed with the range's retention, and without EAGLE if it has none; None
    if the release refuses its config then, or if it has a window of one token, which never hits.
    """
    trace = random_trace(seed, wide.semantics)
    if any(group.window == 1 for group in trace.config.groups):
        return None
    changes: dict[str, Any] = {} if wide.eagle else {"use_eagle": False}
    if wide.retention != "any":
        word = wide.retention
        changes["retention_interval"] = int(word) if word.isdecimal() else {"dense": None}.get(word, DEFAULT)
    try:
        return attrs.evolve(trace, config=attrs.evolve(trace.config, **changes))
    except BadInput:
        return None


def _skipped(finding: Finding, trace: Trace, work: Slice) -> bool:
    return finding.property_id in work.skip_known and known_for(finding, trace) is not None
