"""A client of a running OpenAI-compatible vLLM server: the few calls that a replay and a probe make.

Every failure is one message. A server that does not answer at first, or that refuses a request, is
BadInput; one that fails later, or with a 5xx, is a HarnessFault: it says nothing about any promise.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import attrs

from hitproof.model import BadInput, HarnessFault, shown

MOST_BYTES = 64 * 1024 * 1024
KEY_VARIABLE = "HITPROOF_API_KEY"
"""The environment variable with the key of a server that wants one."""

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@attrs.frozen(kw_only=True, slots=True)
class Counters:
    """The server's prefix-cache counters, in tokens, and the requests that it has under way."""

    queries: int
    hits: int
    running: int


@attrs.frozen(kw_only=True, slots=True)
class Completion:
    """One answer. ``cached_tokens`` is None where the server does not say; times are in seconds.

    ``first_token_s``: until the first output token; None unless streamed.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    token_ids: tuple[int, ...] | None = None
    first_token_s: float | None = None


class Client:
    """One server. ``timeout_s`` bounds every request."""

    def __init__(self, url: str, *, timeout_s: float = 120) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise BadInput(f"--url {shown(url)}: write it as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._answered = False

    def version(self) -> str:
        """The vLLM release it says it is."""
        version = self._json("GET", "/version").get("version")
        if not isinstance(version, str):
            raise BadInput(f"{self.url}: /version names no version; is it a vLLM server?")
        return version.partition("+")[0].partition(".post")[0]

    def model(self) -> tuple[str, int | None]:
        """The first model's name and max_model_len."""
        data = self._json("GET", "/v1/models").get("data")
        if not isinstance(data, list) or not data or "id" not in data[0]:
            raise BadInput(f"{self.url}: /v1/models lists no model")
        return str(data[0]["id"]), data[0].get("max_model_len")

    def cache_config(self) -> dict[str, str]:
        """The labels of ``vllm:cache_config_info``."""
        found = [labels for name, labels, _ in self._metrics() if name == "vllm:cache_config_info"]
        if not found:
            raise BadInput(
                f"{self.url}: /metrics has no vllm:cache_config_info, so block size and pool cannot be compared; "
                "start the server without --disable-log-stats"
            )
        if len(found) > 1:
            raise BadInput(
                f"{self.url}: {len(found)} engines (data parallel): which one answers cannot be chosen; use one engine"
            )
        return found[0]

    def counters(self) -> Counters:
        """Prefix-cache counters and requests under way, summed over what ``/metrics`` lists."""
        sums: dict[str, float] = {}
        for name, _, value in self._metrics():
            sums[name] = sums.get(name, 0) + value
        try:
            return Counters(
                queries=int(sums["vllm:prefix_cache_queries_total"]),
                hits=int(sums["vllm:prefix_cache_hits_total"]),
                running=int(sums["vllm:num_requests_running"] + sums["vllm:num_requests_waiting"]),
            )
        except KeyError as error:
            raise BadInput(
                f"{self.url}: /metrics has no {error.args[0]}; start the server without --disable-log-stats"
            ) from None

    def settings(self) -> dict[str, Any] | None:
        """The whole configuration, where the server is in development mode."""
        status, body = self._send("GET", "/server_info?config_format=json")
        if status != 200:
            return None
        try:
            config = json.loads(body)["vllm_config"]
        except (ValueError, KeyError, TypeError):
            return None
        return config if isinstance(config, dict) else None

    def reset(self) -> bool:
        """Empty the prefix cache; False where the server does not offer it."""
        status, body = self._send("POST", "/reset_prefix_cache")
        if status in (404, 405):
            return False
        self._check(status, body, "POST /reset_prefix_cache")
        if body.strip() and json.loads(body).get("success") is False:
            raise HarnessFault(f"{self.url}: the prefix cache cannot be emptied: blocks are in use")
        return True

    def complete(
        self,
        model: str,
        prompt: tuple[int, ...],
        output_tokens: int,
        *,
        salt: str | None = None,
        only: int | None = None,
        stream: bool = False,
    ) -> Completion:
        """Send token ids and wait for the answer. ``only``: the one token that it may generate."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        if only is not None:
            body |= {"allowed_token_ids": [only], "return_token_ids": True}
        if stream:
            return self._streamed(body | {"stream": True, "stream_options": {"include_usage": True}})
        answer = self._json("POST", "/v1/completions", body)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        ids = choice.get("token_ids")
        return self._usage(answer, tuple(ids) if isinstance(ids, list) else None)

    def _streamed(self, body: dict[str, Any]) -> Completion:
        first: float | None = None
        usage: dict[str, Any] = {}
        start = time.perf_counter()
        for line in self._lines("/v1/completions", body):
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = self._parse(line[6:], "POST /v1/completions")
            if event.get("choices") and first is None:
                first = time.perf_counter() - start
            if event.get("usage"):
                usage = event
        return attrs.evolve(self._usage(usage, None), first_token_s=first)

    def _usage(self, answer: dict[str, Any], ids: tuple[int, ...] | None) -> Completion:
        usage = answer.get("usage")
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            raise HarnessFault(f"{self.url}: the answer to POST /v1/completions has no usage")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Completion(
            prompt_tokens=usage["prompt_tokens"],
            output_tokens=usage.get("completion_tokens", 0),
            cached_tokens=cached if isinstance(cached, int) else None,
            token_ids=ids,
        )

    def _metrics(self) -> Iterator[tuple[str, dict[str, str], float]]:
        status, body = self._send("GET", "/metrics")
        self._check(status, body, "GET /metrics")
        for line in body.decode(errors="replace").splitlines():
            sample = _SAMPLE.match(line)
            if sample is not None:
                yield sample[1], dict(_LABEL.findall(sample[2] or "")), float(sample[3])

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        status, text = self._send(method, path, body)
        self._check(status, text, f"{method} {path}")
        return self._parse(text, f"{method} {path}")

    def _parse(self, text: bytes, what: str) -> dict[str, Any]:
        try:
            data = json.loads(text)
        except ValueError:
            raise HarnessFault(f"{self.url}: the answer to {what} is not JSON: {shown(text[:60])}") from None
        if not isinstance(data, dict):
            raise HarnessFault(f"{self.url}: the answer to {what} is not an object: {shown(data)}")
        return data

    def _check(self, status: int, body: bytes, what: str) -> None:
        said = shown(body[:300].decode(errors="replace").strip())
        if status >= 500:
            raise HarnessFault(f"{self.url}: {what} failed with {status}: {said}")
        if status in (401, 403):
            raise BadInput(
                f"{self.url}: {what} is refused with {status}; set {KEY_VARIABLE} to the server's key"
            )
        if status >= 400:
            raise BadInput(f"{self.url}: {what} is refused with {status}: {said}")

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body."""
        return next(self._answer(method, path, body, whole=True))

    def _lines(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """The answer's lines as they come."""
        for at, (status, line) in enumerate(self._answer("POST", path, body, whole=False)):
            if at == 0:
                self._check(status, line, f"POST {path}")
            yield line.strip()

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, *, whole: bool
    ) -> Iterator[tuple[int, bytes]]:
        what = f"{method} {path.partition('?')[0]}"
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(  # noqa: S310
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
            method=method,
        )
        try:
            try:
                answer = self._opener.open(request, timeout=self.timeout_s)
            except urllib.error.HTTPError as error:
                answer = error
            self._answered = True
            with answer:
                if whole or answer.status >= 400:
                    yield answer.status, answer.read(MOST_BYTES)
                else:
                    for line in answer:
                        yield answer.status, line
        except TimeoutError:
            raise self._fault(f"no answer to {what} within {self.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise self._fault(f"no answer to {what} within {self.timeout_s:g} s") from None
            if not self._answered:
                raise BadInput(
                    f"{self.url}: no server answers: {reason}; start one, for example `hitproof serve-tiny`"
                ) from None
            raise self._fault(
                f"the server went away during {what}: {reason or type(error).__name__}"
            ) from None

    def _fault(self, what: str) -> HarnessFault:
        return HarnessFault(f"{self.url}: {what}")
