"""``hitproof properties``: the promises, and the documents generated from the registry."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from hitproof.properties.registry import PROPERTIES, property_of


@click.command("properties")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def properties_command(name: str | None, as_json: bool) -> None:
    """List the promises, or show one."""
    chosen = PROPERTIES if name is None else (property_of(name),)
    if as_json:
        keys = ("id", "family", "promise", "why", "source", "statement")
        click.echo(json.dumps([{key: getattr(p, key) for key in keys} for p in chosen], indent=2))
    elif name is not None:
        p = chosen[0]
        click.echo(
            f"{p.id} ({p.family})\n  {p.promise}\n  why:       {p.why}\n  formally:  {p.statement}\n  in vLLM:   {p.source}"
        )
    else:
        table = Table(title="promises")
        for column in ("id", "family", "promise"):
            table.add_column(column, overflow="fold")
        for p in chosen:
            table.add_row(p.id, p.family, p.promise)
        Console(highlight=False).print(table)
