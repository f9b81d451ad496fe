"""The command line. Exit codes: 0 all well, 1 a promise is violated or a case is not reproduced,
2 bad input, 3 a harness fault, 130 interrupted, 141 the reader of a pipe went away.
"""

from __future__ import annotations

import os
import sys
import traceback

import click

from hitproof.cli.bisect import bisect_command
from hitproof.cli.cases import adopt_command, report_command
from hitproof.cli.check import check_command
from hitproof.cli.common import plain
from hitproof.cli.conform import conform_command
from hitproof.cli.documents import docs_group
from hitproof.cli.hunt import hunt_command
from hitproof.cli.probe import probe_command
from hitproof.cli.promises import properties_command
from hitproof.cli.prove import prove_command
from hitproof.cli.replay import replay_command
from hitproof.cli.run import run_command, scenario_command
from hitproof.cli.serve import serve_tiny_command
from hitproof.cli.vllm import vllm_group
from hitproof.model import BadInput, HarnessFault

CLOSED_PIPE = 141
"""128 + SIGPIPE, as shells say it: neither "all well" nor "violated" may be read into a closed pipe."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="hitproof")
def cli() -> None:
    """Check, break and replay the promises of vLLM's hybrid KV-cache manager about prefix-cache hits.

    Exit codes: 0 all well, 1 a violation or difference was found (replay: the case is not reproduced),
    2 bad input, 3 the harness or the code it drives broke, 130 interrupted.
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
    prove_command,
    replay_command,
    report_command,
    adopt_command,
    bisect_command,
    check_command,
    serve_tiny_command,
    probe_command,
    conform_command,
    properties_command,
    docs_group,
    vllm_group,
):
    cli.add_command(command)


def main() -> None:
    """The console script: every error of ours is one message."""
    try:
        # Outside its standalone mode, click returns the exit code of a command that exits.
        code = cli.main(prog_name="hitproof", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # On a closed pipe click and rich exit with 1, which here would mean "violated".
        if isinstance(error, SystemExit) and error.code != 1:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(CLOSED_PIPE)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "hitproof"
        what = " ".join(error.format_message().split()).removesuffix(".")
        click.echo(f"{command}: {what}; see `{command} --help`", err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"hitproof: {error.format_message()}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BadInput as error:
        click.echo(plain(f"hitproof: {error}"), err=True)
        sys.exit(2)
    except HarnessFault as error:
        click.echo(plain(f"hitproof: harness fault (says nothing about any promise): {error}"), err=True)
        sys.exit(3)
    except MemoryError:
        click.echo("hitproof: harness fault (says nothing about any promise): out of memory", err=True)
        sys.exit(3)
    except OSError as error:
        click.echo(f"hitproof: harness fault (says nothing about any promise): {error}", err=True)
        sys.exit(3)
    except Exception as error:
        click.echo(traceback.format_exc(), err=True)
        click.echo(
            f"hitproof: harness fault (says nothing about any promise): {type(error).__name__}: {error}; "
            "please report it with the lines above",
            err=True,
        )
        sys.exit(3)
    sys.exit(code if isinstance(code, int) else 0)
