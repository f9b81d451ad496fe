"""Hit quality: what a lookup must find when it could."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

import attrs

from hitproof.model import Abort, Op, Snapshot, Span, Submit, Trace, common_prefix
from hitproof.properties.story import Return, Story, Subject
from hitproof.properties.verdict import Check, Finding

HALF = 0.5


def hit_survives_half_pool(story: Story, fraction: float = HALF) -> Check:
    """A continued session's hit is not zero while the working set never reached the fraction."""
    limit = fraction * story.config.num_blocks
    evidence = 0
    for back in story.returns:
        if back.peak >= limit:
            continue
        evidence += 1
        if back.hit.hit_tokens == 0:
            return Check(
                finding=_lost(
                    story,
                    "hit-survives-half-pool",
                    back,
                    expected=f"hit > 0 (working set {back.peak} of {story.config.num_blocks} blocks, under {fraction:g})",
                ),
                evidence=evidence,
            )
    return Check(evidence=evidence)


def hit_survives_fit(story: Story) -> Check:
    """A continued session hits in full while held blocks and the rest of the working set fit."""
    usable = story.config.num_blocks - 1
    loads: dict[int, int] = {}
    evidence = 0
    for back in story.returns:
        peak = 0
        for i in range(back.session.since, back.at + 1):
            if i not in loads:
                loads[i] = _load(story, i)
            peak = max(peak, loads[i])
        if peak > usable:
            continue
        evidence += 1
        if back.hit.hit_tokens < back.expected:
            expected = f"hit {back.expected} (at most {peak} of {usable} blocks held or needed)"
            return Check(finding=_lost(story, "hit-survives-fit", back, expected), evidence=evidence)
    return Check(evidence=evidence)


def _load(story: Story, i: int) -> int:
    """Blocks in use after observation ``i``, plus needs of the working set that none of them holds."""
    state = story.snapshot(i)
    if state is None:
        return story.config.num_blocks
    held = story.config.num_blocks - 1 - len(state.free_queue)
    needs = story.working_sets[i]
    covered = set()
    for block, entry in enumerate(state.keys):
        if entry is not None and state.ref_count[block] > 0:
            group, key, _ = entry
            covered.add((group, key))
    return held + len(needs - covered)


def resend_hits(story: Story) -> Check:
    """An identical prompt hits its last aligned boundary if nothing of the first was evicted."""
    evidence = 0
    for earlier, later, at in _pairs(story):
        if later.length != earlier.length or common_prefix(earlier.prompt, later.prompt) != later.length:
            continue
        expected = story.promised(later.length)
        evidence += expected > 0
        seen = _hit(story, at)
        if seen < expected:
            return Check(
                finding=_short(story, "resend-hits", at, later, expected, earlier), evidence=evidence
            )
    return Check(evidence=evidence)


def extension_hits(story: Story) -> Check:
    """A prompt that extends an earlier one hits what a resend of that one would."""
    evidence = 0
    for earlier, later, at in _pairs(story):
        if later.length <= earlier.length or common_prefix(earlier.prompt, later.prompt) != earlier.length:
            continue
        expected = story.promised(earlier.length)
        evidence += expected > 0
        if _hit(story, at) < expected:
            return Check(
                finding=_short(story, "extension-hits", at, later, expected, earlier), evidence=evidence
            )
    return Check(evidence=evidence)


def junction_hits(story: Story) -> Check:
    """After two requests diverged at a junction, a third sharing that prefix hits the junction."""
    evidence = 0
    pairs = list(_pairs(story))
    for first, third, at in pairs:
        for second, other, _ in pairs:
            if other is not third or second is first or second.first_lookup is None or first.served is None:
                continue
            if second.first_lookup < first.served:
                continue
            shared = common_prefix(first.prompt, second.prompt)
            if common_prefix(first.prompt, third.prompt) < shared:
                continue
            junction = shared // story.unit * story.unit
            if junction >= min(story.promised(first.length), story.promised(second.length)):
                continue
            expected = max(0, junction - story.unit) if story.config.use_eagle else junction
            expected = min(expected, story.promised(third.length))
            evidence += expected > 0
            if _hit(story, at) < expected:
                return Check(
                    finding=_short(story, "junction-hits", at, third, expected, second), evidence=evidence
                )
    return Check(evidence=evidence)


