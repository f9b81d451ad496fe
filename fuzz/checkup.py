"""``checkup``: one tree of vLLM against the release whose rules it follows.

Three questions: does it do the same calls the same way (lockstep, at both heights), does it break a
promise that the release keeps (a search on the tree's own manager), and what became of the stored
counterexamples?
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import attrs

from hitproof.fuzz.conformance import Aim, Comparison, compare_tree
from hitproof.fuzz.hunt import Find, Plan, Report, Unlike, Watcher, hunt
from hitproof.fuzz.random_traces import random_trace
from hitproof.model import RELEASES, ModelTarget
from hitproof.properties.known import KNOWN
from hitproof.properties.registry import BY_ID
from hitproof.properties.verdict import Judgement, Verdict
from hitproof.replay import store
from hitproof.replay.confirm import sight
from hitproof.replay.counterexample import Counterexample
from hitproof.replay.manager_target import HEIGHTS, ManagerTarget
from hitproof.replay.store import Tree

SHARES = {"manager": 0.15, "scheduler": 0.1, "promises": 0.65}
"""Parts of the budget; the stored counterexamples take what they need, some seconds."""

PROBES = (range(3), range(3, 40))
"""Seeds of the random traces by which the nearest release is measured, in rounds."""

Outcome = Literal["agrees", "differs", "no worse", "violated", "vacuous", "fixed", "refused", "unclear"]
BAD: frozenset[Outcome] = frozenset({"differs", "violated", "vacuous", "unclear"})


@attrs.frozen(kw_only=True, slots=True)
class Row:
    """One answer: what was asked, of which kind, the outcome, and one line of detail."""

    kind: Literal["lockstep", "property", "counterexample"]
    name: str
    outcome: Outcome
    detail: str

    @property
    def bad(self) -> bool:
        """Whether it fails the check."""
        return self.outcome in BAD


@attrs.define(kw_only=True, slots=True)
class Checkup:
    """What a check saw. ``finds``: the traces of violated promises. ``interrupted``: not all was asked."""

    tree: Tree
    rows: list[Row] = attrs.Factory(list)
    comparisons: list[Comparison] = attrs.Factory(list)
    finds: list[Find] = attrs.Factory(list)
    interrupted: bool = False


def checkup(
    tree: Tree,
    cases: Sequence[Counterexample],
    budget_s: float,
    *,
    promises: tuple[str, ...] = tuple(BY_ID),
    seed: int = 0,
    out: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Checkup:
    """Check ``tree`` within about ``budget_s`` seconds; Ctrl-C keeps the rows so far. The search for
    violated ``promises`` ends early when each has one.
    """
    found = Checkup(tree=tree)
    try:
        for height in HEIGHTS:
            _lockstep(found, height, Aim(seed=seed, seconds=budget_s * SHARES[height]), say)
        _cases(found, cases, say)
        _promises(found, promises, budget_s * SHARES["promises"], seed, out, say)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def nearest(spec: str, say: Callable[[str], None] = lambda _: None) -> Tree:
    """The source tree at ``spec`` under the rules of the release that it agrees with longest on
    random traces; the newest of those that agree alike.
    """
    say("measuring which release's rules are nearest")
    candidates = list(RELEASES[::-1])
    for probes in PROBES:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            scores = list(pool.map(partial(_agreed, spec, probes), candidates))
        candidates = [r for r, score in zip(candidates, scores, strict=True) if score == max(scores)]
    return store.find(spec, semantics=candidates[0])


def _agreed(spec: str, probes: range, release: str) -> float:
    """Calls that agree before the first difference on the traces of these seeds; infinity without one."""
    tree = store.find(spec, semantics=release)
    calls = 0
    with ManagerTarget(tree) as target:
        for result in target.conform([random_trace(seed, release) for seed in probes]):
            calls += result.calls
            if result.divergence is not None:
                return calls
    return math.inf


def _lockstep(found: Checkup, height: str, aim: Aim, say: Callable[[str], None]) -> None:
    def show(so_far: Comparison) -> None:
        say(f"lockstep, {height}: {so_far.calls} calls")

    stop = threading.Event()
    try:
        result = compare_tree(found.tree, height, aim, show, stop)
    except KeyboardInterrupt:
        stop.set()
        raise
    found.comparisons.append(result)
    if result.first is None:
        detail = f"{result.calls} calls in {result.traces} traces"
        row = Row(
            kind="lockstep", name=height, outcome="agrees" if result.calls else "vacuous", detail=detail
        )
    else:
        trace, first = result.first
        detail = f"at call {first.call_index} ({first.call}, op {first.op}) of {trace.note}: {first.field}"
        row = Row(kind="lockstep", name=height, outcome="differs", detail=detail)
    found.rows.append(row)


def _cases(found: Checkup, cases: Sequence[Counterexample], say: Callable[[str], None]) -> None:
    """Each stored counterexample on the tree, beside the model under the release's rules."""
    rules = found.tree.semantics
    with ManagerTarget(found.tree) as real:
        for case in cases:
            say(f"counterexample {case.name}")
            name = case.finding.property_id
            model, seen = sight(case.trace, name, ModelTarget(rules)), sight(case.trace, name, real)
            outcome: Outcome = "agrees" if seen.verdict == model.verdict else "unclear"
            if (model.verdict, seen.verdict) == ("not reproduced", "reproduced"):
                outcome = "violated"
            elif (model.verdict, seen.verdict) == ("reproduced", "not reproduced"):
                outcome = "fixed"
            elif seen.verdict == "refused":
                outcome = "refused"
            detail = f"{name}: {seen.verdict}, {seen.detail}"
            if seen.verdict != model.verdict:
                detail += f" (rules of {rules}: {model.verdict}, {model.detail})"
            found.rows.append(Row(kind="counterexample", name=case.name, outcome=outcome, detail=detail))


