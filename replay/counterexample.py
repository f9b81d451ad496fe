"""``Counterexample``: a broken promise as a file. A find is a trace; everything else explains it."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from hitproof.model import BadInput, Submit, Trace, read_json, shown
from hitproof.model.trace import known_schema
from hitproof.properties.registry import property_of
from hitproof.properties.verdict import CAUSES, Finding

SCHEMA = 1
STATUSES = ("unconfirmed", "confirmed", "model wrong", "property wrong", "harness wrong")


@attrs.frozen(kw_only=True, slots=True)
class Sighting:
    """What one target said, twice. ``verdict``: reproduced, not reproduced, unstable, refused or
    fault; ``detail``: hits, or why not.
    """

    target: str
    version: str
    verdict: str
    detail: str = ""

    @property
    def text(self) -> str:
        """For example ``manager (core) 0.25.0: reproduced, hits 0 0 0``."""
        return f"{self.target} {self.version}: {self.verdict}" + (f", {self.detail}" if self.detail else "")


@attrs.frozen(kw_only=True, slots=True)
class Counterexample:
    """A minimal trace on which a promise fails, with what was expected and seen."""

    name: str
    trace: Trace
    finding: Finding
    status: str = "unconfirmed"
    report: str = ""
    found_by: str = ""
    minimality: str = ""
    sightings: tuple[Sighting, ...] = ()
    counterfactuals: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.status not in STATUSES:
            raise BadInput(f"{self.name}: status {shown(self.status)} is not one of {', '.join(STATUSES)}")
        property_of(self.finding.property_id)

    def to_json(self) -> dict[str, Any]:
        """As stored."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "property": self.finding.property_id,
            "status": self.status,
            "report": self.report,
            "found_by": self.found_by,
            "minimality": self.minimality,
            "trace": self.trace.to_json(),
            "finding": {**attrs.asdict(self.finding), "reasons": list(self.finding.reasons)},
            "sightings": [attrs.asdict(s) for s in self.sightings],
            "counterfactuals": list(self.counterfactuals),
        }

    @classmethod
    def from_json(cls, data: object, where: str) -> Counterexample:
        """Read a stored counterexample; BadInput names what is wrong with it."""
        if not isinstance(data, dict) or not {"trace", "finding"} <= data.keys():
            raise BadInput(
                f"{where}: not a counterexample file: it needs 'trace' and 'finding'; "
                "a trace alone is for `hitproof run`"
            )
        known_schema(f"{where}: ", data.get("schema"), SCHEMA)
        _check_fields(where, data, _FIELDS)
        _check_fields(f"{where}: finding", data["finding"], _FINDING)
        for i, sighting in enumerate(data.get("sightings", ())):
            _check_fields(f"{where}: sightings[{i}]", sighting, _SIGHTING)
        _check_lines(f"{where}: counterfactuals", data.get("counterfactuals", []))
        _check_lines(f"{where}: finding: reasons", data["finding"].get("reasons", []))
        finding = Finding(
            **{**data["finding"], "reasons": tuple(data["finding"].get("reasons", ()))},
        )
        try:
            trace = Trace.from_json(data["trace"])
            found = cls(
                name=data["name"],
                trace=trace,
                finding=finding,
                status=data["status"],
                report=data.get("report", ""),
                found_by=data.get("found_by", ""),
                minimality=data.get("minimality", ""),
                sightings=tuple(Sighting(**s) for s in data.get("sightings", ())),
                counterfactuals=tuple(data.get("counterfactuals", ())),
            )
        except BadInput as error:
            raise type(error)(f"{where}: {error}") from None
        _check_finding(where, data.get("property"), found)
        return found

    @classmethod
    def loads(cls, text: str, where: str) -> Counterexample:
        """Read a file's text; every message starts with ``where``."""
        try:
            data = read_json(text)
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None
        return cls.from_json(data, where)

    @classmethod
    def load(cls, path: str | Path) -> Counterexample:
        """Read a file."""
        return cls.loads(read_text(path), str(path))


_TEXT: tuple[type, ...] = (str,)
_FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "name": _TEXT,
    "property": _TEXT,
    "status": _TEXT,
    "report": _TEXT,
    "found_by": _TEXT,
    "minimality": _TEXT,
    "trace": (dict,),
    "finding": (dict,),
    "sightings": (list,),
    "counterfactuals": (list,),
}
_FINDING: dict[str, tuple[type, ...]] = {
    "property_id": _TEXT,
    "at": (int,),
    "op": (int,),
    "request": (str, type(None)),
    "expected": _TEXT,
    "seen": _TEXT,
    "cause": _TEXT,
    "reasons": (list,),
}
_SIGHTING: dict[str, tuple[type, ...]] = dict.fromkeys(("target", "version", "verdict", "detail"), _TEXT)
_OPTIONAL = frozenset(
    {
        "property",
        "report",
        "found_by",
        "minimality",
        "sightings",
        "counterfactuals",
        "cause",
        "reasons",
        "detail",
    }
)
_WORDS = {str: "text", int: "a whole number", dict: "an object", list: "a list", type(None): "null"}


