"""Which encoding answers for which promise, and how far by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import attrs

from hitproof.fuzz.bounded import block_level, masks, odometer, run_level
from hitproof.fuzz.bounded.answer import Answer, Bound, Done, prove
from hitproof.fuzz.bounded.run_level import Fixed
from hitproof.fuzz.bounded.solver import Limits
from hitproof.fuzz.bounded.terms import STATED
from hitproof.model import BadInput, CacheConfig, Group, NotModelled, Run, Semantics, Trace
from hitproof.model.config import DEFAULT
from hitproof.model.semantics import parse_release

RUN_LEVEL = ("hit-survives-half-pool", "hit-survives-fit")
PROVABLE = tuple(dict.fromkeys((*RUN_LEVEL, *masks.PROMISES, *block_level.PROMISES)))

Level = Literal["run", "mask", "block"]
LEVELS: tuple[Level, ...] = ("run", "mask", "block")


def levels_of(property_id: str) -> tuple[Level, ...]:
    """The encodings that state a promise, the usual one first."""
    of: dict[Level, Any] = {"run": RUN_LEVEL, "mask": masks.PROMISES, "block": block_level.PROMISES}
    return tuple(level for level in LEVELS if property_id in of[level])


@attrs.frozen(kw_only=True, slots=True)
class Reach:
    """How far to look: turns and sessions at most; for masks the largest block size (tokens)."""

    turns: int = 0
    sessions: int = 0
    block_size: int = masks.MOST_SIZE


DEFAULT_REACH: dict[str, Reach] = {
    "hit-survives-half-pool": Reach(turns=5, sessions=3),
    "hit-survives-fit": Reach(turns=6, sessions=3),
    **{name: Reach(turns=3) for name in PROVABLE if name not in RUN_LEVEL},
    "sole-owner": Reach(turns=4),
}
"""A test shows that each is at least the smallest that catches all seeded bugs of its promise, at every
level that states it.
"""


@attrs.frozen(kw_only=True, slots=True)
class Question:
    """A promise under one release, with what is given. ``retention`` as in ``CacheConfig``, and "any";
    ``chunked``: prefill in steps of ``fixed.chunk`` blocks, or of any. ``eagle`` and ``equal`` (block
    sizes): None is both; for the mask promises alone.
    """

    property_id: str
    release: str
    retention: Any = DEFAULT
    chunked: bool = False
    eagle: bool | None = None
    equal: bool | None = None
    fixed: Fixed = Fixed()
    reach: Reach | None = None
    level: Level | None = None

    def __attrs_post_init__(self) -> None:
        if self.property_id not in PROVABLE:
            raise BadInput(
                f"{self.property_id}: no encoding states this promise; provable: {', '.join(PROVABLE)}"
            )
        if parse_release(Semantics.of(self.release).release) < parse_release(STATED[0]):
            raise NotModelled(
                f"{self.release}: no encoding states the rules of releases before {STATED[0]}; search them with `hitproof hunt`"
            )
        if self.level is not None and self.level not in levels_of(self.property_id):
            known = ", ".join(levels_of(self.property_id))
            raise BadInput(f"{self.property_id}: not stated at the {self.level} level; use {known}")
        if self.at != "mask" and (self.eagle is not None or self.equal is not None):
            raise BadInput(f"{self.property_id}: EAGLE and block sizes are for the mask level; remove them")
        if self.at != "run" and (self.chunked or self.fixed != Fixed()):
            raise BadInput(
                f"{self.property_id}: chunk, pool, groups, window and outputs are for the run level; remove them"
            )
        if self.at == "block" and self.retention != DEFAULT:
            raise BadInput(
                f"{self.property_id}: the block level's configs have their own retention; remove it"
            )

    @property
    def at(self) -> Level:
        """The level that is asked."""
        return self.level or levels_of(self.property_id)[0]

    @property
    def in_reach(self) -> Reach:
        """What was asked for, or the default."""
        return self.reach or DEFAULT_REACH[self.property_id]

    @property
    def kept(self) -> Any:
        """The retention in force: None dense, 0, or "any"."""
        if self.retention != DEFAULT:
            return self.retention
        groups = (Group(kind="full", block_size=4), Group(kind="sliding_window", block_size=4, window=5))
        return CacheConfig(num_blocks=9, groups=groups, semantics=self.release).retention

    @property
    def setting(self) -> odometer.Setting:
        """The class of runs, for the run level."""
        return odometer.Setting(release=self.release, retention=self.kept, chunked=self.chunked)

    @property
    def text(self) -> str:
        """The class of runs in words, for bounds."""
        if self.at == "block":
            return block_level.text(self.release)
        if self.at == "run":
            setting = self.setting
            return (
                f"vLLM {self.release}; {setting.text}; {self.fixed.text}{run_level.steps_text(setting)}; one request at "
                "a time, prompts of whole blocks and one token re-sent as they were, up to the first shortened hit"
            )
        size = self.in_reach.block_size
        return f"vLLM {self.release}; {masks.text(size, self.eagle, self._retention, self.equal)}"

    @property
    def _retention(self) -> Literal["any", "dense", "0"]:
        words: dict[Any, Literal["any", "dense", "0"]] = {None: "dense", 0: "0", "any": "any", DEFAULT: "any"}
        if self.retention not in words:
            raise BadInput(f"retention {self.retention}: write any, dense or 0")
        return words[self.retention]

    def bounds(self, **bug: Any) -> Iterator[Bound]:
        """The bounds in order. ``bug``: a seeded bug in the encoding's words."""
        reach = self.in_reach
        if self.at == "block":
            return block_level.bounds(self.property_id, self.release, reach.turns, **bug)
        if self.at == "run":
            return run_level.bounds(
                cast("odometer.Promise", self.property_id),
                attrs.evolve(self.setting, **bug),
                self.fixed,
                reach.turns,
                reach.sessions,
            )
        return masks.bounds(
            cast("masks.Promise", self.property_id),
            self.release,
            most_size=reach.block_size,
            eagle=self.eagle,
            retention=self._retention,
            equal=self.equal,
            **bug,
        )

    def induction(self, limits: Limits, **bug: Any) -> Done:
        """A proof for any number of turns, where the encoding has one."""
        sessions = self.in_reach.sessions
        promise = cast("odometer.Promise", self.property_id)
        setting = attrs.evolve(self.setting, **bug)
        return Done(
            text=f"any number of turns x {sessions} sessions",
            reply=run_level.induction(promise, setting, self.fixed, sessions, limits),
            induction=True,
        )


def answer(
    question: Question,
    limits: Limits,
    tell: Callable[[Done], None] = lambda _: None,
    *,
    run: Callable[[Trace], Run] | None = None,
    **bug: Any,
) -> Answer:
    """Prove or break one promise. ``bug`` and ``run``: a seeded bug, in the encoding and in the model."""
    beyond = (lambda left: question.induction(left, **bug)) if question.at == "run" else None
    found = prove(question.property_id, question.bounds(**bug), limits, tell, run, beyond)
    return attrs.evolve(found, bound=f"{found.bound}; {question.text}")
