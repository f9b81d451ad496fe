"""Reports that people read: a counterexample as text, Markdown and an SVG timeline.

What the stored record does not hold is run again on the model. Text and Markdown render the same
sections; the timeline draws the same events that the section "Steps" lists.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias
from xml.sax.saxutils import escape, quoteattr

import attrs

from hitproof.model import NULL, RELEASES, Abort, CacheConfig, ModelTarget, Observation, Snapshot, Submit
from hitproof.properties.known import known_for
from hitproof.properties.registry import property_of
from hitproof.properties.story import Need, Story
from hitproof.properties.verdict import Finding
from hitproof.replay.counterexample import Counterexample, Sighting

WIDTH, GUTTER = 100, 10

MOST_STEPS, MOST_PROMPTS, MOST_REASONS, MOST_TARGETS = 12, 6, 3, 3
"""Rows of a section; it says how many are left out."""

MOST_BLOCKS, MOST_EVENTS, MOST_REQUESTS = 48, 40, 16
"""Rows and columns of a timeline; it says what is left out."""

STATUS = {
    "unconfirmed": "no real vLLM has reproduced it yet",
    "confirmed": "vLLM's own code reproduces it",
    "model wrong": "vLLM keeps the promise here, so the model differs from it",
    "property wrong": "the promise says more than it should",
    "harness wrong": "the harness made it, not vLLM",
}

COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#bf3989", "#0e7490", "#57606a")
"""Of requests in turn, each dark enough for white letters."""

STYLE = """
.hitproof{font:12px system-ui,sans-serif}
.hitproof text{fill:#1f2328}
.hitproof .bg{fill:#ffffff}
.hitproof .dim{fill:#59636e}
.hitproof .small{font-size:9px}
.hitproof .big{font-size:17px;font-weight:600}
.hitproof .band{fill:#818b98;fill-opacity:.1}
.hitproof .held{stroke:#ffffff}
.hitproof .on{fill:#ffffff}
.hitproof .kept{fill-opacity:.28;stroke-width:1.6}
.hitproof .dead{fill-opacity:.08;stroke-width:.6;stroke-dasharray:2 2}
.hitproof .empty{fill:none;stroke:#818b98;stroke-opacity:.3}
.hitproof .waiting{fill-opacity:0;stroke-dasharray:4 3}
.hitproof .hatch{fill:none;stroke:#818b98}
.hitproof .alarm{fill:#cf222e;font-weight:600}
.hitproof .break{fill:#cf222e;fill-opacity:.07;stroke:#cf222e;stroke-width:2;pointer-events:none}
@media (prefers-color-scheme:dark){
.hitproof text{fill:#e6edf3}
.hitproof .bg{fill:#0d1117}
.hitproof .dim{fill:#9198a1}
.hitproof .held{stroke:#0d1117}
.hitproof .on{fill:#ffffff}
.hitproof .kept{fill-opacity:.45}
.hitproof .alarm{fill:#ff7b72}
.hitproof .break{fill:#ff7b72;stroke:#ff7b72}
}
""" + "".join(f".hitproof .q{n}{{fill:{c};stroke:{c}}}\n" for n, c in enumerate(COLOURS))

Lane: TypeAlias = Literal["waiting", "running", "preempted", "aborted", "done"]


@attrs.frozen(kw_only=True, slots=True)
class _Event:
    """One change: the state after observation ``at``, and what ``request`` becomes by it.

    ``taken``: blocks handed out, ``evicted``: how many of them left the index, ``lost``: needs of the
    working set that no block holds any more.
    """

    at: int
    op: int
    request: str | None
    what: str
    becomes: Lane | None = None
    hit: str = ""
    taken: tuple[int, ...] = ()
    evicted: int = 0
    lost: frozenset[Need] = frozenset()
    free: int
    working_set: int
    breaks: bool = False


@attrs.frozen(slots=True)
class _Table:
    """Rows under a head; ``mark`` is the row that breaks the promise."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    mark: int | None = None


@attrs.frozen(slots=True)
class _Commands:
    """Lines to type into a shell."""

    lines: tuple[str, ...]


_Item: TypeAlias = str | _Table | _Commands


@attrs.frozen(slots=True)
class _Section:
    title: str
    body: tuple[_Item, ...]


class _Case:
    """A counterexample run again on the model, with what all renderers say of it.

    ``now``: the finding of this version's model, None if it keeps the promise.
    """

    def __init__(self, ce: Counterexample) -> None:
        target = ModelTarget()
        self.ce = ce
        self.config = ce.trace.config
        self.property = property_of(ce.finding.property_id)
        self.story = Story(target.run(ce.trace), target.run)
        self.now: Finding | None = self.property.check(self.story).finding
        self.events = _events(self.story, self.now)
        verdict = "VIOLATED" if self.now else "STORED AS VIOLATED, BUT NOT BY THIS VERSION'S MODEL"
        self.verdict = f"{verdict}  {self.property.id}"

    def sections(self) -> list[_Section]:
        """Everything after the verdict, in reading order."""
        finding = self.ce.finding
        where = f"op {finding.op}"
        if 0 <= finding.op < len(self.ce.trace.ops):
            where += f" ({self.ce.trace.ops[finding.op]})"
        if finding.request is not None:
            where = f"{_clean(finding.request)}, {where}"
        seen = [f"{_clean(finding.seen)}: {where}"]
        if self.now is not None and self.now.seen != finding.seen:
            seen.append(f"This version's model says: {_clean(self.now.seen)}")
        return [
            _Section("Promise", (self.property.promise,)),
            _Section("Config", _config(self.config)),
            _Section("Let", self._let()),
            _Section("Steps", self._steps()),
            _Section("Because", self._because()),
            _Section("Expected", (_clean(finding.expected),)),
            _Section("Seen", tuple(seen)),
            _Section("Targets", _targets(self.ce.sightings)),
            _Section("Minimal", (_clean(self.ce.minimality) or "not reduced",)),
            _Section("Bound", ("one run of one trace: it shows that the promise can break, not how often",)),
            _Section("Status", self._status()),
            _Section("Replay", (self._replay(),)),
        ]

    def _let(self) -> tuple[_Item, ...]:
        """Who asks for what: requests by equal prompt."""
        asked: dict[str, list[str]] = {}
        for name, subject in self.story.subjects.items():
            asked.setdefault(str(subject.submit).split(" ", 2)[2], []).append(name)
        rows = []
        for prompt, names in asked.items():
            subject = self.story.subjects[names[0]]
            needs = self.story.needs(subject, subject.length)
            numbers = (subject.length, self.story.promised(subject.length), len(needs))
            rows.append((_short(prompt, 36), _short(", ".join(names), 21), *map(str, numbers)))
        legend = "full hit: of the same prompt sent again; blocks: what that needs cached."
        head = ("prompt", "requests", "tokens", "full hit", "blocks")
        return legend, _Table(head, _middle_out(rows, MOST_PROMPTS))

    def _steps(self) -> tuple[_Item, ...]:
        rows, op = [], None
        for event in self.events:
            asked = self.ce.trace.ops[event.op]
            opens = event.op != op and not isinstance(asked, Submit)
            rows.append(
                (
                    "" if event.op == op else str(event.op),
                    _short(f"{asked}: {event.what}" if opens else event.what, 46),
                    *(str(n or "") for n in (len(event.taken), event.evicted, len(event.lost))),
                    str(event.free),
                    str(event.working_set),
                )
            )
            op = event.op
        kept = _middle_out(rows, MOST_STEPS)
        mark = len(kept) - 1 if self.events and self.events[-1].breaks else None
        legend = (
            "In blocks, changes only. evicted: taken ones that were cached; lost: blocks of the working set no "
            "longer cached; set: the working set."
        )
        return legend, _Table(("op", "what", "taken", "evicted", "lost", "free", "set"), kept, mark)

    def _because(self) -> tuple[_Item, ...]:
        """The chain of reasons, then what one change at a time does. A cause is stated only from these."""
        said = _merged(map(_clean, self.ce.finding.reasons))
        if len(said) > MOST_REASONS:
            said[MOST_REASONS:] = [f"... {len(said) - MOST_REASONS} more reasons left out"]
        names = list(self.story.subjects)
        one = names.index(self.now.request) if self.now and self.now.request and len(names) > 3 else None
        tried = []
        for line in map(_clean, self.ce.counterfactuals):
            if match := re.fullmatch(r"(.+): ([a-z ]+) \(hits (.*)\)", line):
                change, outcome, hits = match.groups()
                if one is not None:
                    hits = " ".join(hits.split()[one : one + 1])
                tried.append((outcome, _short(hits, 14), _short(change, 51)))
        if not tried:
            return (*said, "No counterfactual run is stored, so no cause is stated.")
        tried.sort(key=lambda row: row[0])
        holding = [change for outcome, _, change in tried if outcome == "holds"]
        broken = [change for outcome, _, change in tried if outcome == "still violated"]
        sentence = "No change that was tried makes the promise hold, so no cause is stated."
        if holding:
            sentence = f"With {_or(holding)} the promise holds"
            if broken:
                rest = _or(broken) if len(broken) < 3 else f"any one of the other {len(broken)}"
                sentence += f"; with {rest} it is still violated"
            sentence += "."
        return (
            *said,
            _Table(("promise", "hits" if one is None else "its hit", "one change"), tuple(tried)),
            sentence,
        )

    def _status(self) -> tuple[str, ...]:
        ce, known = self.ce, known_for(self.ce.finding, self.ce.trace)
        report = f"report: {_clean(ce.report)}" if ce.report else "no public report"
        if ce.report == "found by hitproof":
            report = "no public report known"
        lines = [f"{ce.status}: {STATUS[ce.status]}; {report}"]
        if known is not None:
            until = f"to before {known.until}" if known.until else "on"
            lines.append(f"known violation from {known.since} {until}, when {known.when}")
        lines += [f"found by: {_clean(ce.found_by)}"] if ce.found_by else []
        lines += [f"note: {_clean(ce.trace.note)}"] if ce.trace.note not in ("", ce.found_by) else []
        return tuple(lines)

    def _replay(self) -> _Commands:
        # A numbered case lies in the corpus, a find where hunt writes by default.
        folder = "counterexamples" if re.fullmatch(r"CE-\d{4}", self.ce.name) else "counterexamples/found"
        path = shlex.quote(f"{folder}/{_clean(self.ce.name)}.json")
        return _Commands(
            (
                f"hitproof replay {path}",
                f"hitproof run {path} --target manager --vllm {self.config.semantics}",
            ),
        )


def text(ce: Counterexample) -> str:
    """The report as plain text of one screen."""
    case = _Case(ce)
    lines = [_short(f"{case.verdict}  ({_clean(ce.name)})", WIDTH)]
    for section in case.sections():
        title = section.title
        for item in section.body:
            for line in _lines(item):
                lines.append(f"{title:<{GUTTER}}{line}".rstrip())
                title = ""
    return "\n".join(lines)


def markdown(ce: Counterexample) -> str:
    """The report as Markdown."""
    case = _Case(ce)
    parts = [f"# {_marked(f'{case.verdict}  ({_clean(ce.name)})')}"]
    for section in case.sections():
        first, *rest = map(_markdown, section.body)
        lead = f"**{section.title}.**"
        parts += [f"{lead} {first}"] if isinstance(section.body[0], str) else [lead, first]
        parts += rest
    return "\n\n".join(parts)


def svg(ce: Counterexample) -> str:
    """The timeline as one SVG file: a column per event, a row per block, then a row per request."""
    return _Timeline(_Case(ce)).draw()


def _lines(item: _Item) -> list[str]:
    if isinstance(item, str):
        return textwrap.wrap(item, WIDTH - GUTTER, subsequent_indent="  ", break_on_hyphens=False)
    if isinstance(item, _Commands):
        return list(item.lines)
    table = [item.head, *item.rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    out = []
    for i, row in enumerate(table):
        cells = [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, _numeric(item), strict=True)
        ]
        out.append((">> " if i - 1 == item.mark else "   ") + "  ".join(cells))
    return out


def _markdown(item: _Item) -> str:
    if isinstance(item, str):
        return _marked(item)
    if isinstance(item, _Commands):
        return "\n".join(("```sh", *item.lines, "```"))
    rule = ["---:" if numeric else "---" for numeric in _numeric(item)]
    lines = [item.head, rule]
    for i, row in enumerate(item.rows):
        cells = [_marked(cell) for cell in row]
        if i == item.mark:
            cells[0] = f"&gt;&gt; {cells[0]}".strip()
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _numeric(table: _Table) -> list[bool]:
    """Which columns hold numbers only."""
    columns = zip(*table.rows, strict=True)
    return [all(cell.isdecimal() or cell in ("", "...") for cell in column) for column in columns]


def _marked(line: str) -> str:
    """``line`` as Markdown in which nothing is markup."""
    line = re.sub(r"([\\`*_\[\]|~]|^[#>+-])", r"\\\1", line)
    return re.sub(r"^(\d+)([.)])", r"\1\\\2", line).replace("&", "&amp;").replace("<", "&lt;")


def _clean(line: str, most: int = 240) -> str:
    """Free text on one line: nothing but printable characters, and not too many."""
    return _short(" ".join("".join(c if c.isprintable() else " " for c in line).split()), most)


def _short(line: str, most: int) -> str:
    return line if len(line) <= most else line[: most - 3] + "..."


def _or(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _middle_out(rows: Sequence[tuple[str, ...]], most: int) -> tuple[tuple[str, ...], ...]:
    """At most ``most`` of ``rows``, the end kept rather than the start."""
    if len(rows) <= most:
        return tuple(rows)
    tail = most - 3
    gap = ("...", f"{len(rows) - tail - 2} left out", *[""] * (len(rows[0]) - 2))
    return (*rows[:2], gap, *rows[-tail:])


def _merged(sentences: Iterable[str]) -> list[str]:
    """Sentences that differ only in their group, physical block or place become one."""
    alike: dict[tuple[str, ...], list[list[int]]] = {}
    for sentence in sentences:
        parts = re.split(r"\b(group|physical|place) (-?\d+)\b", sentence)
        numbers = [int(number) for number in parts[2::3]]
        del parts[2::3]
        alike.setdefault(tuple(parts), []).append(numbers)
    out = []
    for parts_, rows in alike.items():
        columns = [_numbers(column) for column in zip(*rows, strict=True)]
        words = [parts_[0]]
        for i, column in enumerate(columns):
            words += [parts_[2 * i + 1], " ", column, parts_[2 * i + 2]]
        merged = "".join(words)
        if len(rows) > 1:
            merged = merged.replace("group ", "groups ", 1).replace(" lacks ", " each lack ", 1)
        out.append(merged)
    return out


def _numbers(values: Sequence[int]) -> str:
    """``0-4`` for a run of values, ``2, 5, 8`` otherwise, each once; the middle of many left out."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 2 and distinct == list(range(distinct[0], distinct[-1] + 1)):
        return f"{distinct[0]}-{distinct[-1]}"
    shown = list(map(str, distinct))
    return ", ".join(shown if len(shown) < 7 else [*shown[:3], "...", shown[-1]])


def _config(config: CacheConfig) -> tuple[str, ...]:
    groups: list[str] = []
    first = 0
    for g, group in enumerate(config.groups):
        if g + 1 < len(config.groups) and config.groups[g + 1] == group:
            continue
        extra = f" keeping {group.extra_retained_tokens} more" if group.extra_retained_tokens else ""
        which = f"group {g}" if first == g else f"groups {first}-{g}"
        groups.append(f"{g - first + 1} x {group.label}{extra} ({which})")
        first = g + 1
    retention = {None: "dense", 0: "replay boundaries only (0)"}.get(
        config.retention, f"every {config.retention} tokens"
    )
    settings = [
        f"{config.max_num_batched_tokens} tokens and {config.max_num_seqs} requests a step",
        f"max_model_len {config.max_model_len}",
        f"hits in multiples of {config.scheduler_block_size} tokens",
        f"retention {retention}" if config.rules.retention else "no retention interval in this release",
    ]
    settings += ["EAGLE"] if config.use_eagle else []
    settings += [f"watermark {config.watermark:g}"] if config.watermark else []
    settings += [f"hash block size {config.hash_block_size}"] if config.hash_block_size else []
    settings += [] if config.enable_prefix_caching else ["prefix caching off"]
    settings += [] if config.scheduler_reserve_full_isl else ["no full-sequence admission gate"]
    return (
        f"vLLM {config.semantics}; {config.num_blocks} blocks, the null block counted; "
        f"{', '.join(groups)}, as kind:block size/reach in tokens",
        "; ".join(settings),
    )


def _targets(sightings: Sequence[Sighting]) -> tuple[str, ...]:
    """One line for all versions of a target that say the same."""
    alike: dict[Sighting, list[str]] = {}
    for sighting in sightings:
        alike.setdefault(attrs.evolve(sighting, version=""), []).append(sighting.version)
    lines = [_clean(attrs.evolve(same, version=_ranges(versions)).text) for same, versions in alike.items()]
    if len(lines) > MOST_TARGETS:
        lines[MOST_TARGETS:] = [f"... {len(lines) - MOST_TARGETS} more left out"]
    return tuple(lines) or ("only this version's model",)


def _ranges(versions: Sequence[str]) -> str:
    """``0.19.0 to 0.20.2, 0.25.0``: three or more releases in a row by their ends."""
    runs: list[list[str]] = []
    for version in versions:
        before = runs[-1][-1] if runs else ""
        follows = before in RELEASES and version in RELEASES
        if follows and RELEASES.index(version) == RELEASES.index(before) + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _state(story: Story, i: int) -> Snapshot:
    """The last state seen up to observation ``i``: a call that failed shows none."""
    return next(state for k in range(i, -1, -1) if (state := story.snapshot(k)) is not None)


def _cached(story: Story, i: int) -> set[Need]:
    return {(g, key) for g, index in enumerate(_state(story, i).index) for key, _ in index}


def _events(story: Story, finding: Finding | None) -> list[_Event]:
    """What changed something, up to and with the call that breaks the promise."""
    last = len(story.observations) - 1 if finding is None else finding.at
    promised = {back.at: back.expected for back in story.returns}
    out: list[_Event] = []
    looked = 0
    for i, seen in enumerate(story.observations[: last + 1]):
        breaks = finding is not None and i == last
        if seen.call == "lookup":
            looked = i
        before, after = _state(story, max(i - 1, 0)), _state(story, i)
        taken = tuple(b for blocks in seen.blocks or () for b in blocks if b != NULL)
        changed = bool(taken) or after.ref_count != before.ref_count or after.keys != before.keys
        hit = _hit(seen, promised.get(looked))
        what, becomes = _what(story, i, seen, hit, changed=changed, breaks=breaks)
        if not what:
            continue
        emptied = seen.call == "reset" and seen.ok
        out.append(
            _Event(
                at=i,
                op=seen.op,
                request=seen.request,
                what=what,
                becomes=becomes,
                hit=hit,
                taken=taken,
                evicted=sum(
                    before.keys[b] is not None for b in (range(len(before.keys)) if emptied else taken)
                ),
                lost=(story.working_sets[max(i - 1, 0)] & _cached(story, max(i - 1, 0))) - _cached(story, i),
                free=len(after.free_queue),
                working_set=len(story.working_sets[i]),
                breaks=breaks,
            )
        )
    return out


def _hit(seen: Observation, promised: int | None) -> str:
    if seen.hit is None:
        return ""
    return f"hit {seen.hit.hit_tokens}" + (f" of {promised}" if promised is not None else "")


def _what(
    story: Story, i: int, seen: Observation, hit: str, *, changed: bool, breaks: bool
) -> tuple[str, Lane | None]:
    """What observation ``i`` did, in a few words, and what its request becomes; no words if nothing."""
    name, op = seen.request, story.run.trace.ops[seen.op]
    becomes: Lane | None = None
    what = ""
    if seen.call == "add":
        what, becomes = str(op), "waiting"
    elif seen.call == "allocate" and seen.fault:
        what = f"{name}: {seen.fault}"
    elif seen.call == "allocate" and not seen.ok:
        what = f"{name} is refused {seen.new_tokens} tokens: no room"
    elif seen.call == "allocate" and (changed or seen.hit is not None):
        words = f"{hit}, " if hit else ""
        what, becomes = f"{name}: {words}computes {seen.new_tokens}", "running"
    elif seen.call == "free":
        becomes = _ending(story, i, name or "", aborted=isinstance(op, Abort))
        what = f"{name} is {becomes}"
    elif seen.call == "reset":
        what = "the cache is emptied" if seen.ok else "refused, blocks are in use"
    elif breaks:
        what = f"{name}: {hit}" if seen.call == "lookup" else f"{name or op}: {seen.call}"
        becomes = "running" if seen.call == "lookup" else None
    return what, becomes


def _ending(story: Story, i: int, name: str, *, aborted: bool) -> Lane:
    if aborted:
        return "aborted"
    finished = next(result.finished for result in story.run.requests if result.id == name)
    return "done" if finished and story.subjects[name].ended == i else "preempted"


@attrs.frozen(kw_only=True, slots=True)
class _Cell:
    """A block after an event. ``kind``: held by a request, kept (cached and needed by the working set),
    dead (cached, not needed) or empty. ``label``: request and group. ``place``: in the free queue.
    """

    kind: Literal["held", "kept", "dead", "empty"]
    owner: int = 0
    label: str = ""
    title: str
    place: str = attrs.field(eq=False)


class _Timeline:
    """Geometry in pixels; ``LEFT`` and ``top`` are where the grid of blocks starts."""

    LEFT, RIGHT, ROW, LANE = 112, 156, 16, 22

    def __init__(self, case: _Case) -> None:
        self.case = case
        self.story = case.story
        self.events = case.events[-MOST_EVENTS:]
        self.numbers = {name: n for n, name in enumerate(self.story.subjects)}
        self.owners = self._owners()
        self.lost = [self._lost(event) for event in self.events]
        self.blocks = self._blocks()
        self.spells = [(name, spells) for name in self.numbers if (spells := self._spells(name))]
        self.spells = self.spells[-MOST_REQUESTS:]
        self.step = max(24, min(52, 720 // max(1, len(self.events))))
        self.width = max(900, self.LEFT + len(self.events) * self.step + self.RIGHT)
        self.parts: list[str] = []
        finding = case.ce.finding
        said = (
            case.property.promise,
            _config(case.config)[0],
            f"Expected: {_clean(finding.expected)}. Seen: {_clean(finding.seen)}.",
        )
        self.head = [line for words in said for line in textwrap.wrap(words, self.width // 7)]
        self.top = 160 + 18 * len(self.head)

    def draw(self) -> str:
        """The whole file."""
        below = self.top + len(self.blocks) * self.ROW
        lanes = below + 16 + 5 * self.ROW
        self._columns(below)
        for row, block in enumerate(self.blocks):
            self._block_row(block, self.top + row * self.ROW)
        self._counts(below + 16)
        end = self._lanes(lanes)
        if self.events and self.events[-1].breaks:
            x = self._x(len(self.events) - 1)
            self._rect(x, self.top - 20, self.step, end - self.top + 24, "break")
            self._text(x + self.step + 6, self.top - 8, "breaks the promise", "alarm")
        height = self._legend(end + 34)
        self._head()
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hitproof" role="img" width="{self.width}" '
            f'height="{height}" viewBox="0 0 {self.width} {height}" aria-label={quoteattr(self.case.verdict)}>\n'
            f"<style>{STYLE}</style>\n"
            '<pattern id="hitproof-hatch" width="5" height="5" patternUnits="userSpaceOnUse">'
            '<path d="M0 5L5 0" class="hatch"/></pattern>\n'
            f'<rect class="bg" width="{self.width}" height="{height}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>"
        )

    def _owners(self) -> dict[int, tuple[int, int]]:
        """Per key the first request that has it, and where in that request's blocks."""
        found: dict[int, tuple[int, int]] = {}
        for name, subject in self.story.subjects.items():
            for position, key in enumerate(subject.keys):
                found.setdefault(key, (self.numbers[name], position))
        return found

    def _blocks(self) -> list[int]:
        """The blocks shown: all but the null block, or those that the working set lost or needs first."""
        lost = frozenset().union(*self.lost)
        kept: set[int] = set()
        for event in self.events:
            needs = self.story.working_sets[event.at]
            state = _state(self.story, event.at)
            kept |= {b for b, entry in enumerate(state.keys) if entry is not None and entry[:2] in needs}
        everything = range(1, self.case.config.num_blocks)
        return sorted(sorted(everything, key=lambda b: (b not in lost, b not in kept, b))[:MOST_BLOCKS])

    def _lost(self, event: _Event) -> set[int]:
        """The blocks that held what the working set lost by ``event``."""
        before = _state(self.story, max(event.at - 1, 0))
        return {b for b, entry in enumerate(before.keys) if entry is not None and entry[:2] in event.lost}

    def _cell(self, block: int, event: _Event) -> _Cell:
        state = _state(self.story, event.at)
        groups = self.case.config.groups
        entry = state.keys[block]
        place = ""
        if block in state.free_queue:
            place = f"{state.free_queue.index(block)} of {len(state.free_queue)}"
        holders = [
            (name, g, table.index(block))
            for name, tables in state.tables
            for g, table in enumerate(tables)
            if block in table
        ]
        key = "no key" if entry is None else f"key {entry[1]}"
        if holders:
            name, g, i = holders[0]
            names = ", ".join(holder for holder, _, _ in holders)
            about = f"held by {names}, group {g} ({groups[g].label}), block {i}"
            return _Cell(
                kind="held",
                owner=self.numbers[name],
                label=f"{self.numbers[name]}.{g}" + ("+" if len(holders) > 1 else ""),
                title=f"block {block}: {about}, {key}, ref {state.ref_count[block]}",
                place=place,
            )
        if entry is None:
            title = f"block {block}: free, no key, ref {state.ref_count[block]}"
            return _Cell(kind="empty", title=title, place=place)
        group, own, _ = entry
        owner, position = self.owners[own]
        scale = groups[group].block_size // self.case.config.key_block_size
        kept = (group, own) in self.story.working_sets[event.at]
        about = f"cached for group {group} ({groups[group].label}), block {position // scale} of"
        use = "needed" if kept else "not needed"
        return _Cell(
            kind="kept" if kept else "dead",
            owner=owner,
            label=f"{owner}.{group}",
            title=f"block {block}: {about} {list(self.numbers)[owner]}, {use}, {key}, ref {state.ref_count[block]}",
            place=place,
        )

    def _x(self, column: int) -> int:
        return self.LEFT + column * self.step

    def _rect(
        self, x: int, y: int, width: int, height: int, names: str, more: str = "", title: str = ""
    ) -> None:
        """``names``: CSS classes."""
        body = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self.parts.append(
            f'<rect class="{names}" x="{x}" y="{y}" width="{width}" height="{height}"{more}{body}'
        )

    def _text(self, x: int, y: int, words: str, names: str = "", more: str = "") -> None:
        self.parts.append(f'<text class="{names}" x="{x}" y="{y}"{more}>{escape(words)}</text>')

    def _head(self) -> None:
        title = f"{self.case.verdict}  ({_clean(self.case.ce.name)})"
        self._text(16, 28, _short(title, self.width // 10), "big")
        for n, line in enumerate(self.head):
            self._text(16, 48 + 18 * n, line)

    def _columns(self, below: int) -> None:
        """What happened above each column, its op below, every second op shaded."""
        shade, op = False, None
        for column, event in enumerate(self.events):
            x = self._x(column)
            if event.op != op:
                shade, op = not shade, event.op
                self._text(x + self.step // 2, below + 12, str(op), "dim small", ' text-anchor="middle"')
            if shade:
                self._rect(x, self.top - 4, self.step, below - self.top + 18, "band")
            turn = f' transform="rotate(-35 {x + self.step // 2} {self.top - 24})"'
            self._text(x + self.step // 2, self.top - 24, _short(event.what, 30), "small", turn)
        for y, words in ((self.top - 8, "block"), (below + 12, "op")):
            self._text(self.LEFT - 8, y, words, "dim small", ' text-anchor="end"')

    def _block_row(self, block: int, y: int) -> None:
        """Neighbouring cells that differ in nothing but their place in the free queue are one."""
        self._text(self.LEFT - 8, y + 12, str(block), "dim small", ' text-anchor="end"')
        cells = [self._cell(block, event) for event in self.events]
        first = 0
        for column, cell in enumerate(cells):
            if column + 1 < len(cells) and cells[column + 1] == cell:
                continue
            places: dict[str, str] = {}
            for c, event in list(zip(cells, self.events, strict=True))[first : column + 1]:
                places.setdefault(c.place, f"{c.place} in op {event.op}")
            places.pop("", None)
            queue = f", place in the free queue: {', '.join(places.values())}" if places else ""
            x, width = self._x(first) + 1, (column + 1 - first) * self.step - 2
            colour = "" if cell.kind == "empty" else f" q{cell.owner % len(COLOURS)}"
            if cell.kind == "dead":
                self._rect(x, y + 1, width, self.ROW - 2, "", ' fill="url(#hitproof-hatch)"')
            self._rect(x, y + 1, width, self.ROW - 2, cell.kind + colour, title=cell.title + queue)
            tone = "small on" if cell.kind == "held" else "small"
            self._text(x + 4, y + 12, cell.label, tone, ' pointer-events="none"')
            first = column + 1
        for column, lost in enumerate(self.lost):
            if block in lost:
                x = self._x(column) + self.step - 1
                self.parts.append(f'<path class="alarm" d="M{x} {y + 1}h-7l7 7z"/>')

    def _counts(self, y: int) -> None:
        rows = (
            ("taken", [len(event.taken) for event in self.events]),
            ("lost", [len(event.lost) for event in self.events]),
            ("free", [event.free for event in self.events]),
            ("working set", [event.working_set for event in self.events]),
        )
        for row, (name, values) in enumerate(rows):
            at = y + 16 + row * self.ROW
            self._text(self.LEFT - 8, at, name, "dim small", ' text-anchor="end"')
            for column, value in enumerate(values):
                tone = "small alarm" if name == "lost" and value else "small"
                shown = "" if not value and name in ("taken", "lost") else str(value)
                self._text(self._x(column) + self.step // 2, at, shown, tone, ' text-anchor="middle"')

    def _lanes(self, y: int) -> int:
        """A row per request seen, the latest if there are too many; returns where they end."""
        for name, spells in self.spells:
            number = self.numbers[name]
            self._text(self.LEFT - 8, y + 15, _short(f"{number} = {name}", 17), "", ' text-anchor="end"')
            for start, stop, state, words in spells:
                x, width = self._x(start) + 1, (stop - start) * self.step - 2
                if state in ("running", "waiting"):
                    names = f"{state} q{number % len(COLOURS)}"
                    self._rect(x, y + 3, width, self.LANE - 6, names, title=f"{name} {state}: {words}")
                    words = next((w for w in (words, words.partition(" of ")[0]) if 5 * len(w) < width), "")
                self._text(x + 4, y + 15, words, "small on" if state == "running" else "small")
            if self.events[-1].breaks and self.events[-1].request == name:
                self._text(self._x(len(self.events)) + 6, y + 15, self.events[-1].hit, "alarm")
            y += self.LANE
        return y

    def _spells(self, name: str) -> list[tuple[int, int, Lane, str]]:
        """(first column, one past the last, what the request is, words) in order."""
        hidden = len(self.case.events) - len(self.events)
        changes: list[tuple[int, Lane, str]] = []
        for n, event in enumerate(self.case.events):
            again = changes and changes[-1][1] == event.becomes == "running" and not event.hit
            if event.request == name and event.becomes is not None and not again:
                changes.append((max(0, n - hidden), event.becomes, event.hit or event.becomes))
        ends = [start for start, _, _ in changes[1:]] + [len(self.events)]
        return [
            (start, stop, state, words)
            for (start, state, words), stop in zip(changes, ends, strict=False)
            if stop > start
        ]

    def _legend(self, y: int) -> int:
        """What the marks mean, and what is left out; returns the height of the picture."""
        x = 16
        for kind, words in (
            ("held", "held (1.3: request 1, group 3)"),
            ("kept", "cached, needed by the working set"),
            ("dead", "cached, not needed"),
            ("empty", "free, no key"),
            ("waiting", "waiting"),
        ):
            if kind == "dead":
                self._rect(x, y - 10, 22, 13, "", ' fill="url(#hitproof-hatch)"')
            self._rect(x, y - 10, 22, 13, kind if kind == "empty" else f"{kind} q0")
            self._text(x + 28, y, words, "small")
            x += 40 + 5 * len(words)
        self.parts.append(f'<path class="alarm" d="M{x + 9} {y - 9}h-9l9 9z"/>')
        self._text(x + 16, y, "a needed block was taken", "small")
        left_out = [
            f"{what} {n}"
            for n, what in (
                (len(self.case.events) - len(self.events), "earlier events"),
                (self.case.config.num_blocks - 1 - len(self.blocks), "blocks"),
                (len(self.numbers) - len(self.spells), "requests"),
            )
            if n
        ]
        if left_out:
            y += 18
            self._text(16, y, f"Left out: {', '.join(left_out)}.", "dim")
        return y + 18
