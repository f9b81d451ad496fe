"""``Story``: one run with everything that more than one property asks about it, computed once.

Words: a request is *served* when all its prompt tokens are computed. A *session* is a chain of
requests of one identity whose sequences extend one another. All lengths are in tokens, working sets
in blocks. A *need* is (group, key): a block that must stay cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import attrs

from hitproof.model import (
    KeyTable,
    Lookup,
    Observation,
    Run,
    Snapshot,
    Submit,
    Tokens,
    Trace,
    Unseen,
    common_prefix,
    resolve,
)
from hitproof.model.lookup import Finder

Need = tuple[int, int]


@attrs.define(kw_only=True, slots=True, eq=False)
class Subject:
    """A request as the properties see it. ``sequence``: prompt and whole output. ``keys``: the keys of
    its blocks, in order.
    """

    submit: Submit
    prompt: Tokens
    sequence: Tokens
    keys: list[int] = attrs.Factory(list)
    first_lookup: int | None = None
    served: int | None = None
    ended: int | None = None
    lost: int | None = None
    """Observation after which one of its keys is no longer in some group's index."""

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.prompt)


@attrs.frozen(kw_only=True, slots=True)
class Session:
    """A live session: its latest request, since when it must stay cached, and its needs."""

    subject: Subject
    since: int
    needs: frozenset[Need]


@attrs.frozen(kw_only=True, slots=True)
class Return:
    """A first lookup by a request that continues a session. ``peak``: largest working set since."""

    at: int
    subject: Subject
    session: Session
    expected: int
    hit: Lookup
    peak: int


