"""``hitproof docs laws``: what Z3 answers, kept in docs/laws.json and shown in docs/laws.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hitproof.cli.common import errors, spinner
from hitproof.fuzz.bounded.laws import SECTIONS
from hitproof.model import BadInput, Trace
from hitproof.replay import store
from hitproof.replay.confirm import sight
from hitproof.replay.manager_target import ManagerTarget

LAWS = Path("docs/laws.json")

_HEADS: dict[str, tuple[str, tuple[tuple[str, str], ...], str]] = {
    "runs": (
        "Does what fits survive? Is half the pool enough?",
        (
            ("promise", "promise"),
            ("releases", "releases"),
            ("settings", "settings"),
            ("verdict", "verdict"),
            ("bound", "bound"),
            ("trace", "smallest counterexample"),
            ("minimal", "minimality"),
            ("vllm", "real vLLM"),
            ("seconds", "s"),
        ),
        "Run level: one request at a time, one to eight window groups of one spec beside one full group, one block size, a "
        "window of whole blocks and one token, prompts of whole blocks and one token; pool, lengths, window, number of window "
        "groups and chunk are symbolic, the order of visits too. HOLDS is for every pool and length; up to the first shortened "
        "hit. Chunked: prompts of at most four prefill steps. A counterexample is given by its requests; each is drained before "
        "the next. Order of size: turns, sessions, blocks. Outside this class the second promise does not hold under retention 0 either: CE-0022 (sessions that share a prefix), CE-0010 (requests that overlap, chunked local).",
    ),
    "depth": (
        "How far 60 seconds reach",
        (("question", "question"), ("answer", "answer"), ("seconds", "s")),
        "`hit-survives-fit` on 0.33.0 under retention 0, up to 4 sessions.",
    ),
    "half-pool": (
        "From which pool on is half of it enough?",
        (
            ("windows", "window groups"),
            ("chunk", "chunk (blocks)"),
            ("largest", "largest pool with a counterexample"),
            ("above", "every larger pool, any number of turns x 3 sessions"),
            ("enough", "2(Gs c + 1)"),
            ("seconds", "s"),
        ),
        "0.33.0 under retention 0 with chunked prefill; any window. A running prefill takes at most `Gs c + 1` blocks beyond what "
        "its session keeps, so that `2(Gs c + 1)` blocks are enough; counterexamples are those of 3 turns x 2 sessions in pools "
        "up to that size plus 2. The proof above is by induction, for prompts of at most four steps.",
    ),
    "half-pool-for-any": (
        "The same for any number of window groups and any chunk",
        (("question", "question"), ("answer", "answer"), ("seconds", "s")),
        "Induction with all sizes symbolic, from `2(Gs c + 1)` blocks on; prompts of at most four steps.",
    ),
    "occupancy": (
        "The least occupancy at which a hit can vanish",
        (
            ("release", "vLLM"),
            ("settings", "settings"),
            ("windows", "window groups"),
            ("least", "working set"),
            ("share", "of 400 blocks"),
            ("proof", "optimality"),
            ("seconds", "s"),
        ),
        "400 blocks, windows of 2 blocks, any lengths, up to 5 turns x 3 sessions.",
    ),
    "masks": (
        "Does what is written cover what is looked up?",
        (
            ("promise", "promise"),
            ("releases", "releases"),
            ("settings", "settings"),
            ("verdict", "verdict"),
            ("bound", "bound"),
            ("trace", "smallest counterexample"),
            ("vllm", "real vLLM"),
            ("seconds", "s"),
        ),
        "One window group beside one full group, block sizes of 1 to 3 tokens, any window of at least one block, prompts of up to 5 "
        "scheduler blocks, retention dense, 0 and 1 to 3 scheduler blocks where it is not named, one prefill step, nothing evicted. "
        "Below that range: a window of 1 token is never written and never hit from 0.23.0 on (tests/bounded/test_masks.py). Not asked: chunked local groups, several window specs.",
    ),
    "law": (
        "The law of the cliff",
        (
            ("seed", "seed"),
            ("workloads", "random workloads"),
            ("wrong", "wrong"),
            ("largest", "largest error (blocks)"),
            ("seconds", "s"),
        ),
        "K sessions in round-robin, each re-sending a prefix of `n` blocks and one token, `Gs` window groups of `m <= n` blocks beside "
        "one full group, `G = Gs + 1`, one block size, prefill in one step, `o` output tokens, `X = n + Gs m`. All hits of all later rounds are "
        "full exactly when\n\n"
        "    num_blocks - 1 >= G (n + 1) + after + (K - 2) tail        (K >= 2)\n\n"
        "| | tail | after |\n|---|---|---|\n"
        "| retention 0, from 0.24 | X | X |\n"
        "| retention 0, 0.23 | X + 1 | X + 1 |\n"
        "| dense, from 0.24 | G n | X, with one output token G n |\n"
        "| dense, 0.23 | G n + 1 | X + 1, with one output token G n + 1 |\n"
        "| before 0.23 | G n + G | X + G - 1, with one output token G n + G - 1 |\n\n"
        "For unequal block sizes, chunked prefill and retention intervals the same formula holds with counts: `G (n + 1)` becomes the most "
        "blocks that a prefill takes before its own come back to the head of the queue, `tail` the blocks that it leaves behind, hashed ones and "
        "unhashed ones where the release does not put those first, `after` those of them freed from the first live block on "
        "(`fuzz/bounded/cliff.py` counts them). The last prefill of the first round decides. Checked against the model, where the least pool "
        "is searched for, over random releases, block sizes, windows, group counts, chunks, intervals, K and lengths (no output fills a block):",
    ),
    "example": (
        "The example: 400 blocks of 32, five windows of 64 beside one full group, 4 sessions",
        (
            ("release", "vLLM"),
            ("retention", "retention"),
            ("outputs", "output tokens"),
            ("tokens", "longest prefix with full hits (tokens)"),
            ("model", "the model"),
        ),
        "One output token, as a prefill-only instance asks for, frees a prompt's window tail before the blocks that no hit needs: under dense "
        "retention the cliff comes earlier.",
    ),
    "unbounded": (
        "Without bounds",
        (("question", "question"), ("answer", "answer"), ("seconds", "s")),
        "Horn clauses, Z3's Spacer. Accounting: one tracked block among any number, any operations in any order. Left out: the queue's "
        "order, which block is which, contents, block tables (the tracked block's holders are a number), faults; asked for "
        "`pool-conserved` or `queue-well-formed` alone, Spacer found no invariant in 30 s, for all four at once it does. Sessions: one "
        "observed session among any number, the others summed; left out: what the run level leaves out, and which session is which.",
    ),
    "blocks": (
        "The state machine itself, small pools",
        (
            ("promise", "promise"),
            ("verdict", "verdict"),
            ("bound", "bound"),
            ("reason", "why unknown"),
            ("trace", "counterexample"),
            ("seconds", "s"),
        ),
        "0.33.0, two turns deep (`hitproof prove` goes to three, and four for `sole-owner`); six small configs of 3 to 9 blocks (`STAGES` in `fuzz/bounded/block_level.py`): one block size, two, chunked prefill, "
        "EAGLE's drop, dense retention, chunked local; two requests at once, submissions, aborts and steps in any order; no waiting, no "
        "preemption, no block filled by output.",
    ),
}


@click.command("laws")
@click.option(
    "--section", multiple=True, type=click.Choice(list(SECTIONS)), help="Section(s) [default: all]."
)
def laws_command(section: tuple[str, ...]) -> None:
    """Ask Z3 for every table of docs/laws.md and keep the answers in docs/laws.json (about 20 minutes).

    Counterexamples are confirmed on the release's own manager where its files are there.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / "pyproject.toml").is_file():
        raise BadInput(f"{root}: not a checkout of hitproof; the documents are generated from one")
    for name in section or SECTIONS:
        rows: list[dict[str, Any]] = []
        with spinner(f"laws: {name}") as say:
            for row in SECTIONS[name](_confirm):
                rows.append(row)
                say(str(row))
                errors.print(f"{name}: {row}", markup=False)
        file = root / LAWS
        kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        kept[name] = rows
        file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _confirm(trace: Trace, property_id: str, release: str) -> str:
    try:
        tree = store.find(release)
    except BadInput:
        return "not run"
    with ManagerTarget(tree) as manager:
        return f"{release} {sight(trace, property_id, manager).verdict}"


def laws_page(data: dict[str, list[dict[str, Any]]]) -> str:
    """docs/laws.md."""
    out = [
        "# Laws",
        "",
        "Generated by `hitproof docs write` from docs/laws.json, which `hitproof docs laws` measures (2 shared cores, one run each, other work kept the load near 10; "
        "times in seconds); do not edit. VIOLATED was reproduced on the model; what the release's own manager said stands beside it. "
        "HOLDS is a proof within the bound and the class named above each table, no more. UNKNOWN is what the solver could not say.",
        "",
    ]
    for name, (title, columns, words) in _HEADS.items():
        out += [f"## {title}", "", *words.split("\n"), ""]
        out += ["| " + " | ".join(head for _, head in columns) + " |", "|" + "---|" * len(columns)]
        for row in data.get(name, []):
            out.append("| " + " | ".join(_cell(row.get(key, "")) for key, _ in columns) + " |")
        if not data.get(name):
            out.append("| not asked yet |" + " |" * (len(columns) - 1))
        out.append("")
    return "\n".join(out)


def _cell(value: object) -> str:
    return str(value).replace("|", "/")
