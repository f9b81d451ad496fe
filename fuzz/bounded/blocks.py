"""The block-level encoding: the state machine itself, unrolled over a small pool.

The config and a *menu* of prompts are concrete; who is submitted, aborted or waited for in each turn
is symbolic. Every block has terms for its ref count, key, entry in the index and place in the free
queue; every running request for its tables. Bugs in the pool are named in ``BUGS``; those in the rules
come with the menu.

A turn is one scheduler step, with one submission before it or none, or an abort without a step. A
run in which a request would wait or be preempted is outside the encoding. Read beside
``model/pool.py`` and ``model/manager.py``.
"""

from __future__ import annotations

from hitproof.fuzz.bounded.menu import Item, Menu, Path
from hitproof.fuzz.bounded.slots import Number, Slot, Turn, differ, packed, pick, total
from hitproof.fuzz.bounded.terms import Bool, both, either, neg
from hitproof.model import NULL, BadInput, cdiv

BUGS = frozenset(
    {
        "cached-to-head",
        "hit-stays-queued",
        "unhashed-lost",
        "shared-block-queued",
        "shared-not-counted",
        "duplicate-overwrites",
        "evicted-key-stays",
        "pinned-late",
        "hits-not-counted",
        "skipped-freed-again",
        "given-back-once",
        "abort-leaks",
        "unwritten-not-freed",
        "null-block-queued",
    }
)
"""Seeded bugs of the pool and of the manager's calls that the encoding states, by the mutants' ids."""


