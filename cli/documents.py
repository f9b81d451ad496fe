"""The documents generated from code and data: ``hitproof docs``."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import click

from hitproof.cli.common import bar
from hitproof.cli.laws import LAWS, laws_command, laws_page
from hitproof.fuzz.survey import PROFILES, Survey, survey
from hitproof.model import BadInput, Semantics
from hitproof.model.semantics import RELEASES, switch_table
from hitproof.properties.known import KNOWN
from hitproof.properties.mutants import MUTANTS
from hitproof.properties.registry import PROPERTIES
from hitproof.replay import report
from hitproof.replay.confirm import spans
from hitproof.replay.correspondence import NAMES, SEES
from hitproof.replay.counterexample import Counterexample, stored
from hitproof.replay.ladder import RUNGS, TOLERANCES

ROOT = Path(__file__).resolve().parent.parent
VERDICTS = Path("docs/verdicts.json")
GLOSSARY = (
    "Words of the formal statements:",
    "",
    "- *r, q, s*: requests, and a session: a chain of requests of one identity (salt, LoRA) whose sequences extend one another.",
    "- *served*: all prompt tokens of a request are computed.",
    "- *A*: the scheduler block size, the LCM of the groups' block sizes; *floor(p)*: p rounded down to a multiple of A.",
    "- *promised(L)*: floor(L - 1), less A under EAGLE: what a resend of L tokens hits if nothing is lost. *promised(s, r)*: that of",
    "  s's latest request, if it lies inside r's prompt.",
    "- *WS*: the working set, (group, block) contents that must stay cached so that every live session's latest sequence and every",
    "  request under way would hit in full if re-sent now. *held*: blocks with a reference.",
    "- *a key is lost*: it left some group's index after having been in it.",
    "- *peak(r)*: blocks that r holds at most when it runs alone. *ghost(b)*: what the computed tokens last wrote into block b.",
    "- *checks*: how often the search met the statement's condition; *traces*: on how many runs it was judged.",
)
MARK = "<!-- generated: {} -->"


@click.group("docs")
def docs_group() -> None:
    """Write or check the generated documents (in a checkout of hitproof)."""


@docs_group.command("write")
def write_docs() -> None:
    """Write docs/properties.md, semantics.md, laws.md, counterexamples/ pages and README's blocks."""
    for path, text in documents().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        click.echo(str(path))


@docs_group.command("check")
def check_docs() -> None:
    """Exit 1 if a generated document is not what the code says."""
    stale = [str(path) for path, text in documents().items() if _read(path) != text]
    if stale:
        click.echo(f"stale: {', '.join(stale)}; run `hitproof docs write`")
        raise click.exceptions.Exit(1)
    click.echo("all generated documents are fresh")


