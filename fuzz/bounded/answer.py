"""Bound by bound: what Z3 said of a promise, and nothing that it did not say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from hitproof.fuzz.bounded.solver import Limits, Reply, ask, stoppable
from hitproof.model import ModelTarget, Run, Trace
from hitproof.properties.registry import property_of
from hitproof.properties.story import Story
from hitproof.properties.verdict import Finding, Verdict

ENCODING_FAULT = "ENCODING FAULT"
"""The model does not do what the encoding says: a verdict of its own, about the encoding alone."""


@attrs.frozen(kw_only=True, slots=True)
class Bound:
    """One question: can the promise break within ``text``? ``premise``: the runs that it speaks of,
    ``broken``: of those, the ones that break it. ``smallest``: what to make small, in this order,
    with names. ``decode``: a sat reply as a trace. ``agrees``: what the concrete run says against
    the reply, empty if nothing (beyond that it must break the promise). ``logic``: SMT-LIB's name.
    """

    text: str
    premise: Sequence[Any]
    broken: Sequence[Any]
    smallest: Sequence[tuple[str, Any]] = ()
    decode: Callable[[Reply], Trace]
    agrees: Callable[[Reply, Run], str] = lambda _, __: ""
    logic: str = "QF_LIA"


@attrs.frozen(kw_only=True, slots=True)
class Done:
    """One bound with its reply. ``vacuous``: no run at all meets the premise.
    ``induction``: an inductive step, whose failure says nothing about the promise.
    """

    text: str
    reply: Reply
    vacuous: bool = False
    induction: bool = False

    @property
    def line(self) -> str:
        """For progress."""
        broken = "broken" if not self.induction else "no induction"
        word = {"sat": broken, "unsat": "nothing to check" if self.vacuous else "holds"}
        said = word.get(self.reply.status, f"unknown ({self.reply.reason})")
        return f"{self.text}: {said}, {self.reply.seconds:.1f} s"


@attrs.frozen(kw_only=True, slots=True)
class Answer:
    """The verdict on one promise. ``bound``: within what, for every verdict. ``fault``: how the
    encoding and the model differ; then nothing else counts. ``minimal``: what is proven of the
    counterexample's size. ``reason``: why it is unknown.
    """

    property_id: str
    verdict: Verdict
    bound: str
    seconds: float
    done: tuple[Done, ...] = ()
    trace: Trace | None = None
    finding: Finding | None = None
    minimal: str = ""
    reason: str = ""
    fault: str = ""
    interrupted: bool = False

    def __attrs_post_init__(self) -> None:
        proven = any(d.reply.status == "unsat" and not d.vacuous for d in self.done)
        if self.verdict is Verdict.HOLDS and not (self.bound and proven):
            raise ValueError(f"{self.property_id}: HOLDS needs a bound and a proof within it")

    @property
    def word(self) -> str:
        """The verdict as shown."""
        return ENCODING_FAULT if self.fault else self.verdict.name

    @property
    def statistics(self) -> dict[str, float]:
        """Z3's, added up over all bounds (memory: the most)."""
        total: dict[str, float] = {}
        for done in self.done:
            for key, value in done.reply.statistics.items():
                total[key] = max(total.get(key, 0), value) if key == "memory" else total.get(key, 0) + value
        return total

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "property": self.property_id,
            "verdict": self.word,
            "bound": self.bound,
            "seconds": round(self.seconds, 2),
            "reason": self.reason,
            "fault": self.fault,
            "minimal": self.minimal,
            "interrupted": self.interrupted,
            "statistics": self.statistics,
            "bounds": [
                {
                    "bound": d.text,
                    "answer": d.reply.status,
                    "vacuous": d.vacuous,
                    "reason": d.reply.reason,
                    "seconds": round(d.reply.seconds, 3),
                }
                for d in self.done
            ],
            "trace": None if self.trace is None else self.trace.to_json(),
            "finding": None if self.finding is None else attrs.asdict(self.finding),
        }


