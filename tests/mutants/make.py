"""Makes what the tests here compare with: ``python tests/mutants/make.py``.

A mutant without a file in ``traces`` gets one, found by search and reduced; ``matrix.json`` is written
anew. Read the difference before you commit it.
"""

import json
from pathlib import Path

from hitproof.fuzz.draw import Range
from hitproof.fuzz.reduce import reduce
from hitproof.fuzz.seeded import caught, find, fires
from hitproof.model import Trace
from hitproof.properties.mutants import MUTANTS

HERE = Path(__file__).parent
EXAMPLES = 20_000


def make_trace(mutant):
    """Search until it is found, then reduce."""
    found = find(mutant, Range(semantics=mutant.semantics, retention="any"), seed=0, examples=EXAMPLES)
    if found.trace is None:
        raise SystemExit(f"{mutant.id}: not found in {EXAMPLES} traces")
    return reduce(found.trace, lambda trace: caught(mutant, trace, mutant.breaks) is not None).trace


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
            for name, finding in fires(mutant, Trace.load(path)).items()
        }
    (HERE / "matrix.json").write_text(json.dumps(matrix, indent=2) + "\n")


if __name__ == "__main__":
    main()
