"""Which encoding answers for which promise, and how far by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import attrs

from hitproof.fuzz.bounded import run_level
from hitproof.fuzz.bounded.answer import Answer, Bound, Done, prove
from hitproof.fuzz.bounded.odometer import Promise, Setting
from hitproof.fuzz.bounded.run_level import Fixed
from hitproof.fuzz.bounded.solver import Limits
from hitproof.model import BadInput, CacheConfig, Group, Run, Trace
from hitproof.model.config import DEFAULT

RUN_LEVEL = ("hit-survives-half-pool", "hit-survives-fit")


@attrs.frozen(kw_only=True, slots=True)
class Reach:
    """How far to look: turns and sessions at most."""

    turns: int
    sessions: int


DEFAULT_REACH = {
    "hit-survives-half-pool": Reach(turns=5, sessions=3),
    "hit-survives-fit": Reach(turns=6, sessions=3),
}
"""A test shows that each is at least the smallest that catches all seeded bugs of its promise."""


@attrs.frozen(kw_only=True, slots=True)
class Question:
    """A promise under one release, with what is given. ``retention`` as in ``CacheConfig``;
    ``chunked``: prefill in steps of ``fixed.chunk`` blocks, or of any.
    """

    property_id: str
    release: str
    retention: int | None = DEFAULT
    chunked: bool = False
    fixed: Fixed = Fixed()
    reach: Reach | None = None

    @property
    def in_reach(self) -> Reach:
        """What was asked for, or the default."""
        return self.reach or DEFAULT_REACH[self.property_id]

    def setting(self, evicts_more: int = 0) -> Setting:
        """The class of runs, for the run level."""
        retention = self.retention
        if retention == DEFAULT:
            groups = (Group(kind="full", block_size=4), Group(kind="sliding_window", block_size=4, window=5))
            retention = CacheConfig(num_blocks=9, groups=groups, semantics=self.release).retention
        return Setting(
            release=self.release, retention=retention, chunked=self.chunked, evicts_more=evicts_more
        )

    @property
    def text(self) -> str:
        """The class of runs in words, for bounds."""
        setting = self.setting()
        return f"vLLM {self.release}; {setting.text}; {self.fixed.text}{run_level.steps_text(setting)}"


def answer(
    question: Question,
    limits: Limits,
    tell: Callable[[Done], None] = lambda _: None,
    *,
    evicts_more: int = 0,
    run: Callable[[Trace], Run] | None = None,
) -> Answer:
    """Prove or break one promise. ``evicts_more`` and ``run``: with a seeded bug in both."""
    if question.property_id not in RUN_LEVEL:
        raise BadInput(
            f"{question.property_id}: no encoding states this promise; provable: {', '.join(RUN_LEVEL)}"
        )
    promise = cast("Promise", question.property_id)
    setting, fixed, reach = question.setting(evicts_more), question.fixed, question.in_reach

    def induction(left: Limits) -> Done:
        sessions = reach.sessions
        return Done(
            text=f"any number of turns x {sessions} sessions",
            reply=run_level.induction(promise, setting, fixed, sessions, left),
            induction=True,
        )

    bounds: Iterator[Bound] = run_level.bounds(promise, setting, fixed, reach.turns, reach.sessions)
    found = prove(promise, bounds, limits, tell, run, induction)
    return attrs.evolve(found, bound=f"{found.bound}; {question.text}")
