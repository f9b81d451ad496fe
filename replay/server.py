"""``ServerTarget``: runs traces on a running OpenAI-compatible vLLM server, over HTTP."""

from __future__ import annotations

import time
import uuid
from typing import Any

from hitproof.model import (
    BadInput,
    Drain,
    HarnessFault,
    NotModelled,
    RequestResult,
    Reset,
    Run,
    Submit,
    Trace,
    under,
)
from hitproof.replay.server_client import Client, Completion, Counters
from hitproof.replay.token_ids import RequestTokens, tokens_of

LATE_S = 10
"""How long the server's counters may lag behind its answers."""


class ServerTarget:
    """Runs traces on the server at ``url``, one request at a time.

    Hits are ``usage.prompt_tokens_details.cached_tokens``, checked against the server's counters. The
    cache is emptied before a run where the server offers ``/reset_prefix_cache``; else a salt of its
    own keeps the run apart. ``notes``: what the last run could not compare. ``timeout_s`` bounds every
    request.
    """

    name = "server"
    sees = frozenset({"hits"})

    def __init__(self, url: str, *, timeout_s: float = 120) -> None:
        self.client = Client(url, timeout_s=timeout_s)
        self.version = self.client.version()
        self.model, self.max_model_len = self.client.model()
        self.notes: tuple[str, ...] = ()

    def run(self, trace: Trace) -> Run:
        """Run one trace under the rules of the server's release.

        BadInput if the server is another one than the trace asks for, if it is busy, or if it hides
        hits; HarnessFault if it fails, or if its counters say something else than its answers.
        """
        trace = under(trace, self.version)
        _check_ops(trace)
        self._check_config(trace)
        busy = self.client.counters().running
        if busy:
            raise BadInput(
                f"{self.client.url}: the server has {busy} requests under way; a replay needs it alone"
            )
        salt = None if self.client.reset() else uuid.uuid4().hex
        if salt is not None:
            self.notes = (*self.notes, "no /reset_prefix_cache here: a salt keeps the run apart")
        tokens = tokens_of(trace)
        results = []
        for op in trace.ops:
            if isinstance(op, Submit):
                results.append(
                    self._request(op, tokens[op.request], salt, trace.config.enable_prefix_caching)
                )
            elif isinstance(op, Reset):
                salt = None if salt is None and self.client.reset() else uuid.uuid4().hex
        return Run(trace=trace, target=self.name, version=self.version, requests=tuple(results))

    def _request(self, op: Submit, tokens: RequestTokens, salt: str | None, caching: bool) -> RequestResult:
        parts = [part for part in (salt, op.identity.salt) if part is not None]
        before = self.client.counters()
        said = self.client.complete(
            self.model,
            tokens.prompt,
            op.output_tokens,
            salt="-".join(parts) if parts else None,
            only=tokens.output_token,
        )
        counted = self._counted(before, len(tokens.prompt) if caching else 0)
        return RequestResult(
            id=op.request,
            prompt_tokens=said.prompt_tokens,
            hit_tokens=self._agreed(op, tokens, said, counted),
            finished=True,
        )

    def _counted(self, before: Counters, queries: int) -> Counters:
        """What the counters grew by, once they have grown by ``queries`` tokens looked up."""
        until = time.monotonic() + LATE_S
        while True:
            now = self.client.counters()
            grown = Counters(
                queries=now.queries - before.queries, hits=now.hits - before.hits, running=now.running
            )
            if grown.queries >= queries and not grown.running:
                return grown
            if time.monotonic() > until:
                raise HarnessFault(
                    f"{self.client.url}: {LATE_S} s after the answer, vllm:prefix_cache_queries_total grew by "
                    f"{grown.queries} tokens, not {queries}, with {grown.running} requests under way"
                )
            time.sleep(0.02)

    def _agreed(self, op: Submit, tokens: RequestTokens, said: Completion, counted: Counters) -> int:
        """The hit that answer and counters agree on."""
        where = f"{self.client.url}: {op.request}"
        if (said.prompt_tokens, said.output_tokens) != (len(tokens.prompt), tokens.output_tokens):
            raise HarnessFault(
                f"{where}: the server counts {said.prompt_tokens} prompt and {said.output_tokens} output tokens; "
                f"sent were {len(tokens.prompt)} and {tokens.output_tokens}"
            )
        if said.token_ids is not None and said.token_ids != tokens.output:
            raise HarnessFault(f"{where}: it generated {said.token_ids}, not {tokens.output}")
        if counted.queries > len(tokens.prompt):
            raise HarnessFault(
                f"{where}: {counted.queries} tokens were looked up, {len(tokens.prompt)} of them by this request: "
                "somebody else uses the server"
            )
        if said.cached_tokens is None and counted.hits:
            raise BadInput(
                f"{where}: the counters show a hit of {counted.hits} tokens and the answer hides it; start the "
                "server with --enable-prompt-tokens-details"
            )
        if said.cached_tokens not in (None, counted.hits):
            raise HarnessFault(
                f"{where}: the answer says {said.cached_tokens} cached tokens, the counters {counted.hits}"
            )
        return counted.hits

    def _check_config(self, trace: Trace) -> None:
        """BadInput with both values if the server is not the one that the trace asks for."""
        config = trace.config
        has = self.client.cache_config()
        size = min(group.block_size for group in config.groups)
        pairs: list[tuple[str, object, object]] = [
            ("block_size", size, has.get("block_size")),
            ("num_gpu_blocks", config.num_blocks, has.get("num_gpu_blocks")),
            ("enable_prefix_caching", config.enable_prefix_caching, has.get("enable_prefix_caching")),
        ]
        if self.max_model_len is not None:
            pairs.append(("max_model_len", config.max_model_len, self.max_model_len))
        unseen = ["groups"]
        if "prefix_cache_retention_interval" in has:
            pairs.append(
                ("prefix_cache_retention_interval", config.retention, has["prefix_cache_retention_interval"])
            )
        else:
            unseen.append("retention interval")
        settings = self.client.settings()
        if settings is None:
            unseen += ["max_num_batched_tokens", "max_num_seqs", "asynchronous scheduling"]
        else:
            pairs += _scheduling(trace, settings)
        for what, asked, got in pairs:
            if str(asked) != str(got):
                raise BadInput(
                    f"{what}: the server has {got}; the trace asks for {asked}; start a server with the trace's "
                    "settings, or give --scale"
                )
        self.notes = (f"not shown by this server, not compared: {', '.join(unseen)}",)


