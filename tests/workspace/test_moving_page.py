"""Commands and settings of docs/moving.md and docs/deploy.md are ones that vllmx takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import yaml
from vllmx.cli.group import cli
from vllmx.cli.serve import serve


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


def test_the_unit_and_its_settings_are_understood(root: Path) -> None:
    unit = (root / "docs" / "deploy" / "vllmx.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert line.split()[1:] == ["serve", "--config", "/etc/vllmx/serve.yaml"]
    fields = {parameter.name for parameter in serve.params}
    for name in re.findall(r"VLLMX_(\w+)=", unit):
        assert name.lower() in fields, name
    (settings,) = re.findall(
        r"```yaml\n(.*?)```", (root / "docs" / "deploy.md").read_text(), re.DOTALL
    )
    for name in yaml.safe_load(settings):
        assert name.replace("-", "_") in fields, name
