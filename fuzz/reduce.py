"""The reducer: the smallest trace on which the same property still fails, aspect by aspect.

Aspects, in order: requests, groups, blocks, lengths, settings, other ops, names. Rounds repeat until
nothing gets smaller. A budget of runs is stated when it ends the work early.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import attrs

from hitproof.model import Abort, BadInput, CacheConfig, Drain, Group, Identity, Op, Span, Step, Submit, Trace

Fails = Callable[[Trace], bool]


@attrs.frozen(kw_only=True, slots=True)
class Reduced:
    """The result: ``stopped`` says why the work ended."""

    trace: Trace
    runs: int
    stopped: str


class _OutOfBudget(Exception):
    pass


def reduce(
    trace: Trace, fails: Fails, most_runs: int = 10_000, progress: Callable[[Trace], None] | None = None
) -> Reduced:
    """Shrink ``trace`` while ``fails`` says that the same property fails. Raises ValueError if it
    does not fail to begin with.
    """
    if not fails(trace):
        raise ValueError("the trace does not fail the property")
    runs = 0
    seen: set[str] = set()

    def attempt(best: Trace, candidates: Iterable[Trace]) -> Trace:
        nonlocal runs
        for candidate in candidates:
            text = candidate.dumps()
            if text in seen:
                continue
            seen.add(text)
            if runs >= most_runs:
                raise _OutOfBudget
            runs += 1
            if fails(candidate):
                if progress is not None:
                    progress(candidate)
                return candidate
        return best

    best = trace
    try:
        while True:
            before = best
            for aspect in (_sequential, _requests, _groups, _blocks, _lengths, _settings, _together, _ops):
                while True:
                    smaller = attempt(best, aspect(best))
                    if smaller is best:
                        break
                    best = smaller
            if best is before:
                break
    except _OutOfBudget:
        return Reduced(trace=best, runs=runs, stopped=f"stopped after its budget of {most_runs} runs")
    named = _plain_names(best)
    if named is not None and fails(named):
        best = named
    return Reduced(trace=best, runs=runs, stopped="nothing smaller fails, one change at a time")


def size(trace: Trace) -> tuple[int, ...]:
    """The order of counterexamples: requests, groups, blocks, tokens, ops."""
    submits = [op for op in trace.ops if isinstance(op, Submit)]
    tokens = sum((span.stop or 0) - span.start for op in submits for span in op.prompt)
    return len(submits), len(trace.config.groups), trace.config.num_blocks, tokens, len(trace.ops)


def _with(trace: Trace, ops: Iterable[Op] | None = None, **config: object) -> Iterator[Trace]:
    """The changed trace, or nothing if it is not a valid one."""
    try:
        changed = attrs.evolve(trace.config, **config) if config else trace.config  # type: ignore[arg-type]
        yield Trace(config=changed, ops=trace.ops if ops is None else tuple(ops))
    except BadInput:
        return


def _mentions(op: Op, name: str) -> bool:
    if isinstance(op, Abort):
        return op.request == name
    return isinstance(op, Submit) and (op.request == name or any(s.stream == f"@{name}" for s in op.prompt))


def _sequential(trace: Trace) -> Iterator[Trace]:
    """One request after another: the plainest order, and the one that shrinks furthest."""
    ops: list[Op] = []
    for op in trace.ops:
        ops += [op, Drain()] if isinstance(op, Submit) else []
    if tuple(ops) != trace.ops:
        yield from _with(trace, ops)


def _requests(trace: Trace) -> Iterator[Trace]:
    names = [op.request for op in trace.ops if isinstance(op, Submit)]
    for half in (names[: len(names) // 2], names[len(names) // 2 :]):
        if len(half) > 1:
            yield from _with(trace, [op for op in trace.ops if not any(_mentions(op, name) for name in half)])
    for name in reversed(names):
        yield from _with(trace, [op for op in trace.ops if not _mentions(op, name)])


def _ops(trace: Trace) -> Iterator[Trace]:
    for i in range(len(trace.ops) - 1, -1, -1):
        op = trace.ops[i]
        if not isinstance(op, Submit):
            yield from _with(trace, [*trace.ops[:i], *trace.ops[i + 1 :]])
        if isinstance(op, Step):
            yield from _with(trace, [*trace.ops[:i], Drain(), *trace.ops[i + 1 :]])
            if op.count > 1:
                yield from _with(trace, [*trace.ops[:i], Step(count=op.count - 1), *trace.ops[i + 1 :]])


def _groups(trace: Trace) -> Iterator[Trace]:
    groups = trace.config.groups
    for i in range(len(groups)):
        yield from _with(trace, groups=(*groups[:i], *groups[i + 1 :]))
    for i, group in enumerate(groups):
        plain = Group(kind="full", block_size=group.block_size)
        if group != plain:
            yield from _with(trace, groups=(*groups[:i], plain, *groups[i + 1 :]))
        for other in groups:
            if other != group and (other.kind == "full" or group.kind != "full"):
                yield from _with(trace, groups=(*groups[:i], other, *groups[i + 1 :]))
    sizes = {group.block_size for group in groups}
    smallest = min(sizes)
    if len(sizes) > 1:
        yield from _with(trace, groups=tuple(attrs.evolve(g, block_size=smallest) for g in groups))
    for group in groups:
        for field in ("window", "chunk"):
            value = getattr(group, field)
            for smaller in _smaller(value or 0, 2):
                changed = attrs.evolve(group, **{field: smaller})  # type: ignore[arg-type]
                yield from _with(trace, groups=tuple(changed if g == group else g for g in groups))


def _smaller(value: int, least: int) -> list[int]:
    return sorted({n for n in (least, value // 2, value - 4, value - 1) if least <= n < value})


def _blocks(trace: Trace) -> Iterator[Trace]:
    for n in _smaller(trace.config.num_blocks, 2):
        yield from _with(trace, num_blocks=n)


def _together(trace: Trace) -> Iterator[Trace]:
    """A request or group less in a smaller pool, or a group less with prompts of other lengths:
    neither change alone need fail.
    """
    groups = trace.config.groups
    plain = [trace]
    for simpler in (_sequential, _repeating, _roomy):
        plain += [t for base in plain for t in simpler(base)]
    without = dict.fromkeys(
        fewer
        for base in plain
        for i in range(len(groups))
        for fewer in _with(base, groups=(*groups[:i], *groups[i + 1 :]))
    )
    others = [t for fewer in without for t in _relengthened(fewer)] if len(groups) > 2 else []
    for fewer in (*plain[1:], *_requests(trace), *without, *dict.fromkeys(others)):
        for blocks in range(trace.config.num_blocks, 3, -1):
            yield from _with(fewer, num_blocks=blocks)


def _repeating(trace: Trace) -> Iterator[Trace]:
    """Every later prompt on a stream made the same as the first one on it."""
    first: dict[str, tuple[Span, ...]] = {}
    ops = [
        attrs.evolve(op, prompt=first.setdefault(op.prompt[0].stream, op.prompt))
        if isinstance(op, Submit)
        else op
        for op in trace.ops
    ]
    if tuple(ops) != trace.ops:
        yield from _with(trace, ops)


def _roomy(trace: Trace) -> Iterator[Trace]:
    """Small blocks made 4 tokens, and prompts that end one token after a boundary: outputs then stay
    inside a block, which keeps the working set small.
    """
    for size in (1, 2, 3, 4):
        scaled = _rescaled(trace, size, 4)
        for base in scaled or ():
            ops = [
                attrs.evolve(op, prompt=tuple(_past_boundary(s) for s in op.prompt))
                if isinstance(op, Submit)
                else op
                for op in base.ops
            ]
            yield from _with(base, ops)


def _past_boundary(span: Span) -> Span:
    if span.stop is None or span.start:
        return span
    return Span(span.stream, 0, max(4, span.stop // 4 * 4) + 1)


def _relengthened(trace: Trace) -> Iterator[Trace]:
    """Up to two streams, each any of a few lengths: one token past a boundary."""
    submits = [op for op in trace.ops if isinstance(op, Submit)]
    streams = list(dict.fromkeys(s.stream for op in submits for s in op.prompt if s.stop is not None))
    unit = trace.config.scheduler_block_size
    if len(streams) > 2 or any(s.start for op in submits for s in op.prompt):
        return
    for units in itertools.product((1, 2, 3, 4, 5, 7, 9), repeat=len(streams)):
        length = {stream: n * unit + 1 for stream, n in zip(streams, units, strict=True)}
        yield from _with(trace, [_relength(op, length) for op in trace.ops])


def _relength(op: Op, length: dict[str, int]) -> Op:
    if not isinstance(op, Submit):
        return op
    prompt = tuple(s if s.stop is None else Span(s.stream, 0, length[s.stream]) for s in op.prompt)
    return attrs.evolve(op, prompt=prompt)


def _lengths(trace: Trace) -> Iterator[Trace]:
    unit = trace.config.scheduler_block_size
    for identity in dict.fromkeys(op.identity for op in trace.ops if isinstance(op, Submit)):
        if identity != Identity():
            yield from _with(trace, [_plain(op, identity) for op in trace.ops])
    for i, op in enumerate(trace.ops):
        if not isinstance(op, Submit):
            continue
        for n in _smaller(op.output_tokens, 1):
            yield from _with(trace, [*trace.ops[:i], attrs.evolve(op, output_tokens=n), *trace.ops[i + 1 :]])
        if op.identity != Identity():
            yield from _with(
                trace, [*trace.ops[:i], attrs.evolve(op, identity=Identity()), *trace.ops[i + 1 :]]
            )
        for j in range(len(op.prompt)):
            if len(op.prompt) > 1:
                prompt = (*op.prompt[:j], *op.prompt[j + 1 :])
                yield from _with(
                    trace, [*trace.ops[:i], attrs.evolve(op, prompt=prompt), *trace.ops[i + 1 :]]
                )
    for span in sorted(
        {s for op in trace.ops if isinstance(op, Submit) for s in op.prompt if s.stop is not None}, key=str
    ):
        assert span.stop is not None
        length = span.stop - span.start
        for shorter in sorted(
            {n for n in (1, length // 2, length - unit, length // unit * unit, length - 1) if 0 < n < length}
        ):
            yield from _with(
                trace, _respan(trace.ops, span, Span(span.stream, span.start, span.start + shorter))
            )
        if span.start:
            yield from _with(trace, _respan(trace.ops, span, Span(span.stream, 0, length)))


def _plain(op: Op, identity: Identity) -> Op:
    """Without ``identity``, if that is the op's."""
    if isinstance(op, Submit) and op.identity == identity:
        return attrs.evolve(op, identity=Identity())
    return op


