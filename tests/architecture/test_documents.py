"""Documents that cannot rot: generated pages are fresh, README's commands exist, help is complete."""

import re
from pathlib import Path

import click
import pytest

from hitproof.cli.documents import documents
from hitproof.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]


def commands(group, path=()):
    """Every command of the CLI with its words."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(cli))


@pytest.mark.parametrize("path", [str(path) for path in documents()])
def test_generated_documents_are_fresh(path):
    """`hitproof docs write` would change nothing."""
    assert (ROOT / path).read_text() == documents()[Path(path)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(words):
    """Each command says what it does, and each of its options too."""
    command = COMMANDS[words]
    assert command.help
    context = click.Context(command, info_name=words[-1])
    assert "Show this message" in command.get_help(context)


CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)


def code_of(file):
    """What a document writes as code."""
    return "\n".join(CODE.findall(file.read_text()))


def test_commands_named_in_the_documents_exist():
    """Every `hitproof ...` that README or a document writes as code is a real command."""
    texts = [ROOT / "README.md", ROOT / "docs" / "engine.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {word for text in texts for word in re.findall(r"\bhitproof ([a-z][a-z-]*)", code_of(text))}
    assert named
    assert named <= {words[0] for words in COMMANDS}


def test_make_targets_named_in_the_readme_exist():
    """Every `make ...` that the README writes as code is a target."""
    named = set(re.findall(r"\bmake ([a-z-]+)", code_of(ROOT / "README.md")))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"hunt", "test"} <= named <= targets
