"""Liveness: requests that fit get to run."""

from __future__ import annotations

from hitproof.model import Observation, Run, cdiv
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


def _unfinished(run: Run) -> list[str]:
    return [result.id for result in run.requests if not result.finished and not result.aborted]


def fits_alone_runs(story: Story) -> Check:
    """A request whose peak fits the empty pool is not refused for ever."""
    return _stuck(story, "fits-alone-runs", only_head=True)


def progress(story: Story) -> Check:
    """If every request fits alone, a drain ends with all of them finished."""
    return _stuck(story, "progress", only_head=False)


def _stuck(story: Story, name: str, *, only_head: bool) -> Check:
    usable = story.config.num_blocks - 1
    names = [result.id for result in story.run.requests]
    fitting = [r for r in names if footprint(story, story.subjects[r]) <= usable]
    evidence = len(fitting)
    if story.run.stuck is None:
        return Check(evidence=evidence)
    waiting = _unfinished(story.run)
    last = _last_refused(story)
    head = last.request if last is not None else None
    broken = head in fitting if only_head else all(r in fitting for r in waiting)
    if not broken:
        return Check(evidence=evidence)
    subject = story.subjects[head or waiting[0]]
    finding = Finding(
        property_id=name,
        at=len(story.observations) - 1,
        op=story.run.stuck,
        request=subject.submit.request,
        expected=f"it runs: its peak is {footprint(story, subject)} of {usable} blocks",
        seen="no step can make progress",
    )
    return Check(finding=finding, evidence=evidence)


def _last_refused(story: Story) -> Observation | None:
    return next((seen for _, seen in reversed(story.calls("allocate")) if not seen.ok), None)
