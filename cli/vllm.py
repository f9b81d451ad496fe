"""``hitproof vllm``: the trees and environments of real vLLM."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitproof.cli.common import spinner
from hitproof.model import Semantics
from hitproof.replay import env, store


@click.group("vllm")
def vllm_group() -> None:
    """Fetch vLLM releases, remember source trees, make environments."""


@vllm_group.command("add")
@click.argument("spec", metavar="RELEASE|PATH")
@click.option(
    "--semantics", help="For a source tree: the release whose rules it follows [default: its own version]."
)
def add(spec: str, semantics: str | None) -> None:
    """Fetch a release's Python files into the cache folder, or remember a source tree."""
    with spinner(f"vLLM {spec}") as say:
        tree = store.add(spec, semantics=semantics, progress=say)
    click.echo(f"vLLM {tree.version} (rules of {tree.semantics}) in {tree.root}")


@vllm_group.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(as_json: bool) -> None:
    """Show all trees, with checksums verified, and the environments."""
    trees = store.known()
    if as_json:
        out = [
            {
                "version": t.version,
                "semantics": t.semantics,
                "root": str(t.root),
                "problem": t.problem or None,
            }
            for t in trees
        ]
        click.echo(json.dumps(out, indent=2))
        return
    table = Table(title=Text(f"vLLM trees ({env.cache_folder()})"))
    for column in ("version", "rules of", "folder", "state"):
        table.add_column(column, overflow="fold")
    for tree in trees:
        table.add_row(*map(Text, (tree.version, tree.semantics, str(tree.root), tree.problem or "ok")))
    Console(highlight=False).print(table)


@vllm_group.command("env")
@click.argument("release", default=env.NEWEST_CPU)
def make_env(release: str) -> None:
    """Make the environment for the engine (about 3 GB, once)."""
    release = Semantics.of(release).release
    with spinner(f"environment for vLLM {release}") as say:
        python = env.make(release, say)
    click.echo(str(python))
