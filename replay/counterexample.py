"""``Counterexample``: a broken promise as a file. A find is a trace; everything else explains it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from hitproof.model import BadInput, Trace
from hitproof.properties.registry import property_of
from hitproof.properties.verdict import Finding

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
            raise BadInput(f"{self.name}: status {self.status!r} is not one of {', '.join(STATUSES)}")
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
            "finding": attrs.asdict(self.finding),
            "sightings": [attrs.asdict(s) for s in self.sightings],
            "counterfactuals": list(self.counterfactuals),
        }

    @classmethod
    def from_json(cls, data: object, where: str) -> Counterexample:
        """Read a stored counterexample; BadInput names what is wrong with it."""
        if not isinstance(data, dict) or "trace" not in data:
            raise BadInput(f"{where}: not a counterexample file: it needs 'trace' and 'finding'")
        if data.get("schema") != SCHEMA:
            raise BadInput(
                f"{where}: schema {data.get('schema')!r} is not known; this version reads {SCHEMA}"
            )
        try:
            finding = dict(data["finding"])
            return cls(
                name=data["name"],
                trace=Trace.from_json(data["trace"]),
                finding=Finding(**{**finding, "reasons": tuple(finding.get("reasons", ()))}),
                status=data["status"],
                report=data.get("report", ""),
                found_by=data.get("found_by", ""),
                minimality=data.get("minimality", ""),
                sightings=tuple(Sighting(**s) for s in data.get("sightings", ())),
                counterfactuals=tuple(data.get("counterfactuals", ())),
            )
        except (KeyError, TypeError) as error:
            raise BadInput(f"{where}: not a counterexample file: {error}") from None

    @classmethod
    def loads(cls, text: str, where: str) -> Counterexample:
        """Read a file's text; every message starts with ``where``."""
        try:
            return cls.from_json(json.loads(text), where)
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadInput(f"{where}: not JSON: {error}") from None
        except BadInput as error:
            raise type(error)(str(error) if str(error).startswith(where) else f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Counterexample:
        """Read a file."""
        return cls.loads(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """A file's text; BadInput if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot read it: {error}") from None


def write_new(path: Path, text: str) -> None:
    """Write ``text`` to a file that does not exist yet, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.link(name, path)
    except FileExistsError:
        raise BadInput(
            f"{path}: exists already and is never overwritten; move it away or choose another folder"
        ) from None
    finally:
        os.unlink(name)


def store(found: Counterexample, folder: Path) -> Path:
    """Write ``found`` under the first free name: ``<property>-<semantics>-<n>.json``."""
    stem = f"{found.finding.property_id}-{found.trace.config.semantics}"
    taken = {path.name for path in folder.glob(f"{stem}-*.json")} if folder.is_dir() else set()
    n = next(i for i in range(1, 100_000) if f"{stem}-{i}.json" not in taken)
    path = folder / f"{stem}-{n}.json"
    named = attrs.evolve(found, name=path.stem)
    write_new(path, json.dumps(named.to_json(), indent=2) + "\n")
    return path


def stored(folder: Path) -> list[Counterexample]:
    """The numbered counterexamples of ``folder`` (CE-0001.json, ...), in order."""
    paths: Iterable[Path] = sorted(
        p for p in folder.glob("CE-*.json") if re.fullmatch(r"CE-\d{4}\.json", p.name)
    )
    return [Counterexample.load(path) for path in paths]
