"""Questions at the block level: small pools, a menu of prompts, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import z3

from hitproof.fuzz.bounded.answer import Bound
from hitproof.fuzz.bounded.blocks import BUGS, Machine
from hitproof.fuzz.bounded.menu import Menu
from hitproof.fuzz.bounded.slots import Turn, pick
from hitproof.fuzz.bounded.solver import Reply
from hitproof.model import (
    Abort,
    BadInput,
    CacheConfig,
    Group,
    ModelManager,
    Op,
    Run,
    Semantics,
    Snapshot,
    Step,
    Submit,
    Trace,
    Unseen,
    parse_op,
)
from hitproof.properties.mutants import MUTANTS

SLOTS = 2
"""Requests that run at once."""

PROMISES = (
    "pool-conserved",
    "queue-well-formed",
    "ref-count-is-holders",
    "index-matches-blocks",
    "check-implies-alloc",
    "drain-frees-all",
    "footprint-bounded",
    "hit-content",
    "hit-covers",
    "pinned-before-pop",
    "sole-owner",
    "null-block-inert",
    "resend-hits",
    "hit-survives-half-pool",
)


@attrs.frozen(kw_only=True, slots=True)
class Stage:
    """A small config in some pools (blocks), and the prompts of its menu."""

    groups: tuple[Group, ...]
    menu: tuple[str, ...]
    pools: tuple[int, ...]
    settings: dict[str, Any] = attrs.Factory(dict)

    def config(self, release: str, pool: int) -> CacheConfig:
        """Its config in one release; BadInput if the release refuses it."""
        settings = dict(self.settings)
        if not Semantics.of(release).retention:
            settings.pop("retention_interval", None)
        return CacheConfig(
            num_blocks=pool, groups=self.groups, semantics=release, max_num_seqs=SLOTS, **settings
        )

    def submits(self) -> list[Submit]:
        """The menu's ops."""
        found = [parse_op(f"submit m{j} {line}") for j, line in enumerate(self.menu)]
        return [op for op in found if isinstance(op, Submit)]

    @property
    def text(self) -> str:
        """For bounds."""
        more = [f"{name} {value}" for name, value in self.settings.items()]
        groups = " ".join(group.label for group in self.groups)
        return groups + (f" ({', '.join(more)})" if more else "") + f", menu {' | '.join(self.menu)}"


def _hybrid(window_size: int, window: int, full_size: int) -> tuple[Group, Group]:
    return (
        Group(kind="sliding_window", block_size=window_size, window=window),
        Group(kind="full", block_size=full_size),
    )


STAGES = (
    Stage(groups=_hybrid(4, 5, 4), menu=("A:5", "B:5 out=2", "C:2"), pools=(9,)),
    Stage(groups=_hybrid(2, 3, 2), menu=("A:3", "B:4 out=2", "A:2 C:2"), pools=(6, 8)),
    Stage(
        groups=_hybrid(1, 2, 2),
        menu=("A:4", "A:6", "B:3"),
        pools=(9,),
        settings={"max_num_batched_tokens": 2},
    ),
    Stage(groups=_hybrid(2, 3, 2), menu=("A:5", "B:4"), pools=(9,), settings={"use_eagle": True}),
    Stage(
        groups=_hybrid(2, 3, 2),
        menu=("A:5", "B:4 out=2"),
        pools=(8,),
        settings={"retention_interval": None},
    ),
    Stage(
        groups=(Group(kind="chunked_local", block_size=2, chunk=1), Group(kind="full", block_size=2)),
        menu=("A:3", "B:2"),
        pools=(3,),
        settings={"max_num_batched_tokens": 1, "scheduler_reserve_full_isl": False},
    ),
)
"""One block size, different ones under chunked prefill, EAGLE's drop, dense retention, chunked local."""


def bounds(
    promise: str, release: str, turns: int, bug: str = "", stages: tuple[Stage, ...] = STAGES
) -> Iterator[Bound]:
    """Fewest turns first, of those the smallest pool."""
    unrolled = [
        found
        for pool in sorted({pool for stage in stages for pool in stage.pools})
        for stage in stages
        if pool in stage.pools
        for found in _unrolled(release, stage, pool, bug)
    ]
    for _ in range(turns):
        for stage in unrolled:
            stage.extend()
            yield stage.bound(promise)


def text(release: str) -> str:
    """The class of runs in words, for bounds."""
    stages = "; ".join(f"{stage.text} in {', '.join(map(str, stage.pools))} blocks" for stage in STAGES)
    return (
        f"vLLM {release}; at most {SLOTS} requests at once, a submission, an abort or neither in each turn, "
        f"no waiting and no preemption; configs: {stages}"
    )


def menu_of(config: CacheConfig, submits: list[Submit], bug: str = "") -> Menu:
    """The menu by the release's rules, bent by a seeded bug that is not stated in the encoding."""
    manager = ModelManager(config)
    if bug and bug not in BUGS:
        next(mutant for mutant in MUTANTS if mutant.id == bug).apply(manager)
    return Menu(manager, submits)


def _unrolled(release: str, stage: Stage, pool: int, bug: str) -> list[Unrolled]:
    """One, or none if the release refuses the config."""
    try:
        config = stage.config(release, pool)
    except BadInput:
        return []
    return [Unrolled(stage, menu_of(config, stage.submits(), bug), bug)]


