"""The Hypothesis state machine. Its rules only make ops; the trace is run and judged at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hitproof.fuzz.draw import Range, configs
from hitproof.model import (
    Abort,
    CacheConfig,
    Drain,
    Identity,
    Op,
    Reset,
    Run,
    Span,
    Step,
    Submit,
    Trace,
    resolve,
)
from hitproof.properties.story import Story

_THEN = st.sampled_from(("drain", "drain", "step", "wait"))
_AGAIN = st.sampled_from(("same", "suffix", "extend", "branch", "swap"))
_IDENTITIES = (
    Identity(),
    Identity(salt="a"),
    Identity(lora="a", lora_path="a"),
    Identity(lora="a", lora_path="b"),
    Identity(salt="a", lora="a", lora_path="a"),
)

RETURNING = 3
"""How many of the first requests are sent again at the end of every trace."""

Judge = Callable[[Story], None]
"""Looks at a judged run; raises to stop the search."""


class TraceMachine(RuleBasedStateMachine):
    """Makes traces. Subclasses (see ``machine_for``) say how wide, on what, and who judges."""

    wide: ClassVar[Range]
    run_trace: ClassVar[Callable[[Trace], Run]]
    judge: ClassVar[Judge]

    def __init__(self) -> None:
        super().__init__()
        self.config: CacheConfig | None = None
        self.ops: list[Op] = []
        self.prompts: dict[str, tuple[Span, ...]] = {}
        self.outputs: dict[str, int] = {}
        self.identities: dict[str, Identity] = {}
        self.fresh = 0
        self.sessions = 2

    @initialize(data=st.data(), sessions=st.sampled_from((2, 3, 2, 5)))
    def start(self, data: st.DataObject, sessions: int) -> None:
        """Draw the config, and how many prompts of their own there will be."""
        self.sessions = sessions
        self.config = data.draw(configs(self.wide), label="config")

    def _submit(self, prompt: tuple[Span, ...], identity: Identity, out: int, then: str) -> None:
        assert self.config is not None
        name = f"r{len(self.prompts)}"
        op = Submit(request=name, prompt=prompt, output_tokens=out, identity=identity)
        if len(resolve(op, self.outputs)) + out > self.config.max_model_len:
            return
        self.prompts[name], self.outputs[name], self.identities[name] = prompt, out, identity
        self.ops.append(op)
        if then == "drain":
            self.ops.append(Drain())
        elif then == "step":
            self.ops.append(Step())

    def _new_span(self, length: int) -> Span:
        self.fresh += 1
        return Span(f"s{self.fresh}", 0, length)

    def _length(self, blocks: int, off: int, share: int) -> int:
        """``blocks`` units of tokens, on or beside a boundary. At most what fills the pool's
        1/``share`` if every group held it all; half the pool in one group if ``share`` is 0.
        """
        assert self.config is not None
        unit = self.config.scheduler_block_size
        most = max(1, (self.config.num_blocks - 1) // (share * len(self.config.groups) or 2))
        units = 1 if blocks == 63 else 2 + blocks % most
        return max(1, min(units * unit + (off if off < 2 else unit // 2), 2048))

    def _fork(self) -> None:
        """Two requests that leave the first prompt half way: a junction."""
        assert self.config is not None
        first, unit = self.prompts["r0"][0], self.config.scheduler_block_size
        cut = (first.stop or 0) // 2 // unit * unit
        if cut:
            for _ in range(2):
                prompt = (Span(first.stream, 0, cut), self._new_span(2 * unit + 1))
                self._submit(prompt, self.identities["r0"], 1, "drain")

    def _earlier(self, choice: int) -> str:
        return f"r{choice % len(self.prompts)}"

    @precondition(lambda self: self.sessions > 0)
    @rule(
        blocks=st.integers(0, 63),
        off=st.sampled_from((1, 0, -1, 2)),
        share=st.sampled_from((2, 1, 1, 3, 0)),
        identity=st.sampled_from((Identity(),) * 6 + _IDENTITIES[1:3]),
        out=st.sampled_from((1, 2, 5)),
        then=_THEN,
    )
    def new(self, blocks: int, off: int, share: int, identity: Identity, out: int, then: str) -> None:
        """A prompt of its own."""
        self.sessions -= 1
        self._submit((self._new_span(self._length(blocks, off, share)),), identity, out, then)

    @precondition(lambda self: self.prompts)
    @rule(
        choice=st.integers(0, 23),
        suffix=st.integers(0, 9),
        how=_AGAIN,
        out=st.sampled_from((1, 2)),
        then=_THEN,
    )
    def again(self, choice: int, suffix: int, how: str, out: int, then: str) -> None:
        """An earlier prompt: the same, with a fresh suffix, with its output, its first part with
        a suffix that fills a block, or the same tokens under another salt or LoRA.
        """
        assert self.config is not None
        name = self._earlier(choice)
        prompt, identity = self.prompts[name], self.identities[name]
        length = 1 + suffix
        if how == "branch":
            length += self.config.scheduler_block_size
            first = prompt[0]
            stop = self.outputs[first.stream[1:]] if first.stop is None else first.stop
            if stop - first.start < 2:
                return
            cut = 1 + (suffix * self.config.scheduler_block_size - 1) % (stop - first.start - 1)
            prompt = (Span(first.stream, first.start, first.start + cut),)
        elif how == "extend":
            prompt = (*prompt, Span(f"@{name}", 0, None))
        elif how == "swap":
            identity = _IDENTITIES[suffix % len(_IDENTITIES)]
        if how not in ("same", "swap"):
            prompt = (*prompt, self._new_span(length))
        self._submit(prompt, identity, out, then)

    @precondition(lambda self: self.prompts)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        """Let the scheduler step."""
        self.ops.append(Step(count=count))

    @precondition(lambda self: self.prompts)
    @rule()
    def drain(self) -> None:
        """Let everything finish."""
        self.ops.append(Drain())

    @precondition(lambda self: self.prompts)
    @rule(choice=st.integers(0, 23))
    def abort(self, choice: int) -> None:
        """Cancel a request, finished or not."""
        self.ops.append(Abort(request=self._earlier(choice)))

    @precondition(lambda self: len(self.prompts) > 1)
    @rule(sure=st.integers(0, 3))
    def reset(self, sure: int) -> None:
        """Empty the cache, now and then."""
        if sure == 0:
            self.ops += [Drain(), Reset()]

    def teardown(self) -> None:
        """Let the first requests return, then run and judge what was made."""
        if self.config is None or not self.prompts:
            return
        self.ops.append(Drain())
        for name in sorted(self.prompts)[:RETURNING]:
            self._submit(self.prompts[name], self.identities[name], 1, "drain")
        if len(self.prompts) % 2:
            self._fork()
        trace = Trace(config=self.config, ops=tuple(self.ops))
        run = type(self).run_trace
        story = Story(run(trace), run)
        for score, label in scores(story):
            target(score, label=label)
        type(self).judge(story)


def scores(story: Story) -> list[tuple[float, str]]:
    """Where to climb: pressure on the pool, and low occupancy at a hit that shrank."""
    blocks = story.config.num_blocks
    found = [(max((len(needs) for needs in story.working_sets), default=0) / blocks, "working set / pool")]
    evictions = sum(event.kind == "removed" for seen in story.observations for event in seen.events)
    found.append((min(evictions / blocks, 4.0), "evictions / pool"))
    shrunk = [1 - back.peak / blocks for back in story.returns if back.hit.hit_tokens < back.expected]
    lost = [2 - back.peak / blocks for back in story.returns if back.hit.hit_tokens == 0]
    found.append((max(lost or shrunk or [0.0]), "shrunk hit at low occupancy"))
    return found


def machine_for(wide: Range, run_trace: Callable[[Trace], Run], judge: Judge) -> type[TraceMachine]:
    """A machine class for one search."""
    members: dict[str, Any] = {
        "wide": wide,
        "run_trace": staticmethod(run_trace),
        "judge": staticmethod(judge),
    }
    return type("TraceMachine", (TraceMachine,), members)
