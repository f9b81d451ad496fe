"""The menu of the block level: concrete prompts with their keys, masks and every way through a lookup.

What depends on no state is not stated again: it is asked of the model's own rules, and every path
through its ``Finder`` is walked once, with the index's answers as conditions. So a bug that is seeded
into those is in the encoding too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from hitproof.model import NULL, BadInput, KeyTable, ModelManager, Request, Submit, cdiv, resolve


@attrs.frozen(kw_only=True, slots=True)
class Path:
    """One way through a lookup: the index's answers on it and what it finds. ``answers``: (groups,
    key, whether all of them have it). ``kept``: positions adopted, per group; ``length``: blocks of
    the table after adoption, per group; ``found``: blocks that the lookup returns, per group, True
    where one is not null. ``mask``: per group and position, whether it is written.
    """

    answers: tuple[tuple[tuple[int, ...], int, bool], ...]
    hit: int
    junction: int
    found: tuple[tuple[bool, ...], ...]
    kept: tuple[frozenset[int], ...]
    length: tuple[int, ...]
    mask: tuple[tuple[bool, ...], ...]


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Item:
    """One prompt of the menu. ``keys``: per group the key of each full block; ``tail``: per group
    the (position, boundary, key) of a partial tail that is registered.
    """

    submit: Submit
    prompt: int
    keys: tuple[tuple[int, ...], ...]
    tail: tuple[tuple[int, int, int] | None, ...]
    paths: tuple[Path, ...]


class _Oracle:
    """Answers the lookup's questions as told, and notes which were asked."""

    def __init__(self, told: Sequence[bool]) -> None:
        self._told = told
        self.asked: list[tuple[tuple[int, ...], int, bool]] = []

    def find(self, key: int, groups: Sequence[int]) -> list[int] | None:
        known = {(ids, k): yes for ids, k, yes in self.asked}
        question = (tuple(groups), key)
        if question not in known:
            at = len(self.asked)
            self.asked.append((*question, self._told[at] if at < len(self._told) else True))
            known[question] = self.asked[-1][2]
        return [1] * len(groups) if known[question] else None


class Menu:
    """The prompts with their keys and lookups, by the rules of one manager (bent or not)."""

    def __init__(self, manager: ModelManager, submits: Sequence[Submit]) -> None:
        self.manager = manager
        self.config = manager.config
        self.rules = manager.groups
        self.key_size = self.config.key_block_size
        self._table = KeyTable(self.key_size, tagged=True)
        self.longest = max(len(resolve(s, {})) + s.output_tokens for s in submits)
        self.positions = [cdiv(self.longest, rules.block_size) for rules in self.rules]
        self.items = tuple(self._item(submit) for submit in submits)
        self.number_of_keys = 1 + max((k for item in self.items for ks in item.keys for k in ks), default=0)

    def _item(self, submit: Submit) -> Item:
        tokens = resolve(submit, {})
        prompt = len(tokens)
        for rules in self.rules:
            if (prompt + submit.output_tokens - 1) // rules.block_size > prompt // rules.block_size:
                raise BadInput(f"{submit}: its output fills a block, whose key no prompt of the menu has")
        keys: list[int] = []
        self._table.extend(keys, tokens, submit.identity)
        request = Request(
            id=submit.request,
            tokens=tokens,
            num_prompt_tokens=prompt,
            output_tokens=submit.output_tokens,
            identity=submit.identity,
        )
        scales = [rules.block_size // self.key_size for rules in self.rules]
        return Item(
            submit=submit,
            prompt=prompt,
            keys=tuple(tuple(keys[scale - 1 :: scale]) for scale in scales),
            tail=tuple(self._tail(g, prompt, keys) for g in range(len(self.rules))),
            paths=tuple(self._paths(request, keys)),
        )

    def _tail(self, g: int, prompt: int, keys: list[int]) -> tuple[int, int, int] | None:
        """As ``Writer._write_partial_tail`` chooses it."""
        config, size = self.config, self.rules[g].block_size
        kind = config.rules.partial_tail
        if kind == "none" or config.groups[g].kind != "full" or size == self.key_size:
            return None
        limit = prompt - 1 if kind == "replay" and not config.use_eagle else prompt
        boundary = limit // self.key_size * self.key_size
        if boundary == 0 or boundary % size == 0:
            return None
        return boundary // size, boundary, keys[boundary // self.key_size - 1]

    def _paths(self, request: Request, keys: list[int]) -> Iterator[Path]:
        """Depth first: the last answer that was yes becomes no."""
        if not self.config.enable_prefix_caching:
            raise BadInput("the block level needs prefix caching")
        told: list[bool] | None = []
        while told is not None:
            oracle = _Oracle(told)
            answer = self.manager.finder.find(oracle, keys, request.num_tokens - 1)  # type: ignore[arg-type]
            yield self._path(request, oracle, answer)
            yes = [i for i, (_, _, said) in enumerate(oracle.asked) if said]
            told = [said for _, _, said in oracle.asked[: yes[-1]]] + [False] if yes else None

    def _path(self, request: Request, oracle: _Oracle, answer: Any) -> Path:
        kept, length, mask = [], [], []
        request.junction = answer.junction
        anything = any(answer.blocks)
        for g, rules in enumerate(self.rules):
            blocks = answer.blocks[g]
            skipped = rules.skipped_tokens(answer.hit_tokens) // rules.block_size if anything else 0
            kept.append(frozenset(i for i, b in enumerate(blocks) if i >= skipped and b != NULL))
            length.append(max(skipped, len(blocks)))
            size, eagle = rules.block_size, self.config.use_eagle
            boundaries = (
                self.manager.writer.boundaries(request, size) if self.config.retention is not None else ()
            )
            written = rules.write_mask(
                0,
                self.positions[g],
                self.config.scheduler_block_size,
                eagle,
                self.config.retention,
                boundaries,
            )
            mask.append(tuple(written) if written is not None else (True,) * self.positions[g])
        return Path(
            answers=tuple(oracle.asked),
            hit=answer.hit_tokens,
            junction=answer.junction,
            found=tuple(tuple(b != NULL for b in blocks) for blocks in answer.blocks),
            kept=tuple(kept),
            length=tuple(length),
            mask=tuple(mask),
        )

    def least_skipping(self, g: int, i: int) -> int:
        """From how many computed tokens on the window has passed block ``i``."""
        rules = self.rules[g]
        return self._least(lambda computed: rules.skipped_tokens(computed) // rules.block_size > i)

    def least_offering(self, g: int, tokens: int) -> int:
        """From how many computed tokens on so many are offered to the index."""
        size = self.rules[g].block_size
        return self._least(lambda computed: self.manager.writer._cacheable(computed, size) >= tokens)

    def _least(self, test: Callable[[int], bool]) -> int:
        return next((n for n in range(self.longest + 2) if test(n)), self.longest + 2)
