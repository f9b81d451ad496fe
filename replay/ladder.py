"""The ladder: one trace on one rung after another, each beside the model, with one verdict format.

A rung is a target nearer to what people run than the one below it. ``replayed`` runs a trace twice on
one rung; ``climb`` goes up until a rung disagrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import attrs

from hitproof.model import BadInput, HarnessFault, ModelTarget, RequestResult, Run, Submit, Target, Trace
from hitproof.properties.registry import property_of
from hitproof.properties.story import Story
from hitproof.replay.content import Content
from hitproof.replay.engine import EngineTarget
from hitproof.replay.scale import KERNEL_BLOCK, fitting

RUNGS = ("model", "manager", "scheduler", "engine", "server")
"""From the abstract state machine to a live server."""

Verdict = Literal[
    "as expected", "not reproduced", "differs", "content differs", "unstable", "refused", "harness fault"
]

MOST_ROWS = 12
"""Requests shown; a table says how many are left out."""

HIT_CONTENT = "hit-content"
"""The promise that the engine shows in its own way: by what it answers."""

EXIT = {"as expected": 0, "refused": 2, "harness fault": 3}
"""Exit codes; 1 for the rest."""


@attrs.frozen(kw_only=True, slots=True)
class Tolerance:
    """Where a rung may show something else than the model, and why. ``rule``: what a replay makes of it."""

    rung: str
    what: str
    why: str
    rule: str


TOLERANCES = (
    Tolerance(
        rung="manager",
        what="nothing",
        why="the same scheduler drives vLLM's manager and the model",
        rule="hits and outcomes of all requests are equal",
    ),
    Tolerance(
        rung="scheduler",
        what="nothing; EAGLE is refused",
        why="the op list, the token budget and one step at a time leave vLLM's scheduler no other choice; with EAGLE it "
        "would schedule draft tokens",
        rule="hits and outcomes of all requests are equal",
    ),
    Tolerance(
        rung="engine",
        what="the hit of a request that ends, or is left, before its first output token",
        why="`num_cached_tokens` comes with a request's first output",
        rule="not compared; the replay counts such requests as unseen",
    ),
    Tolerance(
        rung="engine",
        what="asynchronous scheduling",
        why="one step more is scheduled before an output is known, and takes blocks for it",
        rule="switched off and read back; an engine that has it on is refused",
    ),
    Tolerance(
        rung="engine",
        what="EAGLE: slots for draft tokens, and a draft group",
        why="a draft model's layers make one group that drops a block, where the model has every group drop it",
        rule="refused by name",
    ),
    Tolerance(
        rung="server",
        what="steps, aborts and requests that overlap",
        why="over HTTP nobody chooses the step at which a request is admitted",
        rule="refused by name: a drain must follow every submit",
    ),
    Tolerance(
        rung="server",
        what="asynchronous scheduling, step budget, `max_num_seqs`",
        why="only a server in development mode shows them (`/server_info`)",
        rule="compared where shown and refused if they differ; else the replay says that they were not compared",
    ),
    Tolerance(
        rung="server",
        what="blocks that earlier requests left cached, without `/reset_prefix_cache`",
        why="a salt keeps their content apart, and unreferenced blocks go before those of the run, as never used ones do",
        rule="hits are equal all the same; nothing is tolerated",
    ),
)


@attrs.frozen(kw_only=True, slots=True)
class Row:
    """One request: what the model says and what the rung showed.

    ``unseen``: the rung cannot show this request's hit, see ``TOLERANCES``.
    """

    request: str
    prompt_tokens: int
    expected: str
    observed: str
    unseen: bool = False

    @property
    def same(self) -> bool:
        """Whether the rung agrees, as far as it can show it."""
        return self.unseen or self.expected == self.observed


@attrs.frozen(kw_only=True, slots=True)
class Replayed:
    """What one rung said of one trace. ``reason``: for every verdict but "as expected".

    ``promise``: of the counterexample's property here. ``notes``: what was not compared, and more.
    """

    rung: str
    target: str
    version: str
    verdict: Verdict
    reason: str = ""
    rows: tuple[Row, ...] = ()
    promise: str = ""
    notes: tuple[str, ...] = ()

    @property
    def stops(self) -> bool:
        """Whether a climb ends here: the rung disagrees, or cannot be trusted."""
        return self.verdict not in ("as expected", "not reproduced", "refused")

    @property
    def exit_code(self) -> int:
        """0 as expected, 1 a finding, 2 refused, 3 a harness fault."""
        return EXIT.get(self.verdict, 1)

    @property
    def headline(self) -> str:
        """For example ``manager (core) 0.25.0: differs at request r2``."""
        where = f"{self.target} {self.version}".strip()
        first = next((row.request for row in self.rows if not row.same), None)
        at = f" at request {first}" if self.verdict == "differs" and first is not None else ""
        verdict = "UNSTABLE" if self.verdict == "unstable" else self.verdict
        return f"{where}: {verdict}{at}"

    def lines(self) -> list[str]:
        """What people read below the headline."""
        out = ["  " + line for line in self.reason.splitlines()]
        if self.rows:
            width = max(7, *(len(row.request) for row in self.rows))
            first = next((i for i, row in enumerate(self.rows) if not row.same), 0)
            start = max(0, min(first - MOST_ROWS // 2, len(self.rows) - MOST_ROWS))
            shown = self.rows[start : start + MOST_ROWS]
            out.append(f"  {'request':{width}}  prompt  {'expected':>14}  {'observed':>14}")
            out += [f"  {start} requests before" for _ in range(start > 0)]
            for row in shown:
                mark = "" if row.same else "  <<" if row is self.rows[first] else "  <"
                seen = "unseen" if row.unseen else row.observed
                out.append(
                    f"  {row.request:{width}}  {row.prompt_tokens:>6}  {row.expected:>14}  {seen:>14}{mark}"
                )
            left = len(self.rows) - start - len(shown)
            out += [f"  {left} requests after" for _ in range(left > 0)]
        return out + [f"  {line}" for line in (self.promise, *self.notes) if line]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return attrs.asdict(self) | {"rows": [attrs.asdict(row) | {"same": row.same} for row in self.rows]}


def replayed(trace: Trace, target: Target, rung: str, property_id: str = "", *, times: int = 2) -> Replayed:
    """Run ``trace``, read back from its file form, ``times`` times on ``target`` and compare with the model.

    The model follows the rules of the target's release. ``property_id``: the promise that the trace is
    a counterexample to; it is judged on the target where that shows enough, else on the model's run,
    whose hits are the same. On the engine, answers are compared with cold ones, too.
    """
    copy = Trace.loads(trace.dumps())

    def say(version: str, verdict: Verdict, reason: str = "", **more: Any) -> Replayed:
        return Replayed(
            rung=rung, target=target.name, version=version, verdict=verdict, reason=reason, **more
        )

    try:
        first = target.run(copy)
        second = next((run for run in (target.run(copy) for _ in range(times - 1)) if run != first), first)
        content = target.content(copy) if isinstance(target, EngineTarget) else Content()
    except BadInput as error:
        factor = fitting(copy) if rung in ("engine", "server") else 1
        hint = (
            f"kernels take blocks of a multiple of {KERNEL_BLOCK} tokens: --scale {factor} gives such blocks"
        )
        return say(target.version, "refused", str(error), notes=(hint,) if factor > 1 else ())
    except HarnessFault as error:
        return say(target.version, "harness fault", str(error))
    notes = tuple(getattr(target, "notes", ()))
    polluted = None
    if isinstance(target, EngineTarget):
        notes = (*notes, content.text(target.device))
        polluted = content.first(target.device)
    if first != second:
        rows = rows_of(first, second, sees=first.sees)
        reason = _first_difference(trace, rows, "first run", "second run")
        return say(first.version, "unstable", f"two runs differ: {reason}", rows=rows, notes=notes)
    expected = ModelTarget().run(first.trace)
    rows = rows_of(expected, first, sees=first.sees)
    unseen = sum(row.unseen for row in rows)
    if unseen:
        notes = (*notes, f"{unseen} of {len(rows)} requests show no hit here: they had no output")
    more: dict[str, Any] = {"rows": rows, "notes": notes}
    if not all(row.same for row in rows) or _end(expected) != _end(first):
        return say(
            first.version, "differs", _first_difference(trace, rows, "expected", "observed", first), **more
        )
    if not property_id:
        if polluted is not None:
            return say(first.version, "content differs", polluted.where, **more)
        return say(first.version, "as expected", **more)
    prop = property_of(property_id)
    here = prop.needs <= Story(first, target.run).sees
    judged = Story(first, target.run) if here else Story(expected, ModelTarget().run)
    finding = prop.check(judged).finding
    broken = finding is not None
    how = "judged here" if here else "judged on the model's run with the same hits"
    more["promise"] = f"{property_id} {'VIOLATED' if broken else 'kept'}, {how}"
    named = finding.request if finding is not None and property_id == HIT_CONTENT else None
    if polluted is not None and polluted.request != named:
        return say(first.version, "content differs", polluted.where, **more)
    if polluted is None and named in {answer.request for answer in content.answers}:
        reason = (
            f"the model finds blocks of other content under {named}, but its answer from them is the cold one"
        )
        return say(first.version, "content differs", reason, **more)
    if broken:
        return say(first.version, "as expected", **more)
    return say(
        first.version,
        "not reproduced",
        f"under the rules of {first.trace.config.semantics} the promise is kept",
        **more,
    )


def rows_of(expected: Run, observed: Run, *, sees: frozenset[str]) -> tuple[Row, ...]:
    """The requests side by side. ``sees``: what the observed run shows."""
    ran = {result.id: result for result in observed.requests}
    rows = []
    for want in expected.requests:
        have = ran.get(want.id)
        unseen = (
            have is not None
            and "calls" not in sees
            and (have.hit_tokens is None and want.hit_tokens is not None and not have.finished)
            and (want.finished, want.aborted) == (have.finished, have.aborted)
        )
        rows.append(
            Row(
                request=want.id,
                prompt_tokens=want.prompt_tokens,
                expected=_outcome(want),
                observed="not submitted" if have is None else _outcome(have),
                unseen=unseen,
            )
        )
    return tuple(rows)


def _outcome(result: RequestResult) -> str:
    hit = "-" if result.hit_tokens is None else str(result.hit_tokens)
    return hit + ("" if result.finished else " aborted" if result.aborted else " unfinished")


def _end(run: Run) -> tuple[bool, bool]:
    return run.stuck is not None, bool(run.fault)


def _first_difference(
    trace: Trace, rows: tuple[Row, ...], expected: str, observed: str, run: Run | None = None
) -> str:
    ops = {op.request: i for i, op in enumerate(trace.ops) if isinstance(op, Submit)}
    for k, row in enumerate(rows):
        if not row.same:
            failed = f"; it failed: {run.fault}" if run is not None and run.fault else ""
            return (
                f"request {k} of {len(rows)}, {row.request} (ops[{ops[row.request]}]): "
                f"{expected} hit {row.expected}, {observed} {row.observed}{failed}"
            )
    if run is not None and run.fault:
        return f"the hits are the same, but it failed: {run.fault}"
    if run is not None and run.stuck is not None:
        return f"the hits are the same, but no progress was possible at ops[{run.stuck}]"
    return "the hits are the same, but not the rest of the runs"


Opener = Callable[[], AbstractContextManager[Target]]


def climb(
    trace: Trace, rungs: Iterable[tuple[str, Opener]], property_id: str = "", *, times: int = 2
) -> Iterable[Replayed]:
    """Replay ``trace`` rung by rung; the first that disagrees is the last.

    A rung that cannot be opened, or that refuses the trace, is said so and passed over: that is no
    disagreement.
    """
    for name, opened in rungs:
        try:
            with opened() as target:
                said = replayed(trace, target, name, property_id, times=times)
        except BadInput as error:
            said = Replayed(rung=name, target=name, version="", verdict="refused", reason=str(error))
        except HarnessFault as error:
            said = Replayed(rung=name, target=name, version="", verdict="harness fault", reason=str(error))
        yield said
        if said.stops:
            return