def prove(
    property_id: str,
    bounds: Iterable[Bound],
    limits: Limits,
    tell: Callable[[Done], None] = lambda _: None,
    run: Callable[[Trace], Run] | None = None,
    induction: Callable[[Limits], Done] | None = None,
) -> Answer:
    """Ask the bounds in order, until one is broken, unknown, or all are done. When all hold,
    ``induction`` is asked for a proof beyond them; without one nothing is lost.

    The order of ``bounds`` is the order of size: a counterexample is minimal in it when every bound
    before its own was answered unsat. ``run`` is what a counterexample must break the promise on:
    the model, or the model with a seeded bug. Ctrl-C ends the search and keeps what is done.
    """
    start = time.monotonic()
    done: list[Done] = []

    def answer(verdict: Verdict, **more: Any) -> Answer:
        proven = [d for d in done if d.reply.status == "unsat" and not d.vacuous]
        bound = more.pop("bound", "") or _span(proven)
        return Answer(
            property_id=property_id,
            verdict=verdict,
            bound=bound or "nothing proven",
            seconds=time.monotonic() - start,
            done=tuple(done),
            **more,
        )

    with stoppable():
        try:
            for bound in bounds:
                reply = ask([*bound.premise, *bound.broken], limits, bound.logic)
                vacuous = False
                if reply.status == "unsat":
                    witness = ask(bound.premise, limits, bound.logic)
                    if witness.status == "unknown":
                        reply = attrs.evolve(reply, status="unknown", reason=f"evidence: {witness.reason}")
                    vacuous = witness.status == "unsat"
                done.append(Done(text=bound.text, reply=reply, vacuous=vacuous))
                tell(done[-1])
                if reply.status == "unknown":
                    return answer(Verdict.UNKNOWN, reason=f"{bound.text}: {reply.reason}")
                if reply.status == "sat":
                    found, minimal = _smallest(bound, reply, limits)
                    return answer(**_confirmed(property_id, bound, found, run), minimal=minimal)
            held = [d for d in done if not d.vacuous]
            if induction is not None and held and not limits.over:
                step = induction(limits)
                tell(step)
                if step.reply.status == "unsat":
                    done.append(step)
        except KeyboardInterrupt:
            return answer(Verdict.UNKNOWN, reason="interrupted", interrupted=True)
    if not done:
        return answer(Verdict.UNKNOWN, reason="no bound was asked")
    return answer(Verdict.VACUOUS if all(d.vacuous for d in done) else Verdict.HOLDS)


def _span(proven: Sequence[Done]) -> str:
    plain = [d.text for d in proven if not d.induction]
    beyond = [f"by induction {d.text}" for d in proven if d.induction]
    first = [plain[0] if len(plain) == 1 else f"{plain[0]} to {plain[-1]}"] if plain else []
    return "; ".join([*first, *beyond])


def _confirmed(
    property_id: str, bound: Bound, reply: Reply, run: Callable[[Trace], Run] | None
) -> dict[str, Any]:
    """The concrete model must break the same promise on the decoded trace."""
    trace = bound.decode(reply)
    run = run or ModelTarget().run
    concrete = run(trace)
    finding = property_of(property_id).check(Story(concrete, run)).finding
    fault = bound.agrees(reply, concrete)
    if finding is None:
        fault = fault or f"the model keeps the promise: hits {concrete.hits}"
    verdict = Verdict.UNKNOWN if fault else Verdict.VIOLATED
    return {"verdict": verdict, "trace": trace, "finding": finding, "fault": fault, "bound": bound.text}


def _smallest(bound: Bound, reply: Reply, limits: Limits) -> tuple[Reply, str]:
    """Make each size as small as it can be, in order; says what is proven. Ctrl-C keeps the best."""
    fixed = [*bound.premise, *bound.broken]
    notes: list[str] = []
    proven = True
    try:
        for name, term in bound.smallest:
            low, high = -1, reply.value(term)
            while proven and low + 1 < high:
                middle = (low + high) // 2 if low + 8 < high else high - 1
                smaller = ask([*fixed, term <= middle], limits, bound.logic)
                if smaller.status == "sat":
                    reply, high = smaller, smaller.value(term)
                elif smaller.status == "unsat":
                    low = middle
                else:
                    proven = False
                    notes.append(f"{name} {high}, none below {low + 1}, between not known ({smaller.reason})")
            fixed.append(term == high)
            if proven and name:
                notes.append(f"{name} {high}, none smaller")
    except KeyboardInterrupt:
        notes.append("interrupted before its size was proven")
    return reply, "; ".join(["no earlier bound is broken", *notes])
