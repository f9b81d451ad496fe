"""Safety: what a lookup returns is right, and blocks in use stay untouched."""

from __future__ import annotations

from hitproof.model import NULL, Observation, cdiv
from hitproof.properties.story import Story
from hitproof.properties.verdict import Check, Finding

Ghost = tuple[int, int, int, int]
"""What a block really holds: (group, position in the sequence, identity of the prefix up to the last
key boundary inside it, tokens written)."""


def hit_content(story: Story) -> Check:
    """Each block that a lookup returns holds exactly the prefix that the request asked for."""
    ghosts: dict[int, Ghost] = {}
    size = story.config.key_block_size
    evidence = 0
    for at, seen in enumerate(story.observations):
        if seen.call == "lookup" and seen.hit is not None and seen.request is not None:
            for g, blocks in enumerate(seen.hit.blocks):
                block_size = story.rules[g].block_size
                scale = block_size // size
                for i, block in enumerate(blocks):
                    if block == NULL or (i + 1) * block_size > seen.hit.hit_tokens:
                        continue
                    evidence += 1
                    wanted = (g, i, story.true_keys[seen.request][(i + 1) * scale - 1], block_size)
                    if ghosts.get(block) != wanted:
                        expected = f"group {g} block {i} of {seen.request}'s prefix in physical block {block}"
                        what = _tell(ghosts.get(block))
                        return Check(
                            finding=Finding.of("hit-content", at, seen, expected, what), evidence=evidence
                        )
        if seen.call == "allocate" and seen.ok and seen.request is not None:
            _write(story, at, seen, ghosts)
    return Check(evidence=evidence)


def _tell(ghost: Ghost | None) -> str:
    if ghost is None:
        return "a block that nothing was written to"
    group, position, _, tokens = ghost
    return f"another prefix: {tokens} tokens of group {group}, block {position}"


def _write(story: Story, at: int, seen: Observation, ghosts: dict[int, Ghost]) -> None:
    """The step computes tokens ``computed`` on: they land in the request's blocks of every group."""
    state = story.snapshot(at)
    if state is None or seen.request is None:
        return
    tables = dict(state.tables).get(seen.request)
    if tables is None:
        return
    keys = story.true_keys[seen.request]
    size = story.config.key_block_size
    first, last = seen.computed, seen.computed + seen.new_tokens
    for g, table in enumerate(tables):
        block_size = story.rules[g].block_size
        for i in range(first // block_size, min(cdiv(last, block_size), len(table))):
            if table[i] == NULL:
                continue
            end = min(last, (i + 1) * block_size)
            boundary = end // size
            whole = keys[boundary - 1] if boundary and end % size == 0 else -1
            ghosts[table[i]] = (g, i, whole, end - i * block_size)


def hit_covers(story: Story) -> Check:
    """Every group's blocks end where the combined hit ends and hold what the next token needs."""
    evidence = 0
    for at, seen in story.calls("lookup"):
        hit = seen.hit
        assert hit is not None
        if hit.hit_tokens == 0 and not any(hit.blocks):
            continue
        for g, blocks in enumerate(hit.blocks):
            evidence += 1
            rules = story.rules[g]
            length = len(blocks) * rules.block_size
            if length != hit.hit_tokens:
                expected = f"group {g}: blocks for exactly {hit.hit_tokens} tokens"
                return Check(
                    finding=Finding.of("hit-covers", at, seen, expected, f"blocks for {length} tokens"),
                    evidence=evidence,
                )
            hole = next((i for i in rules.needed(hit.hit_tokens) if blocks[i] == NULL), None)
            if hole is not None:
                expected = f"group {g}: a real block at position {hole}"
                return Check(
                    finding=Finding.of("hit-covers", at, seen, expected, "the null block"), evidence=evidence
                )
    return Check(evidence=evidence)


def pinned_before_pop(story: Story) -> Check:
    """No block of an adopted hit is handed out as new in the same allocation."""
    evidence = 0
    for at, seen in story.calls("allocate"):
        if not seen.ok or seen.hit is None or seen.blocks is None:
            continue
        kept = {
            block
            for g, blocks in enumerate(seen.hit.blocks)
            for block in blocks[
                story.rules[g].skipped_tokens(seen.hit.hit_tokens) // story.rules[g].block_size :
            ]
        } - {NULL}
        if not kept:
            continue
        evidence += 1
        stolen = sorted(kept & {block for blocks in seen.blocks for block in blocks})
        state = story.snapshot(at)
        loose = sorted(block for block in kept if state is not None and state.ref_count[block] < 1)
        if stolen or loose:
            what = f"new blocks include {stolen}" if stolen else f"no reference to {loose}"
            return Check(
                finding=Finding.of("pinned-before-pop", at, seen, f"hit blocks {sorted(kept)} pinned", what),
                evidence=evidence,
            )
    return Check(evidence=evidence)


def sole_owner(story: Story) -> Check:
    """A block stands in two tables only as the same cached position of the same group."""
    evidence = 0
    for at, seen in enumerate(story.observations):
        state = story.snapshot(at)
        if state is None:
            continue
        owner: dict[int, tuple[str, int, int]] = {}
        for request, tables in state.tables:
            for g, table in enumerate(tables):
                for i, block in enumerate(table):
                    if block == NULL:
                        continue
                    evidence += 1
                    first = owner.setdefault(block, (request, g, i))
                    if first == (request, g, i):
                        continue
                    shared = first[1:] == (g, i) and first[0] != request and state.keys[block] is not None
                    if not shared:
                        what = f"also block {i} of group {g} of {request}"
                        expected = f"block {block} only as block {first[2]} of group {first[1]} of {first[0]}"
                        return Check(
                            finding=Finding.of("sole-owner", at, seen, expected, what), evidence=evidence
                        )
    return Check(evidence=evidence)


def null_block_inert(story: Story) -> Check:
    """The null block is never free, never cached and never handed out."""
    evidence = 0
    for at, seen in enumerate(story.observations):
        state = story.snapshot(at)
        if state is not None:
            evidence += 1
            if NULL in state.free_queue or state.keys[NULL] is not None:
                where = "in the free queue" if NULL in state.free_queue else "in the index"
                return Check(
                    finding=Finding.of("null-block-inert", at, seen, "the null block unused", where),
                    evidence=evidence,
                )
        if seen.blocks is not None and any(NULL in blocks for blocks in seen.blocks):
            return Check(
                finding=Finding.of(
                    "null-block-inert", at, seen, "the null block unused", "handed out as new"
                ),
                evidence=evidence,
            )
    return Check(evidence=evidence)


def keys_injective(story: Story) -> Check:
    """Two block prefixes have one key exactly when content, salt, LoRA name and path are equal."""
    meaning: dict[int, tuple[int, str]] = {}
    key_of: dict[int, int] = {}
    evidence = 0
    for name, subject in story.subjects.items():
        for key, true_key in zip(subject.keys, story.true_keys[name], strict=False):
            evidence += 1
            known, owner = meaning.setdefault(key, (true_key, name))
            if known != true_key:
                at = subject.first_lookup or 0
                expected = f"another key than {owner}'s"
                what = f"key {key} names a prefix of {owner} and another one of {name}"
                return Check(
                    finding=Finding.of("keys-injective", at, story.observations[at], expected, what),
                    evidence=evidence,
                )
            if key_of.setdefault(true_key, key) != key:
                at = subject.first_lookup or 0
                what = f"keys {key_of[true_key]} and {key} name one prefix of {name}"
                return Check(
                    finding=Finding.of("keys-injective", at, story.observations[at], "one key", what),
                    evidence=evidence,
                )
    return Check(evidence=evidence)
