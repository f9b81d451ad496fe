"""Counterfactual runs: one change at a time, and whether the promise then holds.

A cause is only stated when the run with that one thing changed keeps the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import attrs

from hitproof.model import BadInput, Group, ModelManager, ModelTarget, Run, Scheduler, Trace
from hitproof.properties.story import Story
from hitproof.properties.verdict import Property


@attrs.frozen(kw_only=True, slots=True)
class Counterfactual:
    """One change, and what the property says of the changed run."""

    change: str
    outcome: Literal["holds", "still violated", "no longer at stake"]
    hits: tuple[int | None, ...]

    @property
    def text(self) -> str:
        """For example ``one block more: holds (hits 0 0 64)``. "no longer at stake": the changed run
        never met the promise's condition, so it says nothing.
        """
        hits = " ".join("-" if h is None else str(h) for h in self.hits)
        return f"{self.change}: {self.outcome} (hits {hits})"


def explain(trace: Trace, prop: Property) -> tuple[Counterfactual, ...]:
    """Run every change that this config and property allow."""
    found = []
    for change, run in _changes(trace):
        try:
            changed = run()
        except BadInput:
            continue
        check = prop.check(Story(changed, ModelTarget().run))
        outcome: Literal["holds", "still violated", "no longer at stake"] = "no longer at stake"
        if check.finding is not None:
            outcome = "still violated"
        elif check.evidence:
            outcome = "holds"
        found.append(Counterfactual(change=change, outcome=outcome, hits=changed.hits))
    return tuple(found)


def _changes(trace: Trace) -> Iterator[tuple[str, Callable[[], Run]]]:
    config = trace.config

    def under(**changes: object) -> Callable[[], Run]:
        def run() -> Run:
            changed = attrs.evolve(trace, config=attrs.evolve(config, **changes))  # type: ignore[arg-type]
            return Scheduler(changed, ModelManager(changed.config)).run("model")

        return run

    unit = config.scheduler_block_size
    yield f"one block more ({config.num_blocks + 1})", under(num_blocks=config.num_blocks + 1)
    yield f"twice the pool ({2 * config.num_blocks})", under(num_blocks=2 * config.num_blocks)
    if config.max_num_batched_tokens > unit:
        yield f"prefill in chunks of one block ({unit} tokens)", under(max_num_batched_tokens=unit)
    windowed = [g for g in config.groups if g.kind != "full"]
    if windowed and len(windowed) < len(config.groups):
        yield "full attention only", under(groups=tuple(g for g in config.groups if g.kind == "full")[:1])
    if windowed:
        every = tuple(Group(kind="full", block_size=g.block_size) for g in config.groups)
        yield "the same groups, all full attention", under(groups=every)
    if config.rules.retention:
        if config.retention != 0:
            yield "retention interval 0", under(retention_interval=0)
        if config.retention is not None:
            yield "retention interval null (dense)", under(retention_interval=None)
    if config.use_eagle:
        yield "EAGLE off", under(use_eagle=False)
    if len({g.block_size for g in config.groups}) > 1:
        yield (
            f"one block size ({unit})",
            under(groups=tuple(attrs.evolve(g, block_size=unit) for g in config.groups)),
        )
    yield "blocks freed first to last instead of last to first", lambda: _forward(trace)


def _forward(trace: Trace) -> Run:
    """The popular explanation of vllm#48435, eviction order, put to the test: free the head first."""
    manager = ModelManager(trace.config)
    original = manager.pool.free

    def free(blocks: object, *, unhashed_first: bool) -> None:
        original(reversed(list(blocks)), unhashed_first=unhashed_first)  # type: ignore[call-overload]

    manager.pool.free = free  # type: ignore[method-assign]
    return Scheduler(trace, manager).run("model")