def _check_fields(where: str, data: object, known: dict[str, tuple[type, ...]]) -> None:
    """BadInput unless ``data`` is an object with the fields of ``known``, each of its type."""
    if not isinstance(data, dict):
        raise BadInput(f"{where}: must be an object, not {shown(data)}")
    for name, value in data.items():
        if name not in known:
            raise BadInput(f"{where}: unknown field {shown(name)}; known fields: {', '.join(known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            words = " or ".join(_WORDS[kind] for kind in known[name])
            raise BadInput(f"{where}: {name} must be {words}, not {shown(value)}")
    for name in known:
        if name not in data and name not in _OPTIONAL:
            raise BadInput(f"{where}: {name} is missing")


def _check_lines(where: str, lines: list[object]) -> None:
    if not all(isinstance(line, str) for line in lines):
        raise BadInput(f"{where}: must be a list of texts")


def _check_finding(where: str, listed: object, found: Counterexample) -> None:
    """BadInput if the finding speaks of something that the trace does not have."""
    finding = found.finding
    if listed not in (None, finding.property_id):
        raise BadInput(f"{where}: property is {shown(listed)}, but the finding's is {finding.property_id!r}")
    if not 0 <= finding.op < len(found.trace.ops) or finding.at < 0:
        raise BadInput(
            f"{where}: finding: op {finding.op} at {finding.at}: the trace has ops 0 to {len(found.trace.ops) - 1}"
        )
    if finding.cause not in CAUSES:
        raise BadInput(
            f"{where}: finding: cause {shown(finding.cause)} is not one of {', '.join(CAUSES[1:])}"
        )
    names = {op.request for op in found.trace.ops if isinstance(op, Submit)}
    if finding.request is not None and finding.request not in names:
        raise BadInput(f"{where}: finding: request {shown(finding.request)} is not in the trace")


MOST_BYTES = 256 * 1024 * 1024


def read_text(path: str | Path) -> str:
    """A file's text; BadInput if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadInput(
            f"{path}: cannot read it: {error.strerror or error}; give a trace or counterexample file"
        ) from None
    if len(content) > MOST_BYTES:
        raise BadInput(f"{path}: more than {MOST_BYTES >> 20} MiB; give a trace or counterexample file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path}: not text: byte {error.start} is not UTF-8; give a trace or counterexample file"
        ) from None


def write_new(path: Path, text: str) -> None:
    """Write ``text`` to a file that does not exist yet, whole or not at all."""
    if not _write_new(path, text):
        raise BadInput(
            f"{path}: exists already and is never overwritten; move it away or choose another folder"
        )


def _write_new(path: Path, text: str) -> bool:
    """False, and nothing changed, if ``path`` exists."""
    if not path.name:
        raise BadInput(f"{path}: not the name of a file; name one")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.link(part, path)
        except FileExistsError:
            if path.exists() or path.is_symlink():
                return False
            raise
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        why = "its folder is a file" if isinstance(error, FileExistsError) else error.strerror or error
        raise BadInput(f"{path}: cannot write it: {why}; choose a folder that can be written") from None
    return True


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to a file, in place of an older one, whole or not at all."""
    if not path.name:
        raise BadInput(f"{path}: not the name of a file; name one")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            f"{path}: cannot write it: {error.strerror or error}; choose a folder that can be written"
        ) from None


def check_file(path: Path) -> None:
    """BadInput if ``write_whole`` could not write ``path``: asked before long work."""
    if path.is_dir():
        raise BadInput(f"{path}: it is a folder; name a file")
    check_folder(path.absolute().parent)


def rewrite(path: Path, found: Counterexample) -> None:
    """Put ``found`` in the place of the file that it was read from, whole or not at all."""
    write_whole(path, json.dumps(found.to_json(), indent=2) + "\n")


def check_folder(folder: Path) -> None:
    """BadInput if files could not be stored in ``folder``, which need not exist yet."""
    try:
        place = folder.absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise BadInput(
            f"{folder}: cannot write there: {error.strerror or error}; choose a folder that can be written"
        ) from None


def store(found: Counterexample, folder: Path) -> Path:
    """Write ``found`` under the first free name: ``<property>-<semantics>-<n>.json``."""
    stem = f"{found.finding.property_id}-{found.trace.config.semantics}"
    for n in itertools.count(1):
        path = folder / f"{stem}-{n}.json"
        if path.exists():
            continue
        named = attrs.evolve(found, name=path.stem)
        if _write_new(path, json.dumps(named.to_json(), indent=2) + "\n"):
            return path
    raise AssertionError


def stored(folder: Path) -> list[Counterexample]:
    """The numbered counterexamples of ``folder`` (CE-0001.json, ...), in order."""
    paths: Iterable[Path] = sorted(
        p for p in folder.glob("CE-*.json") if re.fullmatch(r"CE-\d{4}\.json", p.name)
    )
    return [Counterexample.load(path) for path in paths]