def _scheduling(trace: Trace, settings: dict[str, Any]) -> list[tuple[str, object, object]]:
    scheduler = settings.get("scheduler_config") or {}
    return [
        (
            "max_num_batched_tokens",
            trace.config.max_num_batched_tokens,
            scheduler.get("max_num_batched_tokens"),
        ),
        ("max_num_seqs", trace.config.max_num_seqs, scheduler.get("max_num_seqs")),
        ("async_scheduling", False, bool(scheduler.get("async_scheduling"))),
        ("policy", "fcfs", scheduler.get("policy", "fcfs")),
        ("speculative_config", None, settings.get("speculative_config")),
    ]


def _check_ops(trace: Trace) -> None:
    """NotModelled for what cannot be done over HTTP."""
    if trace.config.use_eagle:
        raise NotModelled("server: EAGLE's draft model is not compared; set use_eagle to false")
    for i, op in enumerate(trace.ops):
        if isinstance(op, Submit):
            if op.identity.lora is not None:
                raise NotModelled(f"server: ops[{i}]: {op.request}: adapters are not served; remove lora")
            if i + 1 == len(trace.ops) or not isinstance(trace.ops[i + 1], Drain):
                raise NotModelled(
                    f"server: ops[{i}]: {op.request} is not drained at once: over HTTP the step at which a request "
                    "is admitted cannot be chosen; write drain after every submit"
                )
        elif not isinstance(op, (Drain, Reset)):
            raise NotModelled(
                f"server: ops[{i}]: {op}: steps and aborts cannot be timed over HTTP; remove it"
            )
