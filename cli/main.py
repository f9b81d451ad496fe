"""The command line. Exit codes: 0 all well, 1 a promise is violated or a case is not reproduced,
2 bad input, 3 a harness fault, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

import click

from hitproof.cli.cases import adopt_command, replay_command, report_command
from hitproof.cli.conform import conform_command
from hitproof.cli.documents import docs_group
from hitproof.cli.hunt import hunt_command
from hitproof.cli.promises import properties_command
from hitproof.cli.run import run_command, scenario_command
from hitproof.cli.vllm import vllm_group
from hitproof.model import BadInput, HarnessFault


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="hitproof")
def cli() -> None:
    """Prove, break and replay the promises of vLLM's hybrid KV-cache manager about prefix-cache hits.

    Exit codes: 0 all well, 1 a promise is violated (or a case not reproduced), 2 bad input, 3 the
    harness or the code it drives broke, 130 interrupted.
    """


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the shell completion script: `eval "$(hitproof completion bash)"`."""
    os.environ["_HITPROOF_COMPLETE"] = f"{shell}_source"
    try:
        cli.main(prog_name="hitproof", args=[], standalone_mode=False)
    finally:
        del os.environ["_HITPROOF_COMPLETE"]


for command in (
    run_command,
    scenario_command,
    hunt_command,
    replay_command,
    report_command,
    adopt_command,
    conform_command,
    properties_command,
    docs_group,
    vllm_group,
):
    cli.add_command(command)


def main() -> None:
    """The console script: every error of ours is one message."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BadInput as error:
        click.echo(f"hitproof: {error}", err=True)
        sys.exit(2)
    except HarnessFault as error:
        click.echo(f"hitproof: harness fault (says nothing about any promise): {error}", err=True)
        sys.exit(3)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
