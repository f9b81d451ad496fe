"""``hitproof check`` on patches: each mistake fails, with the promise that names it."""

import json
from xml.etree import ElementTree

import pytest

from hitproof.cli.main import cli
from hitproof.model import RELEASES
from hitproof.replay import store

pytestmark = pytest.mark.vllm

SINGLE = "v1/core/single_type_kv_cache_manager.py"
PATCHES = {
    "window-does-not-veto": (
        "v1/core/kv_cache_coordinator.py",
        "                curr_hit_length = _new_hit_length\n",
        "                if isinstance(spec, FullAttentionSpec):\n"
        "                    curr_hit_length = _new_hit_length\n",
        "hit-covers",
    ),
    "freed-twice": (
        SINGLE,
        "        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))\n",
        "        blocks = self.pop_blocks_for_free(request_id)[::-1]\n"
        "        self.block_pool.free_blocks(blocks)\n"
        "        self.block_pool.free_blocks(blocks[:1])\n",
        "ref-count-is-holders",
    ),
    "not-pinned": (
        SINGLE,
        "            self.block_pool.touch(new_computed_blocks)\n",
        "            pass\n",
        "pinned-before-pop",
    ),
    "freed-head-first": (
        SINGLE,
        "self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))",
        "self.block_pool.free_blocks(self.pop_blocks_for_free(request_id))",
        "tail-goes-first",
    ),
    "mask-one-block-short": (
        SINGLE,
        "        # (1) Segment-boundary tails. ``retention_interval``:\n",
        "        need -= 1\n        # (1) Segment-boundary tails. ``retention_interval``:\n",
        "mask-covers-lookup",
    ),
    "salt-ignored": (
        "v1/core/kv_cache_utils.py",
        "        if (start_token_idx == 0 and request.cache_salt)\n",
        "        if False\n",
        "hit-content",
    ),
}
"""What is edited in 0.32.0's file, and the promise that must name it."""


def check(invoke, *words):
    """Run ``hitproof check`` in this process: exit code and the JSON that it printed."""
    code, out = invoke("check", *words, "--json")
    return code, json.loads(out)


@pytest.fixture
def invoke(monkeypatch, tmp_path_factory, capsys):
    """The command line, in a folder of its own."""
    monkeypatch.chdir(tmp_path_factory.mktemp("out"))

    def run(*words):
        code = cli.main(list(words), standalone_mode=False)
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", PATCHES)
def test_patch_fails_with_the_promise_that_names_it(invoke, fork, name):
    """Lockstep shows the first call that differs; a trace shows the promise that only the patch breaks."""
    *edit, promise = PATCHES[name]
    tree = fork(tuple(edit))
    code, found = check(
        invoke, str(tree.root), "--semantics", "0.32.0", "--property", promise, "--budget", "100s"
    )
    assert code == 1
    rows = {(row["kind"], row["name"]): row for row in found["rows"]}
    assert rows["lockstep", "manager"]["outcome"] == "differs"
    assert rows["property", promise]["outcome"] == "violated"
    (violation,) = found["violations"]
    assert violation["property"] == promise
    assert violation["status"] == "confirmed"
    assert {s["target"]: s["verdict"] for s in violation["sightings"]} == {
        "model": "not reproduced",
        "manager (core)": "reproduced",
    }


def test_release_agrees_with_itself(invoke):
    """Nothing differs, no case behaves otherwise, and every promise was looked at."""
    code, out = invoke("check", "0.32.0", "--budget", "40s", "--junit", "j.xml", "--markdown", "m.md")
    assert "differs" not in out
    assert code in (None, 0), out
    suite = ElementTree.parse("j.xml").getroot()[0]
    assert suite.get("failures") == "0"
    assert int(suite.get("tests")) > 45
    with open("m.md") as file:
        assert file.readline() == "# vLLM 0.32.0 against the rules of 0.32.0\n"


def test_rules_of_a_tree_without_a_version_are_measured(invoke, fork):
    """A checkout has no version file: the release that it agrees with longest is taken."""
    tree = fork()
    code, found = check(invoke, str(tree.root), "--property", "pool-conserved", "--budget", "10s")
    assert (code or 0, found["semantics"]) == (0, "0.32.0")
    assert "0.32.0" in RELEASES


def test_fix_is_shown_as_fixed(invoke, fork):
    """A patch that registers no partial tail any more repairs the stored case of vllm#49125."""
    tree = fork(
        (
            SINGLE,
            "        self._cache_partial_tail_block(request, num_tokens)\n",
            "        pass\n",
        )
    )
    code, found = check(
        invoke, str(tree.root), "--semantics", "0.32.0", "--property", "pool-conserved", "--budget", "10s"
    )
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["CE-0019"]["outcome"] == "fixed"
    assert rows["manager"]["outcome"] == "differs"
    assert code == 1


def test_semantics_of_a_release_are_its_own(invoke):
    """Another release's rules are for trees."""
    from hitproof.model import BadInput

    with pytest.raises(BadInput, match=r"release 0\.32\.0 has its own rules"):
        invoke("check", "0.32.0", "--semantics", "0.31.0")
    assert store.find("0.32.0").semantics == "0.32.0"
