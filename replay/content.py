"""The content check: an answer from cached blocks against the same answer from none.

``hit-content`` at the height of the engine. A request that hit is sent again on an empty cache; at
every output position the log-probabilities of the likeliest tokens must be the same. Both times the
request is made to generate the trace's tokens, so positions stay comparable to the end; vLLM's
``logprobs_mode`` ``raw_logprobs`` gives what greedy decoding would choose from.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from hitproof.model import RequestResult

TOP = 20
"""Log-probabilities per output position: vLLM's most (``max_logprobs``)."""

TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}
"""Largest difference of a log-probability. On the CPU in float32 cached and cold answers of the tiny model
differ by up to 3e-6, since chunks are cut otherwise, and noise over the cache moves them by 0.3 and more
(docs/engine.md). CUDA rounds products to TF32 and is given a hundred times as much; it was never measured."""

Heard: TypeAlias = list[dict[int, float]]
"""Per output position: token to log-probability, the likeliest ``TOP`` and the one generated."""


@attrs.frozen(kw_only=True, slots=True)
class Answer:
    """One request's answer from cached blocks beside the cold one: output tokens compared, the largest
    difference of a log-probability, and where it was.
    """

    request: str
    tokens: int
    largest: float
    where: str = ""


@attrs.frozen(kw_only=True, slots=True)
class Content:
    """What the check compared: the answers of finished requests with a hit, in the order of submission."""

    answers: tuple[Answer, ...] = ()

    @property
    def requests(self) -> int:
        """Requests compared."""
        return len(self.answers)

    @property
    def tokens(self) -> int:
        """Output positions compared."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def largest(self) -> float:
        """Of all differences."""
        return max((answer.largest for answer in self.answers), default=0.0)

    def first(self, device: str) -> Answer | None:
        """The first answer that is another than the cold one."""
        return next((answer for answer in self.answers if answer.largest > TOLERANCE[device]), None)

    def text(self, device: str) -> str:
        """One line: the verdict and what it rests on."""
        if not self.requests:
            return "hit-content VACUOUS: no finished request had a hit to compare"
        rests = (
            f"{self.requests} requests with hits, {self.tokens} output tokens against cold runs, "
            f"largest difference {self.largest:.1e} (tolerance {TOLERANCE[device]:.0e})"
        )
        first = self.first(device)
        if first is not None:
            return f"hit-content VIOLATED: {first.where}; {rests}"
        return f"hit-content HOLDS: {rests}"


def compare(result: RequestResult, warm: Heard, cold: Heard) -> Answer:
    """One request's two answers, position by position."""
    largest, where = 0.0, ""
    for at, (cached, plain) in enumerate(zip(warm, cold, strict=True)):
        difference = _difference(cached, plain)
        if difference > largest:
            greedy = max(plain, key=lambda token: plain[token])
            seen = f"{cached[greedy]:.6f}" if greedy in cached else f"not among the {TOP} likeliest"
            largest = difference
            where = (
                f"request {result.id} (hit {result.hit_tokens}), output token {at}: log-probability of the "
                f"greedy token {greedy}: cold {plain[greedy]:.6f}, from the cache {seen}"
            )
    return Answer(request=result.id, tokens=len(cold), largest=largest, where=where)


def _difference(warm: dict[int, float], cold: dict[int, float]) -> float:
    """Largest over the tokens that both list; infinite if a greedy token is listed by one alone."""
    greedy = {max(heard, key=lambda t: heard[t]) for heard in (warm, cold)}
    if not greedy <= warm.keys() & cold.keys():
        return float("inf")
    return max(abs(warm[token] - cold[token]) for token in warm.keys() & cold.keys())
