"""The block-level encoding: random runs are models of it, and seeded bugs are found within reach."""

import random

import attrs
import pytest

from hitproof.fuzz.bounded.answer import prove
from hitproof.fuzz.bounded.block_level import (
    PROMISES,
    SLOTS,
    STAGES,
    Unrolled,
    bounds,
    differences,
    menu_of,
    ops_of,
    turn_of,
)
from hitproof.fuzz.bounded.blocks import BUGS, Machine
from hitproof.fuzz.bounded.questions import DEFAULT_REACH
from hitproof.fuzz.bounded.solver import Limits, ask
from hitproof.fuzz.bounded.terms import STATED, neg
from hitproof.fuzz.seeded import with_and_without
from hitproof.model import (
    BadInput,
    CacheConfig,
    Group,
    ModelTarget,
    Semantics,
    Trace,
    parse_op,
)
from hitproof.properties.mutants import MUTANTS, mutated
from hitproof.properties.verdict import Verdict

SECONDS = 200
BUG = {mutant.id: mutant for mutant in MUTANTS}

FOUND = {
    "cached-to-head": (3, 0, 9),
    "one-token-short": (2, 1, 6),
    "eagle-drops-every-pass": (2, 3, 9),
    "evicted-key-stays": (3, 1, 6),
    "full-not-truncated": (3, 1, 6),
    "window-does-not-veto": (1, 3, 9),
    "pinned-late": (3, 3, 9),
    "hit-stays-queued": (4, 1, 8),
    "null-block-queued": (2, 1, 6),
    "unhashed-lost": (1, 1, 6),
    "shared-block-queued": (2, 0, 9),
    "shared-not-counted": (2, 0, 9),
    "skipped-freed-again": (2, 1, 6),
    "duplicate-overwrites": (2, 1, 6),
    "step-check-capped": (3, 5, 3),
    "hits-not-counted": (2, 1, 8),
    "unwritten-not-freed": (1, 0, 9),
    "abort-leaks": (2, 1, 6),
    "given-back-once": (3, 2, 9),
}
"""Seeded bugs that the block level states: after how many turns each is found, in which stage and pool."""


def group(rng, size):
    kind = rng.choice(("full", "sliding_window", "sliding_window", "chunked_local"))
    if kind == "full":
        return Group(kind=kind, block_size=size)
    return Group(
        kind=kind, block_size=size, **{"window" if kind == "sliding_window" else "chunk": rng.randint(1, 6)}
    )


def drawn(rng):
    """A random small config and menu that the encoding accepts."""
    while True:
        release = rng.choice(STATED)
        sizes = rng.choice(((1, 1), (2, 2), (2, 2), (1, 2), (2, 1), (2, 4), (3, 2)))
        groups = tuple(group(rng, rng.choice(sizes)) for _ in range(rng.randint(1, 3)))
        unit = max(g.block_size for g in groups) * min(g.block_size for g in groups)
        settings = {}
        if Semantics.of(release).retention:
            settings["retention_interval"] = rng.choice((None, 0, unit, 2 * unit))
        longest = 1 + 4 * min(g.block_size for g in groups)
        menu = []
        for j in range(rng.randint(1, 3)):
            prompt = f"{rng.choice('AB')}:{rng.randint(1, longest)}"
            if rng.random() < 0.4:
                prompt += f" {rng.choice('xy')}:{rng.randint(1, 2)}"
            menu.append(parse_op(f"submit m{j} {prompt} out={rng.choice((1, 1, 2))}"))
        try:
            config = CacheConfig(
                num_blocks=rng.randint(5, 16),
                groups=groups,
                semantics=release,
                use_eagle=rng.random() < 0.3,
                max_num_batched_tokens=rng.choice((2, 3, 4, 8, 50, 50)),
                max_num_seqs=SLOTS,
                **settings,
            )
            return menu_of(config, menu)
        except BadInput:
            continue


