"""The option ``--scale`` of commands that run a trace on real kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hitproof.model import Trace
from hitproof.replay.scale import fitting, scaled

MOST = 1024


def scale_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--scale N|fit``."""
    return click.option(
        "--scale",
        default="1",
        show_default=True,
        metavar="N|fit",
        help="Make every length N times as long; fit: until blocks are multiples of 32 tokens.",
    )(command)


def at_scale(trace: Trace, scale: str) -> tuple[Trace, int]:
    """The trace at the chosen scale, and the factor."""
    if scale == "fit":
        factor = fitting(trace)
    elif scale.isdecimal() and len(scale) < 5 and 1 <= int(scale) <= MOST:
        factor = int(scale)
    else:
        raise click.BadParameter(f"{scale!r}: write fit or a number from 1 to {MOST}", param_hint="--scale")
    return scaled(trace, factor), factor
