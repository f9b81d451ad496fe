"""Every promise by search: what holds within the bound, and every known violation is found.

HITPROOF_PROFILE (quick, ci, nightly) sets how many traces. The terminal summary prints what was
checked, with bounds and evidence counts.
"""

import pytest

from hitproof.fuzz.draw import Range
from hitproof.fuzz.search import Slice, search
from hitproof.fuzz.survey import PROFILES, profile, survey
from hitproof.properties.known import KNOWN, known_for
from hitproof.properties.verdict import Verdict

pytestmark = pytest.mark.fuzz

RELEASES = ("0.33.0", "0.25.0", "0.22.1", "0.19.1")


@pytest.fixture(scope="session", params=RELEASES)
def surveyed(request, fuzz_summary):
    found = survey(request.param, PROFILES[profile()])
    fuzz_summary.append(found)
    return found


def test_no_promise_breaks_in_a_way_that_is_not_listed(surveyed):
    """A violation outside the known-violations table is news: it is printed with its trace."""
    assert surveyed.new == {}, "\n".join(f"{name}:\n{trace.dumps()}" for name, trace in surveyed.new.items())


def test_what_holds_was_looked_at(surveyed):
    """Every property that is not violated has evidence: a pass over nothing is a failure."""
    vacuous = {
        j.property_id for j in surveyed.judgements() if j.verdict in (Verdict.VACUOUS, Verdict.UNKNOWN)
    }
    assert vacuous == set()


@pytest.mark.parametrize("release", RELEASES)
def test_the_cliff_is_found(release):
    """hit-survives-half-pool is known not to hold: a search of plain hybrids must show it, from nothing."""
    for seed in range(8):
        wide = Range(semantics=release, hybrid=True, odd=False)
        work = Slice(wide=wide, properties=("hit-survives-half-pool",), seed=seed, seconds=600, examples=300)
        found = search(work)
        if found.trace is not None:
            break
    assert known_for(found.findings[0], found.trace).report == "vllm#48435"


def test_every_known_violation_names_its_report():
    """An entry without a public report says that it was found here."""
    assert all(k.report.startswith("vllm#") or k.report == "found by hitproof" for k in KNOWN)