def _respan(ops: tuple[Op, ...], old: Span, new: Span) -> list[Op]:
    """Change one span wherever it stands."""
    return [
        attrs.evolve(op, prompt=tuple(new if s == old else s for s in op.prompt))
        if isinstance(op, Submit)
        else op
        for op in ops
    ]


def _settings(trace: Trace) -> Iterator[Trace]:
    for field in attrs.fields(CacheConfig):
        if field.name in ("num_blocks", "groups", "semantics", "rules", "max_model_len"):
            continue
        if getattr(trace.config, field.name) != field.default:
            yield from _with(trace, **{field.name: field.default})
    yield from _with(trace, max_model_len=2048)
    for size_from, size_to in ((8, 4), (4, 2), (3, 2), (2, 1)):
        scaled = _rescaled(trace, size_from, size_to)
        if scaled is not None:
            yield from scaled


def _rescaled(trace: Trace, old: int, new: int) -> Iterator[Trace] | None:
    """All sizes and lengths in units of ``old`` tokens said in units of ``new``."""
    if any(g.block_size != old for g in trace.config.groups):
        return None

    def scale(n: int) -> int:
        return n // old * new + min(n % old, new - 1)

    groups = tuple(
        attrs.evolve(
            g,
            block_size=new,
            window=g.window and max(2, (g.window - 1) // old * new + 1),
            chunk=g.chunk and max(1, scale(g.chunk)),
        )
        for g in trace.config.groups
    )
    ops: list[Op] = []
    for op in trace.ops:
        if isinstance(op, Submit):
            spans = tuple(
                s
                if s.stop is None
                else Span(s.stream, scale(s.start), max(scale(s.stop), scale(s.start) + 1))
                for s in op.prompt
            )
            op = attrs.evolve(op, prompt=spans)
        ops.append(op)
    return _with(trace, ops, groups=groups)


def _plain_names(trace: Trace) -> Trace | None:
    """Requests r0, r1, ... and streams A, B, ... in order of appearance; None beyond 26 streams."""
    submits = [op for op in trace.ops if isinstance(op, Submit)]
    streams = dict.fromkeys(s.stream for op in submits for s in op.prompt if s.stop is not None)
    if len(streams) > 26:
        return None
    request = {op.request: f"r{i}" for i, op in enumerate(submits)}
    letter = {stream: chr(65 + i) for i, stream in enumerate(streams)}

    def rename(op: Op) -> Op:
        if isinstance(op, Submit):
            spans = (
                Span(f"@{request[s.stream[1:]]}", s.start, None)
                if s.stop is None
                else attrs.evolve(s, stream=letter[s.stream])
                for s in op.prompt
            )
            return attrs.evolve(op, request=request[op.request], prompt=tuple(spans))
        return Abort(request=request[op.request]) if isinstance(op, Abort) else op

    return attrs.evolve(trace, ops=tuple(map(rename, trace.ops)))
