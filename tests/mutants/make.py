"""Makes what the tests here compare with: ``python tests/mutants/make.py``.

A mutant without a file in ``traces`` gets one, found by search and reduced; ``matrix.json`` is written
anew. Read the difference before you commit it.
"""

import json
from pathlib import Path

from test_search import searched

from hitproof.fuzz.reduce import reduce
from hitproof.fuzz.seeded import caught, fires
from hitproof.model import Trace
from hitproof.properties.mutants import MUTANTS

HERE = Path(__file__).parent


def make_trace(mutant):
    """Search until it is found, then reduce."""
    return reduce(
        searched(mutant).trace, lambda trace: caught(mutant, trace, mutant.breaks) is not None
    ).trace


def main():
    """Traces first, then the matrix."""
    matrix = {}
    for mutant in MUTANTS:
        path = HERE / "traces" / f"{mutant.id}.json"
        if not path.exists():
            path.write_text(make_trace(mutant).dumps())
            print(f"{path.name}: made")
        matrix[mutant.id] = {
            name: {"expected": finding.expected, "seen": finding.seen}
            for name, finding in fires(mutant, Trace.loads(path.read_text())).items()
        }
    (HERE / "matrix.json").write_text(json.dumps(matrix, indent=2) + "\n")


if __name__ == "__main__":
    main()
