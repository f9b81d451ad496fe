"""The same trace with longer blocks: what kernels that want blocks of 32 tokens can run."""

from __future__ import annotations

import math
from typing import Any

import attrs

from hitproof.model import BadInput, ModelTarget, NotModelled, Op, Run, Submit, Trace, resolve
from hitproof.model.groups import Group

KERNEL_BLOCK = 32
"""What attention kernels of vLLM's CPU build take in every release: blocks of a multiple of this many tokens
(``get_supported_kernel_block_sizes`` in ``v1/attention/backends/cpu_attn.py``)."""

CUDA_BLOCK = 16
"""The same of CUDA's Triton and FlashAttention kernels, and of the CPU build to 0.28.0. From 0.25.0 to 0.29.0 layers with a window begin with
blocks of this size, and keep it where there are no others (``tiny_model.block_size``)."""


def scaled(trace: Trace, factor: int) -> Trace:
    """``trace`` with every length ``factor`` times as long and everything counted in blocks unchanged.

    Block sizes, chunks, spans, the step budget and the retention interval are multiplied; a window of w
    and an output of n tokens become ``factor * (w - 1) + 1`` and ``factor * (n - 1) + 1``, since w - 1
    tokens lie behind the window's last and n - 1 outputs are computed. ``max_model_len`` becomes the
    longest request: an engine refuses a pool that cannot hold one request of that length.

    BadInput unless the model's hits are ``factor`` times those of ``trace``, request by request.
    """
    if factor == 1:
        return trace
    config = trace.config
    values: dict[str, Any] = {
        "groups": tuple(_group(group, factor) for group in config.groups),
        "max_num_batched_tokens": config.max_num_batched_tokens * factor,
        "max_model_len": config.max_model_len * factor,
    }
    if config.hash_block_size is not None:
        values["hash_block_size"] = config.hash_block_size * factor
    if isinstance(config.retention_interval, int):
        values["retention_interval"] = config.retention_interval * factor
    longer = Trace(
        config=attrs.evolve(config, **values),
        ops=tuple(_op(i, op, factor) for i, op in enumerate(trace.ops)),
        note=f"scale {factor}" + (f" of: {trace.note}" if trace.note else ""),
    )
    longest = max((_length(op) for op in longer.ops if isinstance(op, Submit)), default=1)
    longer = attrs.evolve(longer, config=attrs.evolve(longer.config, max_model_len=longest))
    wanted, got = (
        _outcomes(ModelTarget(record=False).run(t), by) for t, by in ((trace, factor), (longer, 1))
    )
    for (request, want), (_, have) in zip(wanted, got, strict=True):
        if want != have:
            raise BadInput(
                f"--scale {factor}: request {request} would hit {have[0]} tokens, not {want[0]}: this trace is "
                "another one at that scale; write a trace with blocks of the engine's size"
            )
    return longer


def fitting(trace: Trace, kernel_block: int = KERNEL_BLOCK) -> int:
    """The smallest factor at which every block size is a multiple of what kernels take."""
    unit = math.gcd(*(group.block_size for group in trace.config.groups))
    return math.lcm(unit, kernel_block) // unit


def _group(group: Group, factor: int) -> Group:
    return attrs.evolve(
        group,
        block_size=group.block_size * factor,
        window=None if group.window is None else factor * (group.window - 1) + 1,
        chunk=None if group.chunk is None else factor * group.chunk,
        extra_retained_tokens=group.extra_retained_tokens * factor,
    )


def _op(i: int, op: Op, factor: int) -> Op:
    if not isinstance(op, Submit):
        return op
    spans = []
    for span in op.prompt:
        if span.stop is None:
            raise NotModelled(
                f"--scale {factor}: ops[{i}]: {span}: a prompt with an output cannot be scaled; remove --scale"
            )
        spans.append(attrs.evolve(span, start=span.start * factor, stop=span.stop * factor))
    return attrs.evolve(op, prompt=tuple(spans), output_tokens=factor * (op.output_tokens - 1) + 1)


def _length(op: Submit) -> int:
    return len(resolve(op, {})) + op.output_tokens


def _outcomes(run: Run, factor: int) -> list[tuple[str, tuple[int | None, bool, bool]]]:
    return [
        (r.id, (None if r.hit_tokens is None else r.hit_tokens * factor, r.finished, r.aborted))
        for r in run.requests
    ]
