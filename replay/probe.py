"""The workload of vllm#48435 against one's own server: seats in turn re-send their prefix.

First one prompt of the same length is sent twice in a row, alone: what the second hits is the most
that this server gives. Then every seat sends its prefix with a fresh suffix, round after round.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from statistics import median
from typing import Literal

import attrs

from hitproof.model import BadInput
from hitproof.replay.server_client import Client, Completion
from hitproof.replay.token_ids import token_id

MOST_REQUESTS = 500

Outcome = Literal["full", "partial", "collapsed", "no hits at all"]


@attrs.frozen(kw_only=True, slots=True)
class Plan:
    """What a probe will send. Lengths in tokens; ``most_tokens`` bounds all prompts together."""

    seats: int
    tokens: int
    rounds: int = 3
    suffix: int = 8
    output_tokens: int = 1
    most_tokens: int = 4_000_000

    def __attrs_post_init__(self) -> None:
        if self.requests > MOST_REQUESTS:
            raise BadInput(
                f"{self.requests} requests: the most is {MOST_REQUESTS}; lower --seats or --rounds"
            )
        if self.prompt_tokens > self.most_tokens:
            raise BadInput(
                f"{self.prompt_tokens} prompt tokens in all: more than --most-tokens {self.most_tokens}; lower "
                "--seats, --tokens or --rounds, or raise it"
            )

    @property
    def length(self) -> int:
        """Of each prompt."""
        return self.tokens + self.suffix

    @property
    def requests(self) -> int:
        """All requests, the two that are sent alone included."""
        return 2 + self.seats * self.rounds

    @property
    def prompt_tokens(self) -> int:
        """Of all requests together."""
        return self.requests * self.length

    @property
    def text(self) -> str:
        """What people are told before anything is sent."""
        return (
            f"{self.requests} requests, one at a time: {self.length} prompt tokens each ({self.prompt_tokens} in "
            f"all), {self.output_tokens} to generate; {self.seats} seats, {self.rounds} rounds, after one prompt "
            "sent twice alone"
        )


@attrs.frozen(kw_only=True, slots=True)
class Round:
    """One round: hits in tokens and times to the first token in seconds, by seat."""

    name: str
    hits: tuple[int, ...]
    first_token_s: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Of the times to the first token."""
        return 1000 * median(self.first_token_s)


@attrs.frozen(kw_only=True, slots=True)
class Probe:
    """What a probe measured. ``best``: the hit of a prompt sent twice in a row, alone."""

    plan: Plan
    version: str
    model: str
    cache: dict[str, str]
    best: int
    alone: tuple[Round, Round]
    rounds: tuple[Round, ...]

    @property
    def verdict(self) -> Outcome:
        """Of the rounds after the first: full if every hit is ``best``, collapsed if every hit is 0."""
        warm = [hit for each in self.rounds[1:] for hit in each.hits]
        if self.best == 0:
            return "no hits at all"
        if all(hit >= self.best for hit in warm):
            return "full"
        return "partial" if any(warm) else "collapsed"

    @property
    def pool(self) -> str:
        """The pool beside what the seats need, in the server's own words."""
        size = f"{self.cache.get('num_gpu_blocks')} blocks, block_size {self.cache.get('block_size')}"
        tokens = self.cache.get("kv_cache_size_tokens", "None")
        need = self.plan.seats * self.plan.tokens
        if tokens.isdecimal() and int(tokens):
            share = f", {100 * need / int(tokens):.0f} % of the {tokens} tokens that the server says it holds"
        else:
            share = ""
        return f"{size}; combined prefixes {need} tokens{share}"


def probe(client: Client, plan: Plan, *, in_use: bool, progress: Callable[[str], None]) -> Probe:
    """Send the plan's requests. ``in_use``: also to a server that others use or have used.

    BadInput if the server is in use and was not said to be, cannot take the length, or hides hits.
    """
    version = client.version()
    model, longest = client.model()
    if longest is not None and plan.length + plan.output_tokens > longest:
        raise BadInput(
            f"--tokens {plan.tokens}: with {plan.suffix} fresh and {plan.output_tokens} generated tokens more than "
            f"the server's max_model_len {longest}; lower it"
        )
    counters = client.counters()
    if not in_use and (counters.running or counters.queries):
        raise BadInput(
            f"{client.url}: this server is in use: {counters.running} requests under way, {counters.queries} prompt "
            "tokens looked up so far; a probe evicts what others have cached. Say --in-use to probe it all the same"
        )
    salt = uuid.uuid4().hex

    def send(stream: str, fresh: str) -> Completion:
        ids = tuple(token_id(stream, i) for i in range(plan.tokens))
        ids += tuple(token_id(fresh, i) for i in range(plan.suffix))
        said = client.complete(model, ids, plan.output_tokens, salt=salt, stream=True)
        if said.cached_tokens is None:
            raise BadInput(
                f"{client.url}: the server hides cached tokens; start it with --enable-prompt-tokens-details"
            )
        return said

    def sent(name: str, prompts: list[tuple[str, str]]) -> Round:
        answers = []
        for at, (stream, fresh) in enumerate(prompts):
            progress(f"{name}, {at + 1} of {len(prompts)}")
            answers.append(send(stream, fresh))
        return Round(
            name=name,
            hits=tuple(answer.cached_tokens or 0 for answer in answers),
            first_token_s=tuple(answer.first_token_s or 0.0 for answer in answers),
        )

    alone = (sent("alone, first", [("alone", "a")]), sent("alone, again", [("alone", "b")]))
    rounds = tuple(
        sent(f"round {turn + 1}", [(f"seat{seat}", f"fresh{turn}.{seat}") for seat in range(plan.seats)])
        for turn in range(plan.rounds)
    )
    return Probe(
        plan=plan,
        version=version,
        model=model,
        cache=client.cache_config(),
        best=alone[1].hits[0],
        alone=alone,
        rounds=rounds,
    )