@docs_group.command("verdicts")
@click.option("--release", multiple=True, help="vLLM release(s) [default: all].")
@click.option(
    "--traces", type=click.IntRange(1), default=PROFILES["ci"], show_default=True, help="Per kind of config."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def write_verdicts(release: tuple[str, ...], traces: int, seed: int) -> None:
    """Survey every promise on every release's model and keep the verdicts in docs/verdicts.json."""
    for name in release:
        Semantics.of(name)
    kept = _verdicts()
    with bar() as progress:
        for name in release or RELEASES:
            task = progress.add_task(f"vLLM {name}", total=1, note="")
            kept[name] = _verdict_rows(survey(name, traces, seed))
            progress.update(task, completed=1)
            (ROOT / VERDICTS).write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


docs_group.add_command(laws_command)


def _verdict_rows(found: Survey) -> dict[str, dict[str, object]]:
    rows = {}
    for j in found.judgements():
        listed = found.known.get(j.property_id)
        rows[j.property_id] = {
            "verdict": j.verdict.name,
            "evidence": j.evidence,
            "runs": j.runs,
            "traces": found.traces,
            "seed": found.seed,
            "report": listed.report if listed else "NEW" if j.property_id in found.new else None,
        }
    return rows


def _verdicts() -> dict[str, dict[str, dict[str, object]]]:
    text = _read(VERDICTS)
    found: dict[str, dict[str, dict[str, object]]] = json.loads(text) if text else {}
    return found


def _read(path: Path) -> str:
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def documents() -> dict[Path, str]:
    """Every generated document with its text."""
    if not (ROOT / "pyproject.toml").is_file():
        raise BadInput(f"{ROOT}: not a checkout of hitproof; the documents are generated from one")
    cases = stored(ROOT / "counterexamples")
    found = {
        Path("docs/properties.md"): _properties_page(cases),
        Path("docs/semantics.md"): _semantics_page(),
        Path("docs/correspondence.md"): _correspondence_page(),
        Path("docs/rungs.md"): _rungs_page(),
        Path("docs/laws.md"): laws_page(json.loads(_read(LAWS) or "{}")),
        Path("counterexamples/INDEX.md"): _index_page(cases),
        Path("README.md"): _readme(cases),
    }
    for case in cases:
        found[Path(f"counterexamples/{case.name}.md")] = report.markdown(case)
        found[Path(f"counterexamples/{case.name}.svg")] = report.svg(case)
    return found


def _properties_page(cases: list[Counterexample]) -> str:
    verdicts = _verdicts()
    out = [
        "# The promises",
        "",
        "Generated by `hitproof docs write` from `properties/registry.py`, `known.py`, `mutants.py`, the stored",
        "counterexamples and `docs/verdicts.json`; do not edit.",
        "",
        "A row says VIOLATED if a stored counterexample is reproduced by that release's own manager, if the search met",
        "a violation, or if a known violation covers the release; otherwise HOLDS, which means no more than: the search",
        f"of the model found nothing. Search: `hitproof docs verdicts --traces {_traces(verdicts)}`, a Hypothesis search of",
        "that many plain hybrid configs for hit quality and as many varied ones for everything. The model agrees with each",
        "release's own manager on random traces ([divergences.md](divergences.md)).",
        "",
        *GLOSSARY,
        "",
    ]
    for p in PROPERTIES:
        out += [f"## {p.id}", "", f"**{p.promise}**", "", p.why, ""]
        out += [f"- Family: {p.family}", f"- Formally: `{p.statement}`", f"- In vLLM: {p.source}"]
        for k in (k for k in KNOWN if k.property_id == p.id):
            until = f" until {k.until}" if k.until else " on"
            out.append(f"- Known violation: from {k.since}{until}, when {k.when} ({k.report}): {k.because}.")
        for m in (m for m in MUTANTS if m.breaks == p.id):
            out.append(f"- Seeded bug `{m.id}`: {m.what}")
        for case in (c for c in cases if c.finding.property_id == p.id):
            out.append(f"- Counterexample: [{case.name}](../counterexamples/{case.name}.md) ({case.status})")
        out += ["", "| vLLM | verdict | why | checks | traces |", "|---|---|---|---|---|"]
        out += [_verdict_row(release, p.id, verdicts, cases) for release in RELEASES]
        out.append("")
    return "\n".join(out)


def _verdict_row(
    release: str, name: str, verdicts: dict[str, dict[str, dict[str, object]]], cases: list[Counterexample]
) -> str:
    """One release's verdict on one promise: stored cases first, then the search, then the table."""
    row = verdicts.get(release, {}).get(name)
    if row is None:
        return f"| {release} | not surveyed | | | |"
    shown = [
        case.name
        for case in cases
        if case.finding.property_id == name
        and any(
            s.target == "manager (core)" and s.version == release and s.verdict == "reproduced"
            for s in case.sightings
        )
    ]
    listed = list(dict.fromkeys(k.report for k in KNOWN if k.property_id == name and k.speaks_of(release)))
    verdict, why = str(row["verdict"]), ""
    if shown:
        verdict, why = "VIOLATED", ", ".join(shown)
    elif verdict == "VIOLATED":
        why = f"search ({row['report']})"
    elif listed:
        verdict, why = "VIOLATED", f"known ({', '.join(listed)}), not met by this search"
    return f"| {release} | {verdict} | {why} | {row['evidence']} | {row['runs']} |"


def _traces(verdicts: dict[str, dict[str, dict[str, object]]]) -> object:
    return next((row["traces"] for rows in verdicts.values() for row in rows.values()), PROFILES["ci"])


def _semantics_page() -> str:
    source = ast.parse(_read(Path("model/semantics.py")))
    docs: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.ClassDef) and node.name == "Semantics":
            for field, doc in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(doc, ast.Expr)
                    and isinstance(doc.value, ast.Constant)
                ):
                    assert isinstance(field.target, ast.Name)
                    docs[field.target.id] = " ".join(str(doc.value.value).split())
    out = [
        "# What changed between releases",
        "",
        "Generated by `hitproof docs write` from `model/semantics.py`; do not edit. One switch per behaviour; each",
        "value holds from the release named until the next one.",
        "",
        "| switch | values | meaning and source |",
        "|---|---|---|",
    ]
    for name, values in switch_table():
        steps = ", ".join(f"{since}: `{value}`" for since, value in values)
        out.append(f"| `{name}` | {steps} | {docs[name]} |")
    return "\n".join(out) + "\n"


