"""The token ids that real engines are sent and made to generate: each follows from the trace alone."""

from __future__ import annotations

from hashlib import blake2b

import attrs

from hitproof.model import Submit, Trace

VOCABULARY = 512
SPECIAL_TOKENS = 8
"""Token ids below this one are a model's special tokens or unused. Every model has the ids up to 511."""


@attrs.frozen(kw_only=True, slots=True)
class RequestTokens:
    """One request's token ids. It generates ``output_token`` ``output_tokens`` times."""

    prompt: tuple[int, ...]
    output_token: int
    output_tokens: int

    @property
    def output(self) -> tuple[int, ...]:
        """What the request generates if it runs to its end."""
        return (self.output_token,) * self.output_tokens


def token_id(stream: str, offset: int) -> int:
    """The token at ``offset`` of ``stream``: an ordinary token."""
    digest = blake2b(f"{stream}:{offset}".encode(), digest_size=8).digest()
    return SPECIAL_TOKENS + int.from_bytes(digest, "big") % (VOCABULARY - SPECIAL_TOKENS)


def tokens_of(trace: Trace) -> dict[str, RequestTokens]:
    """The tokens of every request of a trace.

    A request generates one token again and again, another than the 503 requests before it: an engine
    is made to by ``allowed_token_ids``, whatever its weights, so ``@r`` is known before r ran.
    """
    out: dict[str, RequestTokens] = {}
    for op in trace.ops:
        if not isinstance(op, Submit):
            continue
        prompt: list[int] = []
        for span in op.prompt:
            if span.stop is None:
                prompt += out[span.stream[1:]].output
            else:
                prompt += [token_id(span.stream, offset) for offset in range(span.start, span.stop)]
        out[op.request] = RequestTokens(
            prompt=tuple(prompt),
            output_token=SPECIAL_TOKENS + len(out) % (VOCABULARY - SPECIAL_TOKENS),
            output_tokens=op.output_tokens,
        )
    return out
