"""Accounting: blocks, references, queue and index agree with one another at every moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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