@pytest.mark.parametrize("seed", [0])
def test_random_runs_are_models_of_the_encoding(seed):
    """300 runs: after every turn the same ref counts, free queue, keys, tables and hit."""
    rng = random.Random(seed)
    turns = hits = evicted = aborts = 0
    for _ in range(300):
        menu = drawn(rng)
        machine, ops = Machine(menu, SLOTS), []
        for t in range(rng.randint(2, 8)):
            active = sum(slot.active for slot in machine.slots)
            choices = [("submit", j) for j in range(len(menu.items))] * 2
            choices += [("step", 0)] if active else []
            choice = rng.choice(choices + [("abort", k) for k in range(active)])
            new = ops_of(machine, choice, t)
            turn = turn_of(menu, SLOTS, choice)
            machine.turn(turn)
            if not all(valid is True for valid in machine.valid):
                break
            ops += new
            run = ModelTarget().run(Trace(config=menu.config, ops=tuple(ops)))
            assert differences(machine, run.observations[-1].snapshot) == ""
            if choice[0] == "submit":
                assert run.hits[-1] == turn.hit
                hits += turn.hit > 0
            assert not any(turn.broken(name) is True for name in PROMISES if name not in HIT_PROMISES)
            turns, aborts = turns + 1, aborts + (choice[0] == "abort")
        evicted += machine.evicted is True
    assert turns > 500
    assert hits > 70
    assert evicted > 20
    assert aborts > 10


HIT_PROMISES = (
    "resend-hits",
    "hit-covers",
    "hit-survives-half-pool",
    "check-implies-alloc",
    "footprint-bounded",
)
"""What some release's own rules break."""


SCRIPTS = (
    (0, (("submit", 0), ("submit", 1), ("step", 0), ("submit", 0))),
    (1, (("submit", 1), ("step", 0), ("submit", 2))),
    (2, (("submit", 0), ("step", 0), ("submit", 1), ("abort", 0))),
)


@pytest.mark.parametrize(("stage", "script"), SCRIPTS)
def test_the_symbolic_machine_is_the_concrete_one(stage, script):
    """With the choices given, Z3's only model is the state that the same code computes."""
    chosen = STAGES[stage]
    menu = menu_of(chosen.config("0.33.0", chosen.pools[-1]), chosen.submits())
    unrolled, machine = Unrolled(chosen, menu, ""), Machine(menu, SLOTS)
    fixed = []
    for choice in script:
        unrolled.extend()
        concrete = turn_of(menu, SLOTS, choice)
        machine.turn(concrete)
        flags = [*unrolled.turns[-1].submits, *unrolled.turns[-1].aborts]
        fixed += [
            flag if yes else neg(flag)
            for flag, yes in zip(flags, (*concrete.submits, *concrete.aborts), strict=True)
        ]
    assert all(valid is True for valid in machine.valid)
    reply = ask([*unrolled.machine.valid, *fixed], Limits.of(SECONDS), "QF_BV")
    assert reply.status == "sat"
    for name in ("ref", "key", "indexed", "queued"):
        symbolic = [reply.value(term) for term in getattr(unrolled.machine, name)]
        assert symbolic == getattr(machine, name)


@pytest.mark.parametrize("bug", FOUND)
def test_a_seeded_bug_is_found_within_reach(bug):
    """At the shipped reach the bug breaks its promise on the bent model, and not on the straight one."""
    mutant, (turns, stage, pool) = BUG[bug], FOUND[bug]
    reach = DEFAULT_REACH[mutant.breaks].turns
    assert reach >= turns
    only = (attrs.evolve(STAGES[stage], pools=(pool,)),)
    # Of one stage there is one bound per turn; the canonical choice among equals costs time alone.
    asked = list(bounds(mutant.breaks, mutant.semantics, turns, bug, only))[-1]
    asked = attrs.evolve(asked, smallest=())
    found = prove(mutant.breaks, [asked], Limits.of(SECONDS), run=mutated(mutant))
    assert found.verdict is Verdict.VIOLATED, found.reason
    assert found.bound.startswith(f"{turns} turns in {pool} blocks, ")
    bent, straight = with_and_without(mutant, found.trace, mutant.breaks)
    assert bent.finding is not None
    assert straight.finding is None


def test_default_reach_catches_every_bug_that_can_be_stated():
    """Each promise's default reach is at least the least that catches all of its seeded bugs."""
    assert set(FOUND) >= BUGS
    for bug, (turns, stage, pool) in FOUND.items():
        assert pool in STAGES[stage].pools
        assert DEFAULT_REACH[BUG[bug].breaks].turns >= turns


def test_every_stage_is_accepted_by_the_newest_release():
    """A stage that a release refuses is left out there; none is left out by its menu."""
    for stage in STAGES:
        for pool in stage.pools:
            assert menu_of(stage.config("0.33.0", pool), stage.submits()).items
