"""Accounting: blocks, references, queue and index agree with one another at every moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from hitproof.model import NO_KEY, NULL, Snapshot, cdiv
from hitproof.properties.story import Story
from hitproof.properties.verdict import Check, Finding


def _states(story: Story, name: str, test: Callable[[Snapshot], tuple[str, str] | None]) -> Check:
    """Apply ``test`` to every state; it returns (expected, seen) where it fails."""
    evidence = 0
    for at, seen in enumerate(story.observations):
        state = story.snapshot(at)
        if state is None:
            continue
        evidence += 1
        wrong = test(state)
        if wrong is not None:
            expected, what = wrong
            finding = Finding.of(name, at, seen, expected, what)
            return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def pool_conserved(story: Story) -> Check:
    """Free blocks and blocks in use add up to the pool without its null block."""
    total = story.config.num_blocks - 1

    def test(state: Snapshot) -> tuple[str, str] | None:
        used = sum(count > 0 for count in state.ref_count[1:])
        if used + len(state.free_queue) == total:
            return None
        return f"{total} blocks", f"{used} in use + {len(state.free_queue)} free"

    return _states(story, "pool-conserved", test)


def queue_well_formed(story: Story) -> Check:
    """The free queue holds each block without references exactly once, and no other."""

    def test(state: Snapshot) -> tuple[str, str] | None:
        free = {block for block, count in enumerate(state.ref_count) if count == 0 and block != NULL}
        if len(set(state.free_queue)) != len(state.free_queue):
            twice = [block for block, n in Counter(state.free_queue).items() if n > 1]
            return "each block once", f"blocks {twice} twice"
        if set(state.free_queue) != free:
            return "all blocks without references", f"differs in {sorted(free ^ set(state.free_queue))}"
        return None

    return _states(story, "queue-well-formed", test)


def ref_count_is_holders(story: Story) -> Check:
    """A block's ref count is the number of block tables it stands in."""

    def test(state: Snapshot) -> tuple[str, str] | None:
        holders = Counter(block for _, tables in state.tables for table in tables for block in table)
        for block, count in enumerate(state.ref_count):
            if block != NULL and count != holders[block]:
                return f"ref count {holders[block]} of block {block}", f"{count}"
        return None

    return _states(story, "ref-count-is-holders", test)


def index_matches_blocks(story: Story) -> Check:
    """The index and the blocks' own keys say the same, both ways."""

    def test(state: Snapshot) -> tuple[str, str] | None:
        by_index = Counter(
            (g, key, block)
            for g, index in enumerate(state.index)
            for key, blocks in index
            for block in blocks
        )
        by_block = Counter(
            (entry[0], key, block)
            for block, entry in enumerate(state.keys)
            if entry is not None
            for key in (entry[1], *entry[2])
        )
        if by_index == by_block:
            return None
        g, key, block = min((by_index - by_block) + (by_block - by_index))
        side = "the index" if by_index[g, key, block] > by_block[g, key, block] else "the block"
        return "index and blocks agree", f"group {g} key {key}: only {side} names block {block}"

    return _states(story, "index-matches-blocks", test)


