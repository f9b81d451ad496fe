"""A request as the scheduler keeps it: ``vllm/v1/request.py``, the part that matters here."""

from __future__ import annotations

import attrs

from hitproof.model.content import Identity, Tokens


@attrs.define(kw_only=True, slots=True, eq=False)
class Request:
    """``tokens`` grows by output; ``computed``: tokens whose KV is computed or being computed."""

    id: str
    tokens: Tokens
    num_prompt_tokens: int
    output_tokens: int
    identity: Identity
    computed: int = 0
    running: bool = False
    junction: int = 0
    furthest: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens)

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt_tokens
