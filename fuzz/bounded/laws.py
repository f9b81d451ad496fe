"""What Z3 answers, section by section: the rows of docs/laws.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from hitproof.fuzz.bounded import cliff, invariants, run_level
from hitproof.fuzz.bounded.answer import Answer
from hitproof.fuzz.bounded.block_level import PROMISES as BLOCK_PROMISES
from hitproof.fuzz.bounded.odometer import Promise, Setting
from hitproof.fuzz.bounded.questions import Question, Reach, answer
from hitproof.fuzz.bounded.run_level import Fixed
from hitproof.fuzz.bounded.solver import Limits, ask
from hitproof.fuzz.bounded.terms import STATED
from hitproof.model import RELEASES, Semantics, Submit, Trace

Row = dict[str, Any]
Confirm = Callable[[Trace, str, str], str]
"""(trace, promise, release) -> what the release's own manager says."""

MASK_SWITCHES = (
    "write_mask",
    "eagle_drop",
    "eagle_window_alignment",
    "eagle_lookahead_limit",
    "retention",
    "replay_boundary",
)
RUN_SWITCHES = ("unhashed_first", "retention", "admission_cap")
PREFERRED = (
    "0.19.1",
    "0.20.0",
    "0.20.2",
    "0.22.1",
    "0.22.0",
    "0.23.0",
    "0.25.0",
    "0.28.0",
    "0.30.0",
    "0.33.0",
)
"""Of releases with the same rules, the one that is asked."""


