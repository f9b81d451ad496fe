"""Confirming on an independent path: what finds is not what confirms, and twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hitproof.model import RELEASES, BadInput, HarnessFault, Target, Trace
from hitproof.properties.registry import property_of
from hitproof.properties.story import Story
from hitproof.replay.counterexample import Sighting


def sight(trace: Trace, property_id: str, target: Target) -> Sighting:
    """Run ``trace``, read back from its file form, twice on ``target`` and judge it there.

    A refusal and a harness fault are said as such: neither is a verdict.
    """
    prop = property_of(property_id)
    copy = Trace.loads(trace.dumps())
    try:
        first, second = target.run(copy), target.run(copy)
    except BadInput as error:
        return Sighting(target=target.name, version=target.version, verdict="refused", detail=str(error))
    except HarnessFault as error:
        return Sighting(target=target.name, version=target.version, verdict="fault", detail=str(error))
    hits = "hits " + " ".join("-" if hit is None else str(hit) for hit in first.hits)
    version = first.version
    if first.hits != second.hits or first.observations != second.observations:
        return Sighting(target=target.name, version=version, verdict="unstable", detail="two runs differ")
    story = Story(first, target.run)
    if not prop.needs <= story.sees:
        return Sighting(target=target.name, version=version, verdict="shown", detail=hits)
    broken = prop.check(story).finding is not None
    return Sighting(
        target=target.name, version=version, verdict="reproduced" if broken else "not reproduced", detail=hits
    )


def status_of(sightings: Sequence[Sighting]) -> str:
    """What the sightings make of a find: confirmed by vLLM's own code, refuted, or neither yet."""
    real = [s for s in sightings if s.target != "model"]
    shown = {s.verdict for s in sightings if s.target == "model"}
    if any(s.verdict == "reproduced" for s in real):
        return "model wrong" if "not reproduced" in shown else "confirmed"
    if any(s.verdict == "not reproduced" for s in real):
        return "model wrong"
    return "unconfirmed"


def spans(sightings: Sequence[Sighting], target: str = "manager (core)") -> list[str]:
    """Runs of neighbouring releases with one verdict on ``target``: ``0.19.1 to 0.28.0 reproduced``."""
    tried = [s for s in sightings if s.target == target]
    tried.sort(key=lambda s: RELEASES.index(s.version) if s.version in RELEASES else len(RELEASES))
    found = []
    for verdict, group in groupby(tried, key=lambda s: s.verdict):
        versions = [s.version for s in group]
        span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        found.append(f"{span} {verdict}")
    return found