def mask_covers_lookup(story: Story) -> Check:
    """Just after a request is served, the index answers a resend of it in full."""
    evidence = 0
    if not story.config.enable_prefix_caching:
        return Check()
    for subject in story.subjects.values():
        at = subject.served
        if at is None or not _kept(subject, at):
            continue
        expected = story.promised(subject.length)
        state = story.snapshot(at)
        if expected == 0 or state is None:
            continue
        evidence += 1
        prompt_keys = subject.keys[: subject.length // story.config.key_block_size]
        answer = story.finder.find(IndexOf(state), prompt_keys, subject.length - 1)  # type: ignore[arg-type]
        if answer.hit_tokens < expected:
            finding = Finding(
                property_id="mask-covers-lookup",
                at=at,
                op=story.observations[at].op,
                request=subject.submit.request,
                expected=f"hit {expected} if re-sent now",
                seen=f"hit {answer.hit_tokens}",
                **missing(story, at, subject, expected),
            )
            return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def lookup_idempotent(story: Story) -> Check:
    """Looking up twice in a row gives the same answer."""
    evidence = 0
    for at, seen in story.calls("lookup"):
        evidence += 1
        if seen.hit != seen.again:
            assert seen.hit is not None
            assert seen.again is not None
            finding = Finding.of(
                "lookup-idempotent",
                at,
                seen,
                f"hit {seen.hit.hit_tokens}, blocks {seen.hit.blocks}",
                f"hit {seen.again.hit_tokens}, blocks {seen.again.blocks}",
            )
            return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def more_cache_never_hurts(story: Story) -> Check:
    """A lookup with a larger index hits at least as much as the same lookup with a smaller one."""
    evidence = 0
    lookups = story.calls("lookup")
    for n, (at, seen) in enumerate(lookups):
        assert seen.request is not None
        assert seen.hit is not None
        later = story.subjects[seen.request]
        for before, earlier_seen in lookups[:n]:
            assert earlier_seen.request is not None
            assert earlier_seen.hit is not None
            earlier = story.subjects[earlier_seen.request]
            same = (
                earlier.prompt.pieces == later.prompt.pieces
                and earlier.submit.identity == later.submit.identity
            )
            if not same or at != later.first_lookup or before != earlier.first_lookup:
                continue
            smaller, larger = story.cached_keys(before), story.cached_keys(at)
            if not all(a <= b for a, b in zip(smaller, larger, strict=True)):
                continue
            evidence += 1
            if seen.hit.hit_tokens < earlier_seen.hit.hit_tokens:
                finding = Finding.of(
                    "more-cache-never-hurts",
                    at,
                    seen,
                    f"hit >= {earlier_seen.hit.hit_tokens} (what {earlier_seen.request} hit with fewer keys)",
                    f"hit {seen.hit.hit_tokens}",
                )
                return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def names_do_not_matter(story: Story) -> Check:
    """Renaming streams and requests changes no hit and no block."""
    assert story.rerun is not None
    again = story.rerun(renamed(story.run.trace))
    for i, (a, b) in enumerate(zip(story.observations, again.observations, strict=False)):
        shown_a, shown_b = _anonymous(a.hit, a.blocks, a.snapshot), _anonymous(b.hit, b.blocks, b.snapshot)
        if shown_a != shown_b:
            finding = Finding.of("names-do-not-matter", i, a, "the same after renaming", f"{a.call} differs")
            return Check(finding=finding, evidence=i + 1)
    return Check(evidence=len(story.observations))


def _anonymous(hit: object, blocks: object, state: object) -> tuple[object, ...]:
    if isinstance(state, Snapshot):
        tables = sorted(tables for _, tables in state.tables)
        return hit, blocks, state.ref_count, state.free_queue, state.keys, state.index, tables
    return hit, blocks, state


def renamed(trace: Trace) -> Trace:
    """``trace`` with every stream and request renamed so that their alphabetical order reverses."""
    streams = sorted({span.stream for op in trace.ops if isinstance(op, Submit) for span in op.prompt})
    names = sorted(op.request for op in trace.ops if isinstance(op, Submit))
    request = {name: f"q{len(names) - i:05d}" for i, name in enumerate(names)}
    stream = {name: f"z{len(streams) - i:05d}" for i, name in enumerate(streams) if not name.startswith("@")}

    def rename(op: Op) -> Op:
        if isinstance(op, Submit):
            prompt = tuple(_rename_span(span, stream, request) for span in op.prompt)
            return attrs.evolve(op, request=request[op.request], prompt=prompt)
        if isinstance(op, Abort):
            return Abort(request=request[op.request])
        return op

    return attrs.evolve(trace, ops=tuple(rename(op) for op in trace.ops))


def _rename_span(span: Span, stream: Mapping[str, str], request: Mapping[str, str]) -> Span:
    if span.stream.startswith("@"):
        return Span(f"@{request[span.stream[1:]]}", span.start, span.stop)
    return Span(stream[span.stream], span.start, span.stop)


class IndexOf:
    """The index of a snapshot, with the one question that lookup asks."""

    def __init__(self, state: Snapshot) -> None:
        self._index = [dict(index) for index in state.index]

    def find(self, key: int, groups: tuple[int, ...]) -> list[int] | None:
        """The oldest block holding ``key`` in each group, or None if a group has none."""
        found = []
        for group in groups:
            holders = self._index[group].get(key)
            if holders is None:
                return None
            found.append(holders[0])
        return found


def _pairs(story: Story) -> list[tuple[Subject, Subject, int]]:
    """(earlier request, later request, its first lookup): served and wholly cached, one identity."""
    found = []
    for later in story.subjects.values():
        at = later.first_lookup
        if at is None:
            continue
        for earlier in story.subjects.values():
            if earlier is later or earlier.served is None or earlier.served >= at or not _kept(earlier, at):
                continue
            if earlier.submit.identity == later.submit.identity:
                found.append((earlier, later, at))
    return found


def _kept(subject: Subject, at: int) -> bool:
    return subject.lost is None or subject.lost > at


def _hit(story: Story, at: int) -> int:
    hit = story.observations[at].hit
    assert hit is not None
    return hit.hit_tokens


def _short(story: Story, name: str, at: int, later: Subject, expected: int, earlier: Subject) -> Finding:
    return Finding(
        property_id=name,
        at=at,
        op=story.observations[at].op,
        request=later.submit.request,
        expected=f"hit {expected} (nothing of {earlier.submit.request} was evicted)",
        seen=f"hit {_hit(story, at)}",
        **missing(story, at, later, expected),
    )


def _lost(story: Story, name: str, back: Return, expected: str) -> Finding:
    return Finding(
        property_id=name,
        at=back.at,
        op=story.observations[back.at].op,
        request=back.subject.submit.request,
        expected=expected,
        seen=f"hit {back.hit.hit_tokens} of {back.expected}",
        **missing(story, back.at, back.subject, back.expected),
    )


class Missing(TypedDict):
    """What a ``Finding`` says of a short hit's blocks: see there."""

    cause: Literal["", "evicted", "not written", "all cached"]
    reasons: tuple[str, ...]


def missing(story: Story, at: int, subject: Subject, length: int) -> Missing:
    """Which needed blocks the index lacks, and which allocation took each group's last one."""
    cached = story.cached_keys(at)
    cause: Literal["", "evicted", "not written", "all cached"] = "all cached"
    key_size = story.config.key_block_size
    out = []
    for g, rules in enumerate(story.rules):
        scale = rules.block_size // key_size
        positions = [(i, (i + 1) * scale - 1) for i in story.needed_blocks(g, length)]
        needed = [(i, subject.keys[at_key]) for i, at_key in positions if at_key < len(subject.keys)]
        missing = [(i, key) for i, key in needed if key not in cached[g]]
        if not missing:
            continue
        where = (
            f"group {g} ({story.config.groups[g].label}) lacks {len(missing)} of {len(needed)} needed blocks"
        )
        i, key = missing[-1]
        gone = next(
            (k for k in range(at, 0, -1) if story.snapshot(k - 1) and key in story.cached_keys(k - 1)[g]),
            None,
        )
        if gone is None:
            cause = "not written" if cause == "all cached" else cause
            out.append(f"{where}: block {i} of the prompt was never in its index")
            continue
        thief = story.observations[gone]
        if thief.call == "reset":
            cause = "not written" if cause == "all cached" else cause
            out.append(
                f"{where}: block {i} of the prompt was not written again after the reset in op {thief.op}"
            )
            continue
        cause = "evicted"
        state = story.snapshot(gone - 1)
        assert state is not None
        holder = dict(state.index[g])[key][0]
        place = state.free_queue.index(holder) if holder in state.free_queue else -1
        out.append(
            f"{where}: block {i} of the prompt (physical {holder}, place {place} of {len(state.free_queue)} in the free "
            f"queue) was taken by {thief.call} of {thief.request} in op {thief.op}"
        )
    return {"cause": cause, "reasons": tuple(out)}
