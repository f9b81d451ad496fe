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


def test_commands_named_in_the_documents_exist():
    """Every `hitproof ...` command in README and docs is a real one."""
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {
        tuple(match.split())
        for text in texts
        for match in re.findall(r"\bhitproof ((?:vllm |docs |scenario )?[a-z-]+)", text.read_text())
    }
    assert named, "the documents name no command"
    first = {words[:1] for words in COMMANDS}
    unknown = {words for words in named if words not in COMMANDS and words[:1] not in first}
    assert not {w for w in unknown if w[0] not in PROSE}


PROSE = {
    "proves",
    "never",
    "is",
    "says",
    "finds",
    "found",
    "needs",
    "itself",
    "runs",
    "reads",
    "and",
    "does",
    "has",
}


def test_make_targets_named_in_the_readme_exist():
    """Every `make ...` of the README is a target."""
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"hunt", "test"} <= named <= targets
