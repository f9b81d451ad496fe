"""The terminal summary of the fuzz properties: what was checked, with bounds and evidence counts."""

import pytest

_SURVEYS = pytest.StashKey()


def pytest_configure(config):
    config.stash[_SURVEYS] = []


@pytest.fixture(scope="session")
def fuzz_summary(request):
    """Surveys put here are printed at the end."""
    return request.config.stash[_SURVEYS]


def pytest_terminal_summary(terminalreporter, config):
    for found in config.stash[_SURVEYS]:
        terminalreporter.section(f"promises on the model of vLLM {found.release}")
        terminalreporter.write_line(f"bound: {found.bound}")
        for j in found.judgements():
            listed = found.known.get(j.property_id)
            note = f" (known: {listed.report})" if listed else " (NEW)" if j.property_id in found.new else ""
            terminalreporter.write_line(f"  {j.verdict.name:9}{j.property_id:25}{j.evidence:>9} checks{note}")