class _Saying(Watcher):
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def searching(self, semantics: str, elapsed_s: float, budget_s: float, runs: int) -> None:
        self._say(f"promises: {runs} traces")


def _promises(
    found: Checkup,
    promises: tuple[str, ...],
    budget_s: float,
    seed: int,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """The promises on the tree's own manager: only what the release's model keeps on the same trace
    counts, so that a violation is the tree's own.
    """
    rules = found.tree.semantics
    plan = Plan(
        semantics=(rules,),
        properties=promises,
        budget_s=budget_s,
        seed=seed,
        target="manager",
        retention="any",
        unlike=Unlike(release=rules),
        trees={rules: found.tree},
        out=out,
    )
    started = time.monotonic()
    report: Report = hunt(plan, _Saying(say))
    found.finds += report.finds
    seconds = time.monotonic() - started
    found.rows += [_promise(judged, rules, report, seconds) for judged in report.judgements[rules]]
    if report.interrupted:
        raise KeyboardInterrupt


def _promise(judged: Judgement, rules: str, report: Report, seconds: float) -> Row:
    name = judged.property_id
    looked = f"{judged.evidence} checks in {judged.runs} traces, {seconds:.0f} s"
    finds = [find for find in report.finds if find.counterexample.finding.property_id == name]
    if finds:
        finding, path = finds[0].counterexample.finding, finds[0].path
        where = f"; trace in {path}" if path else ""
        detail = f"expected {finding.expected}, seen {finding.seen}{where}; {rules} keeps it"
        return Row(kind="property", name=name, outcome="violated", detail=detail)
    if judged.verdict in (Verdict.VACUOUS, Verdict.UNKNOWN):
        return Row(kind="property", name=name, outcome="vacuous", detail=f"{looked}: raise the budget")
    listed = list(dict.fromkeys(k.report for k in KNOWN if k.property_id == name and k.speaks_of(rules)))
    also = f"; {rules} itself breaks it ({', '.join(listed)})" if listed else ""
    return Row(kind="property", name=name, outcome="no worse", detail=looked + also)
