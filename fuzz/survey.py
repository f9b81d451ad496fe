"""``survey``: every promise on one release's model, by a search bounded by count, not by time.

The same release, profile and seed give the same survey. Known violations are counted and passed
over; one that is not known is new and ends the search for its property.
"""

from __future__ import annotations

import os

import attrs

from hitproof.fuzz.draw import Range
from hitproof.fuzz.hunt import shrink
from hitproof.fuzz.search import Slice, search
from hitproof.model import BadInput, Trace
from hitproof.properties.known import Known, known_for
from hitproof.properties.registry import HIT_QUALITY, PROPERTIES
from hitproof.properties.verdict import Judgement

PROFILES = {"quick": 400, "ci": 1200, "nightly": 20_000}
"""Traces per release and kind of config."""


def profile() -> str:
    """The profile in force: HITPROOF_PROFILE, or quick."""
    name = os.environ.get("HITPROOF_PROFILE", "quick")
    if name not in PROFILES:
        raise BadInput(f"HITPROOF_PROFILE={name!r}: use one of {', '.join(PROFILES)}")
    return name


@attrs.define(kw_only=True, slots=True)
class Survey:
    """What was seen of one release. ``known``: report per property whose known violation was met;
    ``new``: the shrunk trace per property violated in a way that nobody listed.
    """

    release: str
    traces: int
    seed: int
    bound: str
    runs: dict[str, int]
    evidence: dict[str, int]
    known: dict[str, Known] = attrs.Factory(dict)
    new: dict[str, Trace] = attrs.Factory(dict)

    def judgements(self) -> list[Judgement]:
        """A verdict per property; a known violation is VIOLATED like any other."""
        return [
            Judgement.of(
                p.id,
                violated=p.id in self.known or p.id in self.new,
                runs=self.runs[p.id],
                evidence=self.evidence[p.id],
                bound=self.bound,
            )
            for p in PROPERTIES
        ]


def survey(release: str, traces: int, seed: int = 0) -> Survey:
    """Judge ``traces`` plain hybrid traces for hit quality and as many varied ones for everything."""
    names = [p.id for p in PROPERTIES]
    wide = Range(semantics=release)
    found = Survey(
        release=release,
        traces=traces,
        seed=seed,
        bound=f"{traces} traces of each kind; {wide.text}; seed {seed}",
        runs=dict.fromkeys(names, 0),
        evidence=dict.fromkeys(names, 0),
    )
    quality = [p.id for p in HIT_QUALITY]
    for focus in (True, False):
        left = traces
        part = 0
        while left > 0:
            part += 1
            wanted = [name for name in (quality if focus else names) if name not in found.new]
            result = search(
                Slice(
                    wide=Range(semantics=release, hybrid=focus, odd=not focus),
                    properties=tuple(wanted),
                    seed=seed * 1000 + part,
                    seconds=3600,
                    examples=left,
                    skip_known=frozenset(found.known),
                )
            )
            for name, runs in result.runs.items():
                found.runs[name] += runs
                found.evidence[name] += result.evidence[name]
            left -= max(1, max(result.runs.values(), default=0))
            if result.trace is None:
                break
            for finding in result.findings:
                name = finding.property_id
                listed = known_for(finding, result.trace)
                if listed is not None:
                    found.known[name] = listed
                else:
                    found.new[name] = shrink(result.trace, finding, most_runs=1500).trace
    return found