class Unrolled:
    """One stage in one pool, unrolled as far as was asked."""

    def __init__(self, stage: Stage, menu: Menu, bug: str) -> None:
        self.stage, self.menu, self.bug = stage, menu, bug
        self.stated = bug if bug in BUGS else ""
        self.machine = Machine(menu, SLOTS, self.stated)
        self.turns: list[Turn] = []

    def extend(self) -> None:
        """One turn more."""
        t = len(self.turns)
        turn = Turn(
            submits=[z3.Bool(f"submit{t}_{j}") for j in range(len(self.menu.items))],
            aborts=[z3.Bool(f"abort{t}_{k}") for k in range(SLOTS)],
        )
        self.machine.turn(turn)
        self.turns.append(turn)

    def bound(self, promise: str) -> Bound:
        """Exactly these turns; the last one breaks the promise."""
        made, menu, last = list(self.turns), self.menu, self.turns[-1]

        def script(reply: Reply) -> list[Choice]:
            return [_choice(turn, reply) for turn in made]

        def agrees(reply: Reply, run: Run) -> str:
            return "" if self.bug else disagreement(Machine(menu, SLOTS), script(reply), run)

        flags = [flag for turn in made for flag in (*turn.submits, *turn.aborts)]
        return Bound(
            text=f"{len(made)} turns in {menu.config.num_blocks} blocks, {self.stage.text}",
            premise=[*self.machine.valid, last.speaks(promise)],
            broken=[last.broken(promise)],
            smallest=[("", pick(flag, 1, 0)) for flag in flags],
            decode=lambda reply: play(Machine(menu, SLOTS, self.stated), script(reply))[0],
            agrees=agrees,
            logic="QF_BV",
        )


Choice = tuple[str, int]
"""What one turn does: ("submit", item), ("abort", slot) or ("step", 0)."""


def turn_of(menu: Menu, slots: int, choice: Choice) -> Turn:
    """A concrete turn."""
    kind, which = choice
    return Turn(
        submits=[kind == "submit" and which == j for j in range(len(menu.items))],
        aborts=[kind == "abort" and which == k for k in range(slots)],
    )


def ops_of(machine: Machine, choice: Choice, t: int) -> list[Op]:
    """The ops of turn ``t``, from the machine's concrete state before it."""
    kind, which = choice
    if kind == "abort":
        return [Abort(request=f"r{machine.slots[which].turn}")]
    if kind == "step":
        return [Step()]
    return [attrs.evolve(machine.menu.items[which].submit, request=f"r{t}"), Step()]


def differences(machine: Machine, state: Snapshot) -> str:
    """How a concrete machine differs from the model's state; empty if it does not."""
    queue = tuple(sorted((b for b in machine.blocks if machine.queued[b]), key=lambda b: machine.place[b]))
    names = {(g, k) for item in machine.menu.items for g, ks in enumerate(item.keys) for k in ks}
    names |= {(g, t[2]) for item in machine.menu.items for g, t in enumerate(item.tail) if t is not None}
    number = {machine.id_of(g, k): (g, k) for g, k in names}
    keys = tuple(number.get(machine.key[b]) for b in machine.blocks)
    tables = tuple(
        tuple(
            tuple(block for block, has in zip(row, flags, strict=True) if has)
            for row, flags in zip(slot.table, slot.has, strict=True)
        )
        for slot in machine.slots
        if slot.active
    )
    mine: dict[str, Any] = {
        "ref counts": tuple(machine.ref[1:]),
        "free queue": queue,
        "keyed blocks": tuple(key and key[0] for key in keys),
        "tables": sorted(tables),
    }
    theirs = {
        "ref counts": state.ref_count[1:],
        "free queue": state.free_queue,
        "keyed blocks": tuple(key and key[0] for key in state.keys[1:]),
        "tables": sorted(tables for _, tables in state.tables),
    }
    return "; ".join(
        f"{name}: {mine[name]} in the encoding, {theirs[name]} in the model"
        for name in mine
        if mine[name] != theirs[name]
    )


def _choice(turn: Turn, reply: Reply) -> Choice:
    submits = [bool(reply.value(x)) for x in turn.submits]
    aborts = [bool(reply.value(x)) for x in turn.aborts]
    if any(submits):
        return "submit", submits.index(True)
    return ("abort", aborts.index(True)) if any(aborts) else ("step", 0)


def play(machine: Machine, script: list[Choice]) -> tuple[Trace, list[int]]:
    """The trace of a script, and after how many ops each turn ends."""
    ops: list[Op] = []
    ends = []
    for t, choice in enumerate(script):
        ops += ops_of(machine, choice, t)
        machine.turn(turn_of(machine.menu, SLOTS, choice))
        ends.append(len(ops))
    # Made anew: a seeded bug may have bent the rules inside the menu's.
    return Trace(config=attrs.evolve(machine.menu.config), ops=tuple(ops)), ends


def disagreement(machine: Machine, script: list[Choice], run: Run) -> str:
    """How the encoding differs from a run of the model of the same script, turn by turn."""
    done = 0
    for t, choice in enumerate(script):
        done += len(ops_of(machine, choice, t))
        machine.turn(turn_of(machine.menu, SLOTS, choice))
        state = [seen.snapshot for seen in run.observations if seen.op < done][-1]
        if isinstance(state, Unseen):
            return ""
        wrong = differences(machine, state)
        if wrong:
            return f"after turn {t + 1}: {wrong}"
    return ""
