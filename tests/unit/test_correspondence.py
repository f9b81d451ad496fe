"""The table of names: every one exists, in the model and in vLLM."""

import ast

import attrs
import pytest

import hitproof.model
from hitproof.replay import store
from hitproof.replay.correspondence import NAMES, SEES
from hitproof.replay.ladder import RUNGS


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.model)
def test_name_of_the_model(name):
    """It is an attribute of hitproof.model, or a field of a class in it."""
    first, _, rest = name.model.partition(".")
    found = getattr(hitproof.model, first)
    if rest:
        fields = {field.name for field in attrs.fields(found)} if attrs.has(found) else set()
        assert rest in fields or hasattr(found, rest)


def members(source, cls):
    """Names that a class of ``source`` or its bases there define: methods, fields, attributes of self."""
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    found, todo = set(), [cls]
    while todo:
        node = classes.get(todo.pop())
        if node is None:
            continue
        todo += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef):
                found.add(inner.name)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                found.add(inner.attr)
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                found.add(inner.target.id)
    return found


@pytest.mark.vllm
@pytest.mark.parametrize("release", ["0.25.0", "0.32.0", "0.33.0"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.vllm.rpartition(":")[2])
def test_name_of_vllm(name, release):
    """The class of that file in vLLM's source has it."""
    file, _, rest = name.vllm.partition(":")
    cls, _, member = rest.partition(".")
    source = (store.add(release).root / "vllm" / file).read_text()
    assert member in members(source, cls)


def test_rungs():
    """Each row is seen somewhere, and what a rung is said to see is what its target says."""
    assert set(SEES) == set(RUNGS)
    for name in NAMES:
        assert set(name.seen_by) <= set(RUNGS)
        assert name.seen_by
        if name.kind != "settings" and not name.rungs:
            assert set(name.seen_by) == {rung for rung in RUNGS if name.kind in SEES[rung]}