class Machine:
    """The state, unrolled turn by turn. ``valid``: what makes the run one of the encoding's."""

    def __init__(self, menu: Menu, slots: int, bug: str = "") -> None:
        if bug and bug not in BUGS:
            raise BadInput(
                f"bug {bug!r}: the block level does not state it; known: {', '.join(sorted(BUGS))}"
            )
        self.menu, self.bug = menu, bug
        self.blocks = range(1, menu.config.num_blocks)
        count = menu.config.num_blocks
        self.ref: list[Number] = [0] * count
        self.key: list[Number] = [0] * count
        """0 none, else 1 + the key, by group apart."""
        self.indexed: list[Number] = [0] * count
        """The key under which the index holds the block."""
        self.since: list[Number] = [0] * count
        self.queued: list[Bool] = [False] + [True] * (count - 1)
        self.place: list[Number] = list(range(count))
        self.evicted: Bool = False
        """Whether a block with a key was ever taken."""
        self.null_queued: Bool = False
        self.ever: list[Bool] = [False] * len(menu.items)
        self.served: list[Bool] = [False] * len(menu.items)
        self.slots = [self._idle() for _ in range(slots)]
        self.valid: list[Bool] = []
        self.turns = 0
        self._tail, self._head, self._clock = count, 0, 0
        manager = menu.manager
        self._first_when_skipped = manager._unhashed_first_when_skipped
        self._first_when_freed = manager._unhashed_first_when_freed
        self._capped_check = manager.config.rules.admission_cap == "always"

    def _idle(self) -> Slot:
        shape = self.menu.positions
        return Slot(
            active=False,
            item=[False] * len(self.menu.items),
            computed=0,
            table=[[0] * n for n in shape],
            has=[[False] * n for n in shape],
            offered=[[False] * n for n in shape],
            mask=[[False] * n for n in shape],
            known=False,
            turn=0,
        )

    def id_of(self, g: int, key: int) -> int:
        """The number of a group's key."""
        return 1 + g * self.menu.number_of_keys + key

    def turn(self, turn: Turn) -> None:
        """One turn."""
        steps = neg(either(*turn.aborts))
        self.valid += [neg(both(a, b)) for i, a in enumerate(turn.aborts) for b in turn.aborts[:i]]
        self.valid += [neg(both(a, b)) for i, a in enumerate(turn.submits) for b in turn.submits[:i]]
        self.valid += [neg(both(a, s)) for a in turn.aborts for s in turn.submits]
        for k, slot in enumerate(self.slots):
            self.valid.append(either(neg(turn.aborts[k]), slot.active))
            if self.bug != "abort-leaks":
                self._release(slot, both(turn.aborts[k], slot.active))
            slot.active = both(slot.active, neg(turn.aborts[k]))
        # All that can run at once needs no more, and a term holds no more.
        most = (len(self.slots) + 1) * self.menu.longest
        budget: Number = min(self.menu.config.max_num_batched_tokens, most)
        news: list[Number] = []
        for slot in self.slots:
            runs = both(slot.active, steps)
            # A budget that runs out leaves the later ones waiting.
            self.valid.append(either(neg(runs), budget > 0))
            left = self._num_tokens(slot) - slot.computed
            new = pick(runs, pick(left <= budget, left, budget), 0)
            self._advance(turn, slot, runs, new)
            budget = budget - new
            news.append(new)
        fresh = self._admit(turn, budget)
        self._update(news, fresh)
        self._check_state(turn)
        self.turns += 1

    def _num_tokens(self, slot: Slot) -> Number:
        prompt = self._prompt(slot)
        return pick(slot.computed >= prompt, slot.computed + 1, prompt)

    def _prompt(self, slot: Slot) -> Number:
        found: Number = 0
        for is_it, item in zip(slot.item, self.menu.items, strict=True):
            found = pick(is_it, item.prompt, found)
        return found

    def _advance(self, turn: Turn, slot: Slot, runs: Bool, new: Number) -> None:
        """A running request's ``allocate_slots``."""
        self._give_back_skipped(slot, runs)
        wanted = slot.computed + new
        flags = self._fresh_flags(slot, runs, wanted)
        self._check(turn, runs, flags, 0, 0)
        self._take(slot, flags)
        self._check_footprint(turn, slot, runs)
        self._write(slot, runs, wanted)

    def _fresh_flags(self, slot: Slot, runs: Bool, wanted: Number) -> list[list[Bool]]:
        return [
            [
                both(runs, neg(slot.has[g][i]), wanted > i * rules.block_size)
                for i in range(self.menu.positions[g])
            ]
            for g, rules in enumerate(self.menu.rules)
        ]

    def _check(
        self, turn: Turn, runs: Bool, flags: list[list[Bool]], further: Number, really: Number
    ) -> None:
        """The capacity check, and whether the blocks are then there. ``further`` blocks of a hit are
        counted to leave the queue, ``really`` do.
        """
        free = total([self.queued[b] for b in self.blocks])
        counted = [flag for flags_g in flags for flag in flags_g]
        asked = list(counted)
        if self._capped_check:
            caps = self.menu.manager._caps
            asked = [
                flag
                for g, flags_g in enumerate(flags)
                for i, flag in enumerate(flags_g)
                if i < (len(flags_g) if (cap := caps[g]) is None else cap)
            ]
        self.valid.append(either(neg(runs), total(asked) + further <= free))
        turn.blame("check-implies-alloc", total(counted) + really > free, runs)

    def _give_back_skipped(self, slot: Slot, runs: Bool) -> None:
        for g in range(len(self.menu.rules)):
            freed = []
            first = neg(both(slot.has[g][0], slot.table[g][0] == NULL))
            for i in range(self.menu.positions[g] - 1, -1, -1):
                least = self.menu.least_skipping(g, i)
                goes = both(runs, slot.has[g][i], slot.table[g][i] != NULL, slot.computed >= least)
                if self.bug == "given-back-once":
                    goes = both(goes, first)
                freed.append((goes, slot.table[g][i]))
                if self.bug != "skipped-freed-again":
                    slot.table[g][i] = pick(goes, NULL, slot.table[g][i])
            self._free(freed, first=self._first_when_skipped)

    def _release(self, slot: Slot, runs: Bool) -> None:
        """``free``: group by group, last block first."""
        if self.bug == "unwritten-not-freed":
            runs = both(runs, slot.known)
        for g, first in enumerate(self._first_when_freed):
            order = range(self.menu.positions[g] - 1, -1, -1)
            if self.bug == "null-block-queued":
                nulls = [both(slot.has[g][i], slot.table[g][i] == NULL) for i in order]
                self.null_queued = either(self.null_queued, both(runs, either(*nulls)))
            self._free(
                [(both(runs, slot.has[g][i], slot.table[g][i] != NULL), slot.table[g][i]) for i in order],
                first=first,
            )

    def _free(self, freed: list[tuple[Bool, Number]], *, first: bool) -> None:
        """One reference less each; in this order to the tail, or unhashed ones to the head."""
        count = len(freed)
        for n, (goes, block) in enumerate(freed):
            if goes is False:
                continue
            for b in self.blocks:
                here = both(goes, block == b)
                if here is False:
                    continue
                self.ref[b] = self.ref[b] - pick(here, 1, 0)
                ends = both(here, either(self.ref[b] == 0, self.bug == "shared-block-queued"))
                unhashed = self.key[b] == 0
                to_head = unhashed if first else False
                if self.bug == "cached-to-head":
                    to_head = neg(unhashed) if first else False
                place = pick(to_head, self._head - count + n, self._tail + n)
                self.place[b] = pick(ends, place, self.place[b])
                lost = both(unhashed, first) if self.bug == "unhashed-lost" else False
                self.queued[b] = either(self.queued[b], both(ends, neg(lost)))
        self._head -= count
        self._tail += count

    def _take(self, slot: Slot, flags: list[list[Bool]]) -> None:
        """The first blocks of the queue, evicted from the index."""
        wanted = [(g, i, flag) for g, flags_g in enumerate(flags) for i, flag in enumerate(flags_g)]
        wanted = [(g, i, flag) for g, i, flag in wanted if flag is not False]
        if not wanted:
            return
        rank = {
            b: total([both(self.queued[x], self.place[x] < self.place[b]) for x in self.blocks if x != b])
            for b in self.blocks
        }
        before: Number = 0
        for g, i, flag in wanted:
            block: Number = 0
            for b in self.blocks:
                block = pick(both(self.queued[b], rank[b] == before), b, block)
            slot.table[g][i] = pick(flag, block, slot.table[g][i])
            slot.has[g][i] = either(slot.has[g][i], flag)
            before = before + pick(flag, 1, 0)
        for b in self.blocks:
            gone = both(self.queued[b], rank[b] < before)
            self.evicted = either(self.evicted, both(gone, self.key[b] != 0))
            self.key[b] = pick(gone, 0, self.key[b])
            if self.bug != "evicted-key-stays":
                self.indexed[b] = pick(gone, 0, self.indexed[b])
            self.ref[b] = pick(gone, 1, self.ref[b])
            self.queued[b] = both(self.queued[b], neg(gone))

    def _write(self, slot: Slot, runs: Bool, computed: Number) -> None:
        """``cache_blocks``: each full block is offered once."""
        for g, rules in enumerate(self.menu.rules):
            for i in range(self.menu.positions[g]):
                least = self.menu.least_offering(g, (i + 1) * rules.block_size)
                # No block is filled by output alone, so that the prompt's length bounds what is offered.
                offer = both(runs, computed >= least, neg(slot.offered[g][i]), self._in_prompt(slot, g, i))
                slot.offered[g][i] = either(slot.offered[g][i], offer)
                slot.known = either(slot.known, offer)
                enters = both(offer, slot.mask[g][i], slot.table[g][i] != NULL)
                for j, item in enumerate(self.menu.items):
                    if i < len(item.keys[g]):
                        self._insert(
                            both(enters, slot.item[j]), slot.table[g][i], self.id_of(g, item.keys[g][i])
                        )
            for j, item in enumerate(self.menu.items):
                tail = item.tail[g]
                if tail is None:
                    continue
                at, boundary, key = tail
                least = self.menu.least_offering(g, boundary)
                block = slot.table[g][at]
                enters = both(runs, slot.item[j], computed >= least, slot.has[g][at], block != NULL)
                fresh = both(enters, neg(either(*(both(block == b, self.key[b] != 0) for b in self.blocks))))
                self._insert(fresh, block, self.id_of(g, key))

    def _in_prompt(self, slot: Slot, g: int, i: int) -> Bool:
        return either(
            *(is_it for is_it, item in zip(slot.item, self.menu.items, strict=True) if i < len(item.keys[g]))
        )

    def _insert(self, enters: Bool, block: Number, key: int) -> None:
        if enters is False:
            return
        self._clock += 1
        for b in self.blocks:
            here = both(enters, block == b)
            if self.bug == "duplicate-overwrites":
                other = both(enters, block != b, self.indexed[b] == key)
                self.indexed[b] = pick(other, 0, self.indexed[b])
            self.key[b] = pick(here, key, self.key[b])
            self.indexed[b] = pick(here, key, self.indexed[b])
            self.since[b] = pick(here, self._clock, self.since[b])

    def _present(self, groups: tuple[int, ...], key: int) -> Bool:
        return both(*(either(*(self.indexed[b] == self.id_of(g, key) for b in self.blocks)) for g in groups))

    def _holder(self, g: int, key: int) -> Number:
        """The block that entered the index first under ``key``; 0 if none."""
        number = self.id_of(g, key)
        found: Number = 0
        for b in self.blocks:
            here = self.indexed[b] == number
            older = either(
                *(
                    both(self.indexed[x] == number, self.since[x] < self.since[b])
                    for x in self.blocks
                    if x != b
                )
            )
            found = pick(both(here, neg(older)), b, found)
        return found

    def _admit(self, turn: Turn, budget: Number) -> Slot:
        """A submission's lookup, gate, adoption and allocation; it must be admitted at once."""
        menu, slot = self.menu, self._idle()
        submits = either(*turn.submits)
        self.valid.append(either(neg(submits), neg(self.slots[-1].active)))
        self.valid.append(either(neg(submits), budget > 0))
        answers: dict[tuple[tuple[int, ...], int], Bool] = {}
        slot.active = submits
        slot.turn = self.turns
        kept_block: list[list[Number]] = [[0] * n for n in menu.positions]
        gate: Number = 0
        hit: Number = 0
        turn.path = []
        ever = [either(a, b) for a, b in zip(self.ever, turn.submits, strict=True)]
        half = 2 * self._working_set(ever) < menu.config.num_blocks
        for j, item in enumerate(menu.items):
            ways = []
            for path in item.paths:
                here = [turn.submits[j]]
                for groups, key, yes in path.answers:
                    if (groups, key) not in answers:
                        answers[groups, key] = self._present(groups, key)
                    here.append(answers[groups, key] if yes else neg(answers[groups, key]))
                taken = both(*here)
                ways.append(taken)
                hit = pick(taken, path.hit, hit)
                gate = pick(taken, self._gate(item, path), gate)
                for g in range(len(menu.rules)):
                    for i in range(menu.positions[g]):
                        inside = taken if i < path.length[g] else False
                        slot.has[g][i] = either(slot.has[g][i], inside)
                        slot.offered[g][i] = either(slot.offered[g][i], inside)
                        slot.mask[g][i] = either(slot.mask[g][i], taken if path.mask[g][i] else False)
                        if i in path.kept[g]:
                            block = self._holder(g, item.keys[g][i])
                            kept_block[g][i] = pick(taken, block, kept_block[g][i])
                            number = self.id_of(g, item.keys[g][i])
                            other = either(*(both(block == b, self.key[b] != number) for b in self.blocks))
                            turn.blame("hit-content", other, taken)
                    slot.known = either(slot.known, taken if path.length[g] else False)
                turn.blame("hit-covers", not self._covers(path), taken if any(path.found) else False)
                promised = self._promised(item.prompt)
                again = both(taken, self.served[j], promised > 0)
                turn.blame("resend-hits", path.hit < promised, both(again, neg(self.evicted)))
                turn.blame("hit-survives-half-pool", path.hit == 0, both(again, half))
            turn.path.append(ways)
            slot.item[j] = turn.submits[j]
        self.ever = ever
        turn.hit = hit
        slot.computed = hit
        kept = [block for blocks in kept_block for block in blocks]
        adopted_free = total(
            [either(*(both(block == b, self.ref[b] == 0) for b in self.blocks)) for block in kept]
        )
        counted = 0 if self.bug == "hits-not-counted" else adopted_free
        free = total([self.queued[b] for b in self.blocks])
        if menu.config.scheduler_reserve_full_isl:
            self.valid.append(either(neg(submits), gate + counted <= free))
        slot.table = [[pick(submits, block, 0) for block in blocks] for blocks in kept_block]
        left = self._prompt(slot) - hit
        new = pick(submits, pick(left <= budget, left, budget), 0)
        flags = self._fresh_flags(slot, submits, hit + new)
        self._check(turn, submits, flags, counted, adopted_free)
        if self.bug != "pinned-late":
            self._touch(kept)
        self._take(slot, flags)
        if self.bug == "pinned-late":
            self._touch(kept)
        self._check_footprint(turn, slot, submits)
        fresh = [slot.table[g][i] for g, flags_g in enumerate(flags) for i in range(len(flags_g))]
        taken_now = [flag for flags_g in flags for flag in flags_g]
        turn.blame(
            "pinned-before-pop",
            when=either(*(block != NULL for block in kept)),
            test=either(
                *(
                    both(flag, block != NULL, block == held)
                    for flag, block in zip(taken_now, fresh, strict=True)
                    if flag is not False
                    for held in kept
                    if not (isinstance(held, int) and held == 0)
                )
            ),
        )
        self._write(slot, submits, hit + new)
        slot.computed = hit + new
        return slot

    def _gate(self, item: Item, path: Path) -> int:
        """New blocks of the whole prompt, as the full-sequence gate counts them."""
        needed = 0
        for g, rules in enumerate(self.menu.rules):
            required = cdiv(item.prompt, rules.block_size)
            limit = self.menu.manager._caps[g]
            if self.menu.config.rules.admission_cap != "none" and limit is not None:
                required = min(required, limit)
            skipped = rules.skipped_tokens(path.hit) // rules.block_size
            needed += max(required - max(skipped, path.length[g]), 0)
        return needed

    def _covers(self, path: Path) -> bool:
        """As the promise ``hit-covers`` says it."""
        if path.hit == 0 and not any(path.found):
            return True
        return all(
            len(found) * rules.block_size == path.hit and all(found[i] for i in rules.needed(path.hit))
            for found, rules in zip(path.found, self.menu.rules, strict=True)
        )

    def _working_set(self, ever: list[Bool]) -> Number:
        """Blocks that the items seen so far need (``Story.working_sets``)."""
        needs: dict[int, list[Bool]] = {}
        for seen, item in zip(ever, self.menu.items, strict=True):
            whole = len(item.keys[0]) * self.menu.rules[0].block_size
            for boundary in {self._promised(item.prompt), self._promised(whole + 1)}:
                for g, rules in enumerate(self.menu.rules):
                    blocks = rules.needed(boundary)
                    more = 1 if self.menu.config.use_eagle and boundary else 0
                    for i in range(blocks.start, min(blocks.stop + more, len(item.keys[g]))):
                        needs.setdefault(self.id_of(g, item.keys[g][i]), []).append(seen)
        return total([either(*seen) for seen in needs.values()])

    def _promised(self, prompt: int) -> int:
        unit = self.menu.config.scheduler_block_size
        boundary = (prompt - 1) // unit * unit
        return max(0, boundary - unit) if self.menu.config.use_eagle else boundary

    def _touch(self, kept: list[Number]) -> None:
        for block in kept:
            if isinstance(block, int) and block == 0:
                continue
            for b in self.blocks:
                here = block == b
                counts = both(here, self.ref[b] == 0) if self.bug == "shared-not-counted" else here
                if self.bug != "hit-stays-queued":
                    self.queued[b] = both(self.queued[b], neg(both(here, self.ref[b] == 0)))
                self.ref[b] = self.ref[b] + pick(counts, 1, 0)

    def _update(self, news: list[Number], fresh: Slot) -> None:
        """Requests whose last token was computed get the next one; those that have all end."""
        running = [*self.slots, fresh]
        before = [self._num_tokens(slot) for slot in self.slots]
        for slot, new in zip(self.slots, news, strict=True):
            slot.computed = slot.computed + new
        for n, slot in enumerate(running):
            prompt = self._prompt(slot)
            stepped = slot.active if n == len(self.slots) else both(slot.active, news[n] > 0)
            reached = slot.computed >= (before[n] if n < len(before) else prompt)
            for j, item in enumerate(self.menu.items):
                self.served[j] = either(
                    self.served[j], both(stepped, slot.item[j], slot.computed >= item.prompt)
                )
            output: Number = 0
            for is_it, item in zip(slot.item, self.menu.items, strict=True):
                output = pick(is_it, item.submit.output_tokens, output)
            ends = both(stepped, reached, slot.computed - prompt + 1 >= output)
            self._release(slot, ends)
            slot.active = both(slot.active, neg(ends))
        self.slots = packed(running, len(self.slots), self.valid)

    def _check_state(self, turn: Turn) -> None:
        """What the accounting and safety promises ask of every state."""
        slots = self.slots
        used = [self.ref[b] > 0 for b in self.blocks]
        turn.blame(
            "pool-conserved", total(used) + total([self.queued[b] for b in self.blocks]) != len(self.blocks)
        )
        turn.blame("null-block-inert", self.null_queued)
        idle = neg(either(*(slot.active for slot in slots)))
        turn.blame("drain-frees-all", either(*used), idle)
        for b in self.blocks:
            turn.blame("queue-well-formed", differ(self.queued[b], self.ref[b] == 0))
            turn.blame("index-matches-blocks", self.key[b] != self.indexed[b])
            holders = [
                both(slot.active, slot.has[g][i], slot.table[g][i] == b)
                for slot in slots
                for g in range(len(self.menu.rules))
                for i in range(self.menu.positions[g])
            ]
            turn.blame("ref-count-is-holders", self.ref[b] != total(holders))
        places = [(g, i) for g in range(len(self.menu.rules)) for i in range(self.menu.positions[g])]
        for k, one in enumerate(slots):
            for g, i in places:
                for m, two in enumerate(slots[k:], start=k):
                    for h, n in places:
                        if (m == k and (h, n) <= (g, i)) or (m != k and (h, n) == (g, i)):
                            continue
                        turn.blame(
                            "sole-owner",
                            one.table[g][i] == two.table[h][n],
                            both(
                                one.active,
                                two.active,
                                one.has[g][i],
                                two.has[h][n],
                                one.table[g][i] != NULL,
                            ),
                        )

    def _check_footprint(self, turn: Turn, slot: Slot, runs: Bool) -> None:
        for g, cap in enumerate(self.menu.manager._caps):
            if cap is not None:
                places = range(self.menu.positions[g])
                held = total([both(slot.has[g][i], slot.table[g][i] != NULL) for i in places])
                turn.blame("footprint-bounded", held > cap, runs)