def _correspondence_page() -> str:
    out = [
        "# Correspondence",
        "",
        "Generated by `hitproof docs write` from `replay/correspondence.py`; do not edit. A test finds every name in",
        "the model and in vLLM's source. The rungs of a row are those whose runs show it, or whose settings are it.",
        "",
        "| model name | vLLM name | rungs | how it is read |",
        "|---|---|---|---|",
    ]
    out += [f"| `{n.model}` | `{n.vllm}` | {', '.join(n.seen_by)} | {n.how} |" for n in NAMES]
    return "\n".join(out) + "\n"


def _rungs_page() -> str:
    text = _read(Path("docs/rungs.md"))
    rows = ["| rung | its runs show |", "|---|---|"]
    rows += [f"| {rung} | {', '.join(sorted(SEES[rung]))} |" for rung in RUNGS]
    text = _between(text, "what rungs see", rows)
    rows = ["| rung | may show otherwise | because | what a replay makes of it |", "|---|---|---|---|"]
    rows += [f"| {t.rung} | {t.what} | {t.why} | {t.rule} |" for t in TOLERANCES]
    return _between(text, "tolerances", rows)


def _index_page(cases: list[Counterexample]) -> str:
    return "\n".join(
        [
            "# Track record",
            "",
            "Generated by `hitproof docs write`; do not edit. Each case is a trace file with its finding; every test run",
            "replays all of them on the model and on real vLLM. Replay one: `hitproof replay counterexamples/CE-0001.json --vllm R`.",
            f"Tried on every release from {RELEASES[0]} to {RELEASES[-1]}: `hitproof bisect CASE --keep`, which prints them one by one.",
            "",
            *_track_record(cases, ""),
            "",
            "| case | found by | replay |",
            "|---|---|---|",
            *(
                f"| {case.name} | {case.found_by} | `hitproof replay counterexamples/{case.name}.json "
                f"--vllm {case.trace.config.semantics}` |"
                for case in cases
            ),
            "",
        ]
    )


def _track_record(cases: list[Counterexample], folder: str) -> list[str]:
    rows = ["| case | promise | found under | vLLM's own code | public report |", "|---|---|---|---|---|"]
    for case in cases:
        link = f"[{case.name}]({folder}{case.name}.md)"
        release = case.trace.config.semantics
        rows.append(
            f"| {link} | {case.finding.property_id} | {release} | {_boundary(case)} | {case.report} |"
        )
    return rows


def _boundary(case: Counterexample) -> str:
    """Where a case is reproduced: runs of neighbouring releases that were tried."""
    out = spans(case.sightings)
    out += [
        f"engine {s.version}: the same hits"
        for s in case.sightings
        if s.target == "engine" and s.verdict == "shown"
    ]
    return "; ".join(out) or "model only"


def _readme(cases: list[Counterexample]) -> str:
    text = _read(Path("README.md"))
    if cases:
        text = _between(text, "report", ["```text", *report.text(cases[0]).splitlines(), "```"])
    return _between(text, "track record", _track_record(cases, "counterexamples/"))


def _between(text: str, name: str, lines: list[str]) -> str:
    """``text`` with what stands between the two marks of ``name`` replaced."""
    start, end = MARK.format(name), MARK.format(f"end of {name}")
    if start not in text or end not in text:
        raise BadInput(f"a document lost the marks {start} and {end}; restore them")
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: "\n".join([start, "", *lines, "", end]), text)
