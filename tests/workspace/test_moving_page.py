"""Commands and settings that README.md and the pages of docs/ show are ones that vllmx takes. What
tests/integration/server/test_page_commands.py runs is parsed here in a second."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import yaml
from vllmx.cli.group import cli
from vllmx.cli.serve import serve


def is_understood(text: str) -> None:
    """Parses a command line and runs nothing."""
    command: click.Command = cli
    context = click.Context(cli)
    arguments = shlex.split(text, comments=True)[1:]
    while isinstance(command, click.Group):
        found = command.get_command(context, arguments[0])
        assert found is not None, text
        command, arguments = found, arguments[1:]
    ends = [at for at, each in enumerate(arguments) if each in ("|", ">", "&&", "&")]
    command.make_context("vllmx", arguments[: min(ends, default=None)])


def test_every_command_is_understood(root: Path) -> None:
    page = (root / "docs" / "moving.md").read_text()
    commands = re.findall(r"`(vllmx [^`]+)`", page)
    assert len(commands) > 12
    deploy = (root / "docs" / "deploy.md").read_text()
    commands += re.findall(r"^(vllmx .+)$", deploy, re.MULTILINE)
    images = re.findall(r"^docker run .* vllmx(?::cuda)? (serve .+)$", deploy, re.MULTILINE)
    assert len(images) == 2
    commands += [f"vllmx {rest}" for rest in images]
    for text in commands:
        is_understood(text)


def blocks(root: Path) -> str:
    """What stands on any page in a block without a language or of a shell, continued lines
    joined."""
    found = ""
    for page in (root / "README.md", *(root / "docs").rglob("*.md")):
        parts = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
        found += "".join(part for kind, part in parts if kind in ("", "sh", "bash"))
    return found.replace("\\\n", " ")


def test_commands_in_blocks_are_understood(root: Path) -> None:
    commands = re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(vllmx .*)", blocks(root), re.M)
    assert len(commands) > 25
    for text in commands:
        is_understood(text)


def test_benchmarks_in_blocks_are_there_with_their_flags(root: Path) -> None:
    """They take minutes, and models that are not here: none is run."""
    commands = re.findall(r"^(?:\$ )?python (bench/\S+\.py)(.*)", blocks(root), re.M)
    assert len(commands) > 5
    for path, rest in commands:
        source = (root / path).read_text()
        for flag in re.findall(r"\s(--[a-z-]+)", rest.partition("#")[0]):
            assert f'"{flag}"' in source, f"python {path} has no {flag}"


def test_files_that_commands_of_others_name_are_there(root: Path) -> None:
    commands = re.findall(r"^(?:docker|kubectl) .*", blocks(root), re.M)
    paths = re.findall(r" -f (\S+)", "\n".join(commands))
    assert len(paths) > 2
    assert [path for path in paths if not (root / path).is_file()] == []


def test_the_unit_and_its_settings_are_understood(root: Path) -> None:
    unit = (root / "docs" / "deploy" / "vllmx.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert line.split()[1:] == ["serve", "--config", "/etc/vllmx/serve.yaml"]
    fields = {parameter.name for parameter in serve.params}
    folders = re.findall(r"^(?:State|Cache|Runtime)Directory=(.*)$", unit, re.MULTILINE)
    assert folders == ["vllmx"] * 3
    for name in re.findall(r"VLLMX_(\w+)=", unit):
        assert name.lower() in fields, name
    (settings,) = re.findall(
        r"```yaml\n(.*?)```", (root / "docs" / "deploy.md").read_text(), re.DOTALL
    )
    for name in yaml.safe_load(settings):
        assert name.replace("-", "_") in fields, name