class Story:
    """A run, read once. ``rerun`` lets metamorphic properties run a changed trace."""

    def __init__(self, run: Run, rerun: Callable[[Trace], Run] | None = None) -> None:
        self.run = run
        self.config = run.trace.config
        self.observations = run.observations
        self.rerun = rerun
        self.sees = run.sees | ({"rerun"} if rerun is not None else set())
        self.rules = self.config.group_rules()
        self.unit = self.config.scheduler_block_size

    def snapshot(self, i: int) -> Snapshot | None:
        """The state after observation ``i``; None if it was not seen."""
        state = self.observations[i].snapshot
        return None if isinstance(state, Unseen) else state

    @cached_property
    def subjects(self) -> dict[str, Subject]:
        """Every submitted request, with what happened to it."""
        outputs: dict[str, int] = {}
        found: dict[str, Subject] = {}
        for op in self.run.trace.ops:
            if isinstance(op, Submit):
                tokens = resolve(op, outputs)
                outputs[op.request] = op.output_tokens
                sequence = Tokens([*tokens.pieces, (f"@{op.request}", 0, op.output_tokens)])
                found[op.request] = Subject(submit=op, prompt=tokens, sequence=sequence)
        for i, seen in enumerate(self.observations):
            if seen.request is None:
                continue
            subject = found[seen.request]
            if seen.call in ("add", "append"):
                subject.keys.extend(seen.keys)
            elif seen.call == "lookup" and subject.first_lookup is None:
                subject.first_lookup = i
            elif seen.call == "allocate" and seen.ok and subject.served is None:
                if seen.computed + seen.new_tokens >= subject.length:
                    subject.served = i
            elif seen.call == "free":
                subject.ended = i
        self._mark_losses(found)
        return found

    def _mark_losses(self, subjects: dict[str, Subject]) -> None:
        """Since when a full-block key of each request is missing from an index that once had it."""
        owners: dict[int, list[tuple[Subject, int]]] = {}
        for subject in subjects.values():
            for position, key in enumerate(subject.keys):
                owners.setdefault(key, []).append((subject, position))
        scales = [rules.block_size // self.config.key_block_size for rules in self.rules]
        before: list[frozenset[int]] | None = None
        for i in range(len(self.observations)):
            state = self.snapshot(i)
            if state is None:
                continue
            after = self.cached_keys(i)
            if before is not None and before is not after:
                for g, (old, new) in enumerate(zip(before, after, strict=True)):
                    for key in old - new:
                        for subject, position in owners.get(key, ()):
                            if subject.lost is None and (position + 1) % scales[g] == 0:
                                subject.lost = i
            before = after

    def cached_keys(self, i: int) -> list[frozenset[int]]:
        """Per group the keys in the index after observation ``i``."""
        cache = self.__dict__.setdefault("_cached_keys", {})
        state = self.snapshot(i)
        assert state is not None
        if i not in cache:
            previous = cache.get(i - 1)
            earlier = self.snapshot(i - 1) if i else None
            if (
                previous is not None
                and earlier is not None
                and (earlier is state or earlier.index == state.index)
            ):
                cache[i] = previous
            else:
                cache[i] = [frozenset(key for key, _ in index) for index in state.index]
        found: list[frozenset[int]] = cache[i]
        return found

    def promised(self, length: int) -> int:
        """What a resend of ``length`` tokens hits if nothing is lost: the last aligned boundary
        before its last token, less one unit under EAGLE. Nothing with caching off.
        """
        if not self.config.enable_prefix_caching:
            return 0
        boundary = (length - 1) // self.unit * self.unit
        return max(0, boundary - self.unit) if self.config.use_eagle else boundary

    def needed_blocks(self, g: int, boundary: int) -> range:
        """The blocks of group ``g`` that a hit of ``boundary`` tokens needs, with the one EAGLE drops."""
        blocks = self.rules[g].needed(boundary)
        return range(blocks.start, blocks.stop + (1 if self.config.use_eagle and boundary else 0))

    def needs(self, subject: Subject, length: int) -> frozenset[Need]:
        """What must stay cached for a hit of ``promised(length)``."""
        boundary = self.promised(length)
        found = set()
        for g, rules in enumerate(self.rules):
            scale = rules.block_size // self.config.key_block_size
            for i in self.needed_blocks(g, boundary):
                position = (i + 1) * scale - 1
                if position < len(subject.keys):
                    found.add((g, subject.keys[position]))
        return frozenset(found)

    @cached_property
    def returns(self) -> list[Return]:
        """First lookups that continue a session, in order, with the working set's peak so far."""
        return self._sessions[0]

    @cached_property
    def working_sets(self) -> list[frozenset[Need]]:
        """The combined working set after each observation: what must stay cached so that every
        live session's latest sequence, and every request under way, would hit in full if re-sent.
        """
        return self._sessions[1]

    @cached_property
    def _sessions(self) -> tuple[list[Return], list[frozenset[Need]]]:
        live: list[Session] = []
        under_way: dict[str, frozenset[Need]] = {}
        continued: dict[str, Session] = {}
        returns: list[Return] = []
        sets: list[frozenset[Need]] = []
        current: frozenset[Need] = frozenset()
        for i, seen in enumerate(self.observations):
            changed = False
            subject = self.subjects[seen.request] if seen.request is not None else None
            if subject is not None and seen.call == "lookup" and subject.first_lookup == i:
                session = self._continued(live, subject)
                under_way[subject.submit.request] = self.needs(subject, subject.length)
                changed = True
                if session is not None:
                    continued[subject.submit.request] = session
                    expected = self.promised(session.subject.length)
                    own = current | under_way[subject.submit.request]
                    peak = max([len(own), *(len(s) for s in sets[session.since :])])
                    assert seen.hit is not None
                    if expected > 0:
                        returns.append(
                            Return(
                                at=i,
                                subject=subject,
                                session=session,
                                expected=expected,
                                hit=seen.hit,
                                peak=peak,
                            )
                        )
            elif subject is not None and subject.served == i:
                predecessor = continued.get(subject.submit.request)
                if predecessor in live and self._absorbs(subject, predecessor.subject):
                    live.remove(predecessor)
                live.append(Session(subject=subject, since=i, needs=under_way[subject.submit.request]))
                changed = True
            elif subject is not None and seen.call == "free" and seen.request in under_way:
                if subject.ended == i:
                    # The whole sequence stays live, output included; so does an aborted prefill.
                    whole = len(subject.keys) * self.config.key_block_size
                    needs = under_way.pop(seen.request) | self.needs(subject, whole + 1)
                    live = [s for s in live if s.subject is not subject]
                    live.append(Session(subject=subject, since=subject.served or i, needs=needs))
                    changed = True
            elif seen.call == "reset" and seen.ok:
                live, changed = [], True
            if changed:
                current = frozenset().union(*(s.needs for s in live), *under_way.values())
            sets.append(current)
        return returns, sets

    def _continued(self, live: list[Session], subject: Subject) -> Session | None:
        """The live session that ``subject`` continues: the one whose promised hit, lying inside the
        new prompt, is the longest.
        """
        best: Session | None = None
        for session in live:
            earlier = session.subject
            if earlier.submit.identity != subject.submit.identity or earlier.served is None:
                continue
            promised = self.promised(earlier.length)
            # The block that EAGLE drops must lie inside the new prompt too.
            needed = promised + self.unit if self.config.use_eagle else promised
            if not promised or common_prefix(earlier.prompt, subject.prompt) < needed:
                continue
            if self.promised(subject.length) < promised:
                continue
            if best is None or promised > self.promised(best.subject.length):
                best = session
        return best

    def _absorbs(self, subject: Subject, earlier: Subject) -> bool:
        """Whether all of the earlier sequence that can be cached lies inside the new prompt. If not,
        the earlier one stays live beside the new one, so that nothing cached is left out.
        """
        whole = len(earlier.keys) * self.config.key_block_size // self.unit * self.unit
        return common_prefix(earlier.sequence, subject.prompt) >= whole

    @cached_property
    def finder(self) -> Finder:
        """The release's lookup rule, for asking what an index would answer."""
        return Finder(self.config)

    @cached_property
    def true_keys(self) -> dict[str, list[int]]:
        """Per request the identity of each of its block prefixes: content, salt, LoRA and path."""
        table = KeyTable(self.config.key_block_size, tagged=True)
        found: dict[str, list[int]] = {}
        for name, subject in self.subjects.items():
            keys: list[int] = []
            table.extend(keys, subject.sequence, subject.submit.identity)
            found[name] = keys
        return found

    def calls(self, call: str) -> list[tuple[int, Observation]]:
        """Observations of one kind with their index."""
        return [(i, seen) for i, seen in enumerate(self.observations) if seen.call == call]