def check_implies_alloc(story: Story) -> Check:
    """Once the capacity check passes, the blocks are there."""
    evidence = 0
    for at, seen in story.calls("allocate"):
        evidence += 1
        if seen.fault:
            finding = Finding.of("check-implies-alloc", at, seen, "blocks, or a refusal", seen.fault)
            return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def drain_frees_all(story: Story) -> Check:
    """When no request is alive, no block is in use."""
    alive: set[str] = set()
    evidence = 0
    last = len(story.observations) - 1
    all_done = all(result.finished or result.aborted for result in story.run.requests)
    for at, seen in enumerate(story.observations):
        if seen.request is not None:
            if seen.call == "add":
                alive.add(seen.request)
            elif seen.call == "free" and story.subjects[seen.request].ended == at:
                alive.discard(seen.request)
        state = story.snapshot(at)
        idle = (seen.call == "free" and not alive) or (at == last and all_done)
        if not idle or state is None:
            continue
        evidence += 1
        used = [block for block, count in enumerate(state.ref_count) if count > 0 and block != NULL]
        if used or state.tables:
            finding = Finding.of("drain-frees-all", at, seen, "no block in use", f"blocks {used} in use")
            return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def footprint_bounded(story: Story) -> Check:
    """A request holds no more blocks of a windowed group than its window and one step need."""
    config = story.config
    caps = [rules.admission_cap(config.max_num_batched_tokens, config.max_model_len) for rules in story.rules]
    evidence = 0
    for at, seen in enumerate(story.observations):
        state = story.snapshot(at)
        if state is None:
            continue
        for request, tables in state.tables:
            for g, table in enumerate(tables):
                cap = caps[g]
                if cap is None:
                    cap = cdiv(len(story.subjects[request].sequence), story.rules[g].block_size)
                evidence += 1
                held = sum(block != NULL for block in table)
                if held > cap:
                    finding = Finding(
                        property_id="footprint-bounded",
                        at=at,
                        op=seen.op,
                        request=request,
                        expected=f"at most {cap} blocks of group {g} held",
                        seen=f"{held}",
                    )
                    return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def tail_goes_first(story: Story) -> Check:
    """A freed request's cached blocks are evicted last block first, group by group."""
    evidence = 0
    for at, seen in story.calls("free"):
        before, after = story.snapshot(at - 1), story.snapshot(at)
        if before is None or after is None or seen.request is None:
            continue
        place = {block: i for i, block in enumerate(after.free_queue)}
        for g, table in enumerate(dict(before.tables).get(seen.request, ())):
            queued = [b for b in table if b != NULL and after.keys[b] is not None and b in place]
            evidence += max(0, len(queued) - 1)
            for earlier, later in pairwise(queued):
                if place[earlier] < place[later]:
                    finding = Finding.of(
                        "tail-goes-first",
                        at,
                        seen,
                        f"group {g}: block {later}, later in the sequence, to be evicted before block {earlier}",
                        f"places {place[later]} and {place[earlier]} of the free queue",
                    )
                    return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def events_self_consistent(story: Story) -> Check:
    """Each call reports a key as removed, or stored, once for each block that lost, or got, it."""
    named = story.config.rules.events_name_group
    evidence = 0
    for at, seen in enumerate(story.observations):
        after = story.snapshot(at)
        before = story.snapshot(at - 1) if at else None
        if before is None or after is None or any(event.kind == "cleared" for event in seen.events):
            continue
        if not seen.events and before.index == after.index:
            continue
        taken = {block for blocks in seen.blocks or () for block in blocks}
        old, new = _held(before, named), _held(after, named)
        kept = {(where, block) for where, block in old & new if block not in taken}
        for kind, held in (("removed", old), ("stored", new)):
            expected = Counter(where for where, block in held if (where, block) not in kept)
            said = Counter((e.group, key) for e in seen.events if e.kind == kind for key in e.keys)
            evidence += said.total()
            if said != expected:
                where = min({*(said - expected), *(expected - said)}, key=str)
                finding = Finding.of(
                    "events-self-consistent",
                    at,
                    seen,
                    f"group {where[0]} key {where[1]} {kind} {expected[where]} times, once for each block",
                    f"{said[where]} times",
                )
                return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)


def _held(state: Snapshot, named: bool) -> set[tuple[tuple[int | None, int], int]]:
    """((group, key), block) for each key of each block; the group is None where events do not name it."""
    return {
        ((g if named else None, key), block)
        for g, index in enumerate(state.index)
        for key, blocks in index
        for block in blocks
    }


def events_replay_index(story: Story) -> Check:
    """Replaying the KV events, counted, gives the index."""
    named = story.config.rules.events_name_group
    replayed: Counter[tuple[int | None, int]] = Counter()
    evidence = 0
    for at, seen in enumerate(story.observations):
        for event in seen.events:
            evidence += 1
            if event.kind == "cleared":
                replayed.clear()
            for key in event.keys:
                replayed[event.group, key] += 1 if event.kind == "stored" else -1
        state = story.snapshot(at)
        if state is None or not seen.events:
            continue
        actual: Counter[tuple[int | None, int]] = Counter()
        for g, index in enumerate(state.index):
            for key, blocks in index:
                actual[g if named else None, key] += len(blocks)
        if +replayed != actual or min(replayed.values(), default=0) < 0:
            wrong = {*(replayed - actual), *(actual - replayed)}
            where, key = min(wrong, key=str) if wrong else (None, NO_KEY)
            finding = Finding.of(
                "events-replay-index",
                at,
                seen,
                f"group {where} key {key}: {actual[where, key]} blocks, as in the index",
                f"{replayed[where, key]} by the events",
            )
            return Check(finding=finding, evidence=evidence)
    return Check(evidence=evidence)
