"""Each command of docs/moving.md is one that vllmx takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
from vllmx.cli.group import cli


def test_every_command_is_understood(root: Path) -> None:
    page = (root / "docs" / "moving.md").read_text()
    commands = re.findall(r"`(vllmx [^`]+)`", page)
    assert len(commands) > 12
    for text in commands:
        command: click.Command = cli
        context = click.Context(cli)
        arguments = shlex.split(text)[1:]
        while isinstance(command, click.Group):
            found = command.get_command(context, arguments[0])
            assert found is not None, text
            command, arguments = found, arguments[1:]
        command.make_context("vllmx", arguments)  # parses, and runs nothing
