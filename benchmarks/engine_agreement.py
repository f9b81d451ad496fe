"""Random traces on vLLM's engine beside the model, and its answers from the cache beside cold ones.

    python benchmarks/engine_agreement.py [--traces N] [--seed N] [--vllm-python PATH] [--json FILE]

For each of a few group layouts, N random traces (``hitproof.fuzz.random_traces``) with long prompts:
the hits of all requests against the model's, the largest difference of their answers from cold ones, and
the same with noise over the cache before each submit, smallest and largest over the traces. Ghosts are
traces in which the model finds blocks of other content (an adapter's, to 0.30): there, the answer of the
request that it names must be the first that is wrong. Exit code 1 if a hit or an answer is wrong, or noise
never shows. Ctrl-C keeps the layouts done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hitproof.fuzz.random_traces import random_trace_on
from hitproof.model import BadInput, CacheConfig, Group, ModelTarget, under
from hitproof.properties.safety import hit_content
from hitproof.properties.story import Story
from hitproof.replay import env
from hitproof.replay.content import TOLERANCE
from hitproof.replay.engine import EngineTarget
from hitproof.replay.ladder import rows_of


def window(size: int, block: int = 32) -> Group:
    """A group of windows."""
    return Group(kind="sliding_window", block_size=block, window=size)


FULL = Group(kind="full", block_size=32)
CHUNK = Group(kind="chunked_local", block_size=32, chunk=64)
LAYOUTS = (
    (FULL,),
    (window(64),) * 3 + (FULL,),
    (window(64), Group(kind="full", block_size=96)),
    (window(40), window(97), CHUNK, FULL),
    (Group(kind="chunked_local", block_size=64, chunk=128), Group(kind="full", block_size=64), FULL),
)
WIDTH = 140
COUNTS = ("traces", "refused", "requests", "preemptions", "differ", "with hits", "tokens", "ghosts", "wrong")


def measure(groups: Sequence[Group], seeds: Sequence[int], engine: EngineTarget, tick: Any) -> dict[str, Any]:
    """One layout."""
    config = CacheConfig(
        num_blocks=36,
        groups=tuple(groups),
        max_num_batched_tokens=128,
        max_num_seqs=3,
        max_model_len=384,
        semantics=engine.version,
    )
    found: dict[str, Any] = dict.fromkeys((*COUNTS, "cold"), 0)
    labels = [f"{len(list(same))} x {label}" for label, same in groupby(group.label for group in groups)]
    found |= {"groups": ", ".join(labels), "noise": []}
    for seed in seeds:
        tick()
        trace = random_trace_on(config, seed)
        try:
            seen, expected = engine.run(trace), ModelTarget().run(under(trace, engine.version))
            kept, broken = engine.content(trace), engine.content(trace, bug="noise")
        except BadInput:
            found["refused"] += 1
            continue
        rows = [row for row in rows_of(expected, seen, sees=engine.sees) if not row.unseen]
        found["traces"] += 1
        found["requests"] += len(rows)
        found["preemptions"] += sum(result.preemptions for result in expected.requests)
        found["differ"] += sum(not row.same for row in rows)
        found["with hits"] += kept.requests
        found["tokens"] += kept.tokens
        ghost = hit_content(Story(expected, ModelTarget().run)).finding
        first = kept.first("cpu")
        if ghost is None:
            found["wrong"] += first is not None
            found["cold"] = max(found["cold"], kept.largest)
        elif ghost.request in {answer.request for answer in kept.answers}:
            found["ghosts"] += 1
            found["wrong"] += first is None or first.request != ghost.request
        found["noise"] += [broken.largest] if broken.requests else []
    return found


def main() -> None:
    """Measure all layouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=int, default=20, help="traces of each layout (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one (default 0)")
    parser.add_argument(
        "--vllm-python", type=Path, help="an interpreter with vLLM (default: `hitproof vllm env`'s)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    console, done = Console(width=None if sys.stdout.isatty() else WIDTH), []
    seeds = range(options.seed, options.seed + options.traces)
    python = env.python(given=options.vllm_python)
    with EngineTarget(python) as engine, Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"vLLM {engine.version}", total=len(LAYOUTS) * len(seeds))
        try:
            for groups in LAYOUTS:
                done.append(measure(groups, seeds, engine, lambda: progress.advance(task)))
        except KeyboardInterrupt:
            console.print("interrupted: the layouts done")
        version = engine.version
    table = Table("groups", *COUNTS, "from cold", "with noise", title=f"vLLM {version}")
    for found in done:
        noise = f"{min(found['noise']):.1e} to {max(found['noise']):.1f}" if found["noise"] else "-"
        table.add_row(found["groups"], *(str(found[name]) for name in COUNTS), f"{found['cold']:.1e}", noise)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"release": version, "layouts": done}, indent=2) + "\n")
    limit = TOLERANCE["cpu"]
    if any(
        found["differ"] or found["cold"] > limit or max(found["noise"], default=0) < limit for found in done
    ):
        sys.exit("a hit is not the model's, an answer is not the cold one, or noise never showed")


if __name__ == "__main__":
    main()
