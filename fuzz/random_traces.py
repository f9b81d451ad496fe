"""Random traces of one seed each, wide on purpose: what the model is compared with vLLM on.

A plain random generator beside the Hypothesis machine: it makes a thousand traces a second, and a
seed names a trace for good.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hitproof.model import (
    Abort,
    BadInput,
    CacheConfig,
    Drain,
    Group,
    Op,
    Reset,
    Semantics,
    Step,
    Submit,
    Trace,
    parse_op,
    resolve,
)

WORDS = ("x", "y", "zz")


def _group(rng: random.Random, kind: str, size: int, rules: Semantics) -> Group:
    if kind == "full":
        return Group(kind=kind, block_size=size)
    if kind == "chunked_local":
        return Group(kind=kind, block_size=size, chunk=rng.randint(1, 6 * size))
    extra = rng.randint(1, 4 * size) if rules.retained_tokens and rng.random() < 0.25 else 0
    window = rng.choice((1, 2, size, size + 1, 3 * size - 1, 100 * size, rng.randint(1, 8 * size)))
    return Group(kind=kind, block_size=size, window=window, extra_retained_tokens=extra)


def _random_config(rng: random.Random, release: str) -> CacheConfig:
    """Any config that the release accepts: 1 to 6 groups of mixed kinds and block sizes."""
    rules = Semantics.of(release)
    base, factors = rng.choice((1, 2, 3, 4, 4)), rng.choice(((1,), (1, 2), (1, 2, 4), (1, 3)))
    usual, mixed = ("full", "sliding_window"), ("full", "sliding_window", "chunked_local")
    kinds = rng.choice((usual, usual, usual, ("sliding_window",), ("full",), mixed))
    specs = [
        _group(rng, rng.choice(kinds), base * rng.choice(factors), rules) for _ in range(rng.randint(1, 4))
    ]
    groups = tuple(rng.choices(specs, k=rng.randint(1, 6)))
    unit = CacheConfig(
        num_blocks=4, groups=(*groups, specs[0]), enable_prefix_caching=False
    ).scheduler_block_size
    settings: dict[str, Any] = {}
    if rules.retention:
        settings["retention_interval"] = rng.choice(("default", None, 0, unit, 3 * unit))
    if rules.watermark:
        settings["watermark"] = rng.choice((0.0, 0.0, 0.01, 0.25))
    return CacheConfig(
        num_blocks=rng.choice((rng.randint(4, 12), rng.randint(8, 30), rng.randint(20, 80))),
        groups=groups,
        semantics=release,
        max_num_batched_tokens=rng.choice((1, 2, 5, 8, 16, 31, 64, 512)),
        max_num_seqs=rng.choice((1, 2, 3, 8)),
        max_model_len=rng.choice((rng.randint(12, 40), 120, 400)),
        hash_block_size=1 if rng.random() < 0.1 and len(groups) > 1 else None,
        use_eagle=rng.random() < 0.35,
        enable_prefix_caching=rng.random() < 0.93,
        scheduler_reserve_full_isl=rng.random() < 0.65,
        **settings,
    )


def _prompt(rng: random.Random, earlier: list[tuple[str, str]], longest: int, unit: int, fresh: int) -> str:
    """Resend, extend or answer an earlier request, share a stream's prefix, or start afresh."""
    choice = rng.random()
    if earlier and choice < 0.25:
        return rng.choice(earlier)[1]
    if earlier and choice < 0.55:
        name, prompt = rng.choice(earlier)
        answer = f" @{name}" if rng.random() < 0.6 else ""
        return f"{prompt}{answer} f{fresh}:{rng.randint(1, 2 * unit)}"
    length = rng.choice(
        (rng.randint(1, longest), min(longest, unit * rng.randint(1, 6) + rng.choice((0, 0, 1))))
    )
    if choice < 0.85:
        return f"{rng.choice('STU')}:{length}" + (
            f" f{fresh}:{rng.randint(1, 9)}" if rng.random() < 0.6 else ""
        )
    return rng.choice((f"f{fresh}:{length}", f"S[{length}:{length + 7}]"))


def random_trace(seed: int, release: str) -> Trace:
    """A config and 6 to 22 requests, most of them small enough for the pool."""
    rng = random.Random(seed)  # noqa: S311
    while True:
        try:
            config = _random_config(rng, release)
            break
        except BadInput:
            continue
    return Trace(config=config, ops=_random_ops(rng, config), note=f"random trace, seed {seed}")


def random_trace_on(config: CacheConfig, seed: int) -> Trace:
    """The same on a given config."""
    ops = _random_ops(random.Random(seed), config)  # noqa: S311
    return Trace(config=config, ops=ops, note=f"random trace, seed {seed}")


def _random_ops(rng: random.Random, config: CacheConfig) -> tuple[Op, ...]:
    unit = config.scheduler_block_size
    fits = (config.num_blocks - 2) / sum(1 / group.block_size for group in config.groups)
    longest = max(2, min(config.max_model_len - 1, int(fits * rng.choice((0.15, 0.3, 0.5, 0.9, 1.3)))))
    isolate = rng.choice((0, 0, 0.15))
    ops: list[Op] = []
    earlier: list[tuple[str, str]] = []
    outputs: dict[str, int] = {}
    for i in range(rng.randint(6, 22)):
        prompt = _prompt(rng, earlier, longest, unit, i)
        line = f"submit r{i} {prompt} out={rng.choice((1, 1, 2, rng.randint(1, 2 * unit + 1)))}"
        if rng.random() < isolate:
            line += f" salt={rng.choice(WORDS)}"
        if rng.random() < isolate:
            line += f" lora={rng.choice(WORDS)}{rng.choice(('', '@p'))}"
        op = parse_op(line)
        assert isinstance(op, Submit)
        length = len(resolve(op, outputs)) + op.output_tokens
        if length > min(config.max_model_len, 2 * longest):
            continue
        ops.append(op)
        outputs[op.request] = op.output_tokens
        earlier.append((op.request, prompt))
        if rng.random() < 0.8:
            ops.append(Drain() if rng.random() < 0.5 else Step(count=rng.randint(1, 5)))
        if rng.random() < 0.1:
            ops.append(Abort(request=rng.choice(earlier)[0]))
        if rng.random() < 0.05:
            ops.append(Reset())
    return (*ops, Drain())


def coverage(trace: Trace) -> Iterator[str]:
    """What a trace covers, in words: so that agreement over nothing cannot pass for agreement."""
    config = trace.config
    kinds = {group.kind for group in config.groups}
    yield from kinds
    if len({group.block_size for group in config.groups}) > 1:
        yield "unequal block sizes"
    if len(config.groups) > 1:
        yield "several groups"
    if config.use_eagle:
        yield "EAGLE"
    if config.watermark:
        yield "watermark"
    if not config.enable_prefix_caching:
        yield "caching off"
    yield "dense" if config.retention is None else "retention 0" if config.retention == 0 else "retention N"
    for kind, word in ((Abort, "abort"), (Reset, "reset")):
        if any(isinstance(op, kind) for op in trace.ops):
            yield word
    identities = {op.identity for op in trace.ops if isinstance(op, Submit)}
    if len(identities) > 1:
        yield "salt or LoRA"