def alike(switches: tuple[str, ...]) -> list[tuple[str, str]]:
    """(the release asked, all that share its switches) in order."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for release in STATED:
        rules = Semantics.of(release)
        groups.setdefault(tuple(getattr(rules, name) for name in switches), []).append(release)
    return [(next((r for r in PREFERRED if r in found), found[0]), _span(found)) for found in groups.values()]


def _span(releases: list[str]) -> str:
    """Runs of neighbouring releases."""
    runs: list[list[str]] = []
    for release in releases:
        if runs and RELEASES.index(runs[-1][-1]) + 1 == RELEASES.index(release):
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def masks(confirm: Confirm) -> Iterator[Row]:
    """mask-covers-lookup and extension-hits per release."""
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("EAGLE off", {"eagle": False}),
        ("EAGLE, one block size, dense", {"eagle": True, "equal": True, "retention": None}),
        ("EAGLE, one block size, retention 0", {"eagle": True, "equal": True, "retention": 0}),
        ("EAGLE, different block sizes", {"eagle": True, "equal": False}),
    )
    for name in ("mask-covers-lookup", "extension-hits"):
        for release, span in alike(MASK_SWITCHES):
            for kind, more in kinds:
                if more.get("retention") == 0 and not Semantics.of(release).retention:
                    continue
                question = Question(property_id=name, release=release, reach=Reach(block_size=3), **more)
                found = answer(question, Limits.of(60))
                if found.done:
                    yield {"releases": span, "settings": kind, **_row(found, release, confirm)}


def runs(confirm: Confirm) -> Iterator[Row]:
    """The two promises about the pool, per release, retention and prefill."""
    for name in ("hit-survives-half-pool", "hit-survives-fit"):
        for release, span in alike(RUN_SWITCHES):
            kept: tuple[int | None, ...] = (None, 0) if Semantics.of(release).retention else (None,)
            for retention in kept:
                for chunked in (False, True):
                    question = Question(
                        property_id=name,
                        release=release,
                        retention=retention,
                        chunked=chunked,
                        reach=Reach(turns=5, sessions=3),
                    )
                    found = answer(question, Limits.of(60))
                    yield {
                        "releases": span,
                        "settings": question.setting.text,
                        **_row(found, release, confirm),
                    }


def depth(_: Confirm) -> Iterator[Row]:
    """How far 60 seconds reach where hit-survives-fit holds: bounded, by induction, unbounded."""
    for chunked in (False, True):
        question = Question(
            property_id="hit-survives-fit",
            release="0.33.0",
            retention=0,
            chunked=chunked,
            reach=Reach(turns=64, sessions=4),
        )
        found = answer(question, Limits.of(60))
        yield {
            "question": f"bounded, {question.setting.text}",
            "answer": f"holds for {found.bound.partition(';')[0]}; then {found.word}: {found.reason}",
            "seconds": round(found.seconds, 1),
        }
        for sessions in (2, 3, 4):
            reply = run_level.induction(
                "hit-survives-fit", question.setting, Fixed(), sessions, Limits.of(60)
            )
            yield {
                "question": f"induction, any number of turns x {sessions} sessions, {question.setting.text}",
                "answer": _said(reply.status, reply.reason),
                "seconds": round(reply.seconds, 2),
            }


def half_pool(_: Confirm) -> Iterator[Row]:
    """Under retention 0 and chunked prefill: the largest pool with a counterexample, and a proof above."""
    setting = Setting(release="0.33.0", retention=0, chunked=True)
    promise: Promise = "hit-survives-half-pool"
    for windows in (1, 2, 3, 5, 8):
        for chunk in (1, 2, 4, 8):
            start = time.monotonic()
            largest = 0
            enough = 2 * (windows * chunk + 1)
            for blocks in range(3, enough + 3):
                found = run_level.bound(
                    promise, setting, Fixed(blocks=blocks, windows=windows, chunk=chunk), 3, 2
                )
                if ask([*found.premise, *found.broken], Limits.of(20)).status == "sat":
                    largest = blocks
            fixed = Fixed(least_blocks=max(largest + 1, 2), windows=windows, chunk=chunk)
            reply = run_level.induction(promise, setting, fixed, 3, Limits.of(60))
            yield {
                "windows": windows,
                "chunk": chunk,
                "largest": largest or "none",
                "above": _said(reply.status, reply.reason),
                "enough": enough,
                "seconds": round(time.monotonic() - start, 1),
            }


def half_pool_for_any(_: Confirm) -> Iterator[Row]:
    """The same for any number of window groups and any chunk, from 2 (Gs c + 1) blocks on."""
    setting = Setting(release="0.33.0", retention=0, chunked=True)
    for sessions in (2, 3):
        given = run_level.twice_the_transient
        reply = run_level.induction(
            "hit-survives-half-pool", setting, Fixed(), sessions, Limits.of(120), given
        )
        yield {
            "question": f"1 to 8 window groups, any chunk, any window, {sessions} sessions, any number of turns",
            "answer": _said(reply.status, reply.reason),
            "seconds": round(reply.seconds, 1),
        }


def occupancy(_: Confirm) -> Iterator[Row]:
    """The least occupancy at which a hit can vanish, 400 blocks, windows of 2 blocks."""
    for release, retention in (("0.22.0", None), ("0.33.0", None), ("0.33.0", 0)):
        for windows in (1, 2, 5):
            for single in (False, True):
                setting = Setting(release=release, retention=retention)
                fixed = Fixed(blocks=400, windows=windows, m=2, single=single)
                found = run_level.occupancy(setting, fixed, 5, 3, Limits.of(60))
                least = "none found" if found.working_set is None else f"{found.working_set}"
                share = "" if found.working_set is None else f"{found.working_set / found.of:.4f}"
                yield {
                    "release": release,
                    "settings": f"{setting.text}, {1 if single else 2} output tokens",
                    "windows": windows,
                    "least": least,
                    "share": share,
                    "proof": f"none lower in {found.bound}"
                    if found.proven
                    else f"none below {found.none_below}",
                    "seconds": round(found.seconds, 1),
                }


def law(_: Confirm) -> Iterator[Row]:
    """The law of the cliff against the model."""
    for seed in range(4):
        start = time.monotonic()
        wrong = [error for error in cliff.errors(1000, seed) if error]
        yield {
            "seed": seed,
            "workloads": 1000,
            "wrong": len(wrong),
            "largest": max(map(abs, wrong), default=0),
            "seconds": round(time.monotonic() - start, 1),
        }


def example(_: Confirm) -> Iterator[Row]:
    """Where 4 sessions fall in 400 blocks of 32 tokens, five windows of 64 beside one full group."""
    for release, retention in (
        ("0.22.0", None),
        ("0.23.0", None),
        ("0.25.0", None),
        ("0.33.0", None),
        ("0.33.0", 0),
    ):
        for outputs in (1, 2):
            config = cliff.example(release, retention)
            full = [
                n
                for n in range(1, 64)
                if cliff.law(config, cliff.Workload(sessions=4, prefix=32 * n, outputs=outputs)).needed < 400
            ]
            longest = 32 * max(full)
            seen = [
                cliff.full(config, cliff.Workload(sessions=4, prefix=length, outputs=outputs))
                for length in (longest, longest + 32)
            ]
            yield {
                "release": release,
                "retention": "dense" if retention is None else retention,
                "outputs": outputs,
                "tokens": longest,
                "model": "the same" if seen == [True, False] else f"differs: {seen}",
            }


def unbounded(_: Confirm) -> Iterator[Row]:
    """Horn clauses: what holds for any pool, and what refutes it."""
    reply = invariants.accounting(Limits.of(60))
    yield {
        "question": ", ".join(invariants.ACCOUNTING),
        "answer": _said(reply.status, reply.reason),
        "seconds": round(reply.seconds, 2),
    }
    for bug, promise in invariants.BUGS.items():
        reply = invariants.accounting(Limits.of(60), promise, bug)
        yield {
            "question": f"{promise} with `{bug}`",
            "answer": _said(reply.status, reply.reason),
            "seconds": round(reply.seconds, 2),
        }
    for text, more in (
        (
            "hit-survives-fit, any number of sessions, turns and sizes, nothing but live blocks joins the tail",
            {},
        ),
        ("the same in a pool one block smaller than what is held or needed", {"short": 1}),
        ("the same where blocks that no hit needs join the tail (dense, or before 0.24)", {"dense": True}),
    ):
        reply = invariants.sessions(Limits.of(60), **cast("dict[str, Any]", more))
        yield {
            "question": text,
            "answer": _said(reply.status, reply.reason),
            "seconds": round(reply.seconds, 2),
        }


def blocks(confirm: Confirm) -> Iterator[Row]:
    """Every promise that the block level states, on the newest release, two turns deep."""
    for name in BLOCK_PROMISES:
        question = Question(property_id=name, release="0.33.0", level="block", reach=Reach(turns=2))
        found = answer(question, Limits.of(60))
        yield {"promise": name, **_row(found, "0.33.0", confirm)}


SECTIONS: dict[str, Callable[[Confirm], Iterator[Row]]] = {
    "masks": masks,
    "runs": runs,
    "depth": depth,
    "half-pool": half_pool,
    "half-pool-for-any": half_pool_for_any,
    "occupancy": occupancy,
    "law": law,
    "example": example,
    "unbounded": unbounded,
    "blocks": blocks,
}


def _said(status: str, reason: str) -> str:
    return {"unsat": "holds", "sat": "refuted"}.get(status, f"UNKNOWN ({reason})")


def _row(found: Answer, release: str, confirm: Confirm) -> Row:
    row: Row = {
        "promise": found.property_id,
        "asked": release,
        "verdict": found.word,
        "bound": found.bound.partition("; vLLM")[0],
        "seconds": round(found.seconds, 1),
        "reason": found.reason or found.fault,
        "minimal": found.minimal,
        "trace": "",
        "vllm": "",
    }
    if found.trace is not None:
        config = found.trace.config
        labels = [group.label for group in config.groups]
        groups = ", ".join(
            f"{labels.count(x)} x {x}" if labels.count(x) > 1 else x for x in dict.fromkeys(labels)
        )
        ops = "; ".join(
            str(op).removeprefix("submit ") if isinstance(op, Submit) else "" for op in found.trace.ops
        )
        ops = "; ".join(part for part in ops.split("; ") if part)
        row["trace"] = f"{config.num_blocks} blocks, {groups}: {ops}"
        row["vllm"] = confirm(found.trace, found.property_id, release)
    return row
