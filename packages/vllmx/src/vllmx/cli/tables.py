"""Tables, sizes and ages as commands print them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

_STEPS = ((86400, "day"), (3600, "hour"), (60, "minute"))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints a row of titles and the rows below it, in columns as wide as their cells."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def age(since_s: float) -> str:
    """The time since a moment (seconds since 1970) in one unit."""
    seconds = max(0.0, time.time() - since_s)
    for length, name in _STEPS:
        count = int(seconds // length)
        if count:
            return f"{count} {name}{'s' * (count > 1)} ago"
    return "just now"
