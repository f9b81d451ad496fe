"""``Target``: anything that can run a trace; ``ModelTarget``: the abstract state machine."""

from __future__ import annotations

from typing import Literal, Protocol

import attrs

from hitproof.model.errors import BadInput
from hitproof.model.manager import ModelManager
from hitproof.model.observation import Run
from hitproof.model.scheduler import Scheduler
from hitproof.model.semantics import Semantics
from hitproof.model.trace import Trace


class Target(Protocol):
    """Something that runs traces. ``sees``: what its runs show, of "hits", "calls" and "state"."""

    @property
    def name(self) -> str:
        """For example ``model`` or ``manager (core)``."""

    @property
    def version(self) -> str:
        """The vLLM release or tree."""

    @property
    def sees(self) -> frozenset[str]:
        """What its runs show."""

    def run(self, trace: Trace) -> Run:
        """Run one trace from an empty cache."""


@attrs.frozen(slots=True)
class ModelTarget:
    """Runs traces on the model. ``semantics`` overrides the trace's release. ``record``: keep an
    observation of every call; without, a run shows hits only and takes no memory for the rest.
    """

    semantics: str | None = None
    name: str = "model"
    record: bool = True
    sees: frozenset[str] = frozenset({"hits", "calls", "state"})

    @property
    def version(self) -> str:
        """The release whose rules are applied, or that of each trace."""
        return self.semantics or "the trace's"

    def run(self, trace: Trace) -> Run:
        """Run one trace from an empty cache."""
        trace = under(trace, self.semantics)
        manager = ModelManager(trace.config, record_events=self.record)
        return Scheduler(trace, manager, record=self.record).run(self.name, trace.config.semantics)


def under(trace: Trace, semantics: str | None, retention: int | Literal["keep"] | None = "keep") -> Trace:
    """The same trace under another release's rules; BadInput if that release refuses its config.

    ``retention``: the interval to set where the release has one.
    """
    if semantics is None or (semantics == trace.config.semantics and retention == "keep"):
        return trace
    rules = Semantics.of(semantics)
    interval = trace.config.retention_interval if retention == "keep" or not rules.retention else retention
    try:
        config = attrs.evolve(trace.config, semantics=semantics, retention_interval=interval)
    except BadInput as error:
        raise BadInput(f"this trace does not run under {semantics}: {error}") from None
    return attrs.evolve(trace, config=config)
