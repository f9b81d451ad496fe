"""What judging a run says: findings, and verdicts that cannot be made without what they rest on."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, get_args

import attrs

if TYPE_CHECKING:
    from hitproof.model import Observation
    from hitproof.properties.story import Story


class Verdict(IntEnum):
    """Ordered from worst to best. VACUOUS (no evidence) is a failure, not a pass."""

    VIOLATED = 0
    UNKNOWN = 1
    VACUOUS = 2
    HOLDS = 3


Cause = Literal["", "evicted", "not written", "all cached"]
CAUSES: tuple[str, ...] = get_args(Cause)


@attrs.frozen(kw_only=True, slots=True)
class Finding:
    """One broken promise: where it broke, and expected against seen. Data first.

    ``at``: index of the observation. ``cause``: what became of the blocks that a short hit lacks,
    "evicted" if any was. ``reasons``: one sentence each, made from the run's data.
    """

    property_id: str
    at: int
    op: int
    request: str | None
    expected: str
    seen: str
    cause: Cause = ""
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, property_id: str, at: int, call: Observation, expected: str, seen: str) -> Finding:
        """A promise that the call ``at`` broke, for the request of that call."""
        return cls(
            property_id=property_id, at=at, op=call.op, request=call.request, expected=expected, seen=seen
        )


@attrs.frozen(kw_only=True, slots=True)
class Check:
    """What one property said of one run: the first finding if any, and how often it looked."""

    finding: Finding | None = None
    evidence: int = 0


@attrs.frozen(kw_only=True, slots=True)
class Property:
    """A promise that can be judged on a run.

    ``mode``: "always" must hold on every run. ``needs``: what the run must show ("hits", "calls",
    "state"; "rerun": the target must be able to run a changed trace). ``check`` looks at one run.
    """

    id: str
    promise: str
    why: str
    source: str
    statement: str
    family: Literal["hit quality", "safety", "accounting", "liveness", "events"]
    needs: frozenset[str]
    check: Callable[[Story], Check] = attrs.field(repr=False)


@attrs.frozen(kw_only=True, slots=True)
class Judgement:
    """A property's verdict over ``runs`` runs. ``bound`` says within what HOLDS was seen."""

    property_id: str
    verdict: Verdict
    evidence: int
    runs: int
    bound: str

    def __attrs_post_init__(self) -> None:
        if self.verdict is Verdict.HOLDS and (not self.bound or not self.evidence):
            raise ValueError(f"{self.property_id}: HOLDS needs a bound and evidence")

    @classmethod
    def of(cls, property_id: str, *, violated: bool, runs: int, evidence: int, bound: str) -> Judgement:
        """The verdict that these counts allow: UNKNOWN without runs, VACUOUS without evidence."""
        if violated:
            verdict = Verdict.VIOLATED
        elif not runs:
            verdict = Verdict.UNKNOWN
        else:
            verdict = Verdict.HOLDS if evidence else Verdict.VACUOUS
        return cls(property_id=property_id, verdict=verdict, evidence=evidence, runs=runs, bound=bound)


class Tally:
    """Adds up what many runs said of the same properties."""

    def __init__(self, properties: tuple[Property, ...]) -> None:
        self.properties = properties
        self.evidence = {p.id: 0 for p in properties}
        self.runs = {p.id: 0 for p in properties}

    def add(self, story: Story) -> list[Finding]:
        """Judge one run; returns what it broke."""
        found = []
        for p in self.properties:
            if not p.needs <= story.sees:
                continue
            check = p.check(story)
            self.runs[p.id] += 1
            self.evidence[p.id] += check.evidence
            if check.finding is not None:
                found.append(check.finding)
        return found
