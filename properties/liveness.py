"""Liveness: requests that fit get to run."""

from __future__ import annotations

from hitproof.model import Drain, Submit, cdiv
from hitproof.properties.story import Story, Subject
from hitproof.properties.verdict import Check, Finding


def footprint(story: Story, subject: Subject) -> int:
    """Blocks that one request needs at its peak when it runs alone."""
    config = story.config
    blocks = 0
    for rules in story.rules:
        whole = cdiv(len(subject.sequence), rules.block_size)
        cap = rules.admission_cap(config.max_num_batched_tokens, config.max_model_len)
        blocks += whole if cap is None else min(whole, cap)
    return blocks


def _alive(story: Story, op: int) -> list[str]:
    """Requests submitted before ``op`` that are not done after it."""
    results = {result.id: result for result in story.run.requests}
    found = []
    for submit in story.run.trace.ops[:op]:
        if isinstance(submit, Submit):
            result, ended = results[submit.request], story.subjects[submit.request].ended
            done = result.finished or result.aborted
            if not done or (ended is not None and story.observations[ended].op > op):
                found.append(submit.request)
    return found


def fits_alone_runs(story: Story) -> Check:
    """A request whose peak fits the empty pool is not refused for ever."""
    fitting = _fitting(story)
    op = story.run.stuck
    if op is None:
        return Check(evidence=len(fitting))
    refused = (seen.request for _, seen in reversed(story.calls("allocate")) if not seen.ok and seen.op <= op)
    head = next(refused, None)
    if head not in fitting:
        return Check(evidence=len(fitting))
    return _broken(story, "fits-alone-runs", op, head, len(fitting))


def progress(story: Story) -> Check:
    """If every request fits alone, a drain ends with all of them finished."""
    fitting = _fitting(story)
    op = story.run.stuck
    if op is None and not story.run.fault:
        drains = [i for i, done in enumerate(story.run.trace.ops) if isinstance(done, Drain)]
        op = drains[-1] if drains else None
    left = [] if op is None else _alive(story, op)
    if op is None or not left or not all(name in fitting for name in left):
        return Check(evidence=len(fitting))
    return _broken(story, "progress", op, left[0], len(fitting))


def _fitting(story: Story) -> list[str]:
    usable = story.config.num_blocks - 1
    names = [result.id for result in story.run.requests]
    return [name for name in names if footprint(story, story.subjects[name]) <= usable]


def _broken(story: Story, name: str, op: int, request: str, evidence: int) -> Check:
    last = max(i for i, seen in enumerate(story.observations) if seen.op <= op)
    usable = story.config.num_blocks - 1
    finding = Finding(
        property_id=name,
        at=last,
        op=op,
        request=request,
        expected=f"it runs: its peak is {footprint(story, story.subjects[request])} of {usable} blocks",
        seen="no step can make progress" if story.run.stuck is not None else "it is forgotten",
    )
    return Check(finding=finding, evidence=evidence)
