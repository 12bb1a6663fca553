"""A misspelt environment variable is told of, and what we read is on the list."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from vllmx.cli.group import cli
from vllmx.cli.variables import PREFIX, VARIABLES, warnings
from vllmx_core.config import EngineConfig
from vllmx_server.config import ServerConfig

ROOT = Path(__file__).parents[3]
FIELDS = {field.name for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)}


def test_the_nearest_variable_is_named() -> None:
    given = ["VLLMX_PORTT", "VLLMX_CPU_IAS", "VLLMX_MAX_NUM_SEQUENCES", "VLLMX_QQQ", "PATH"]
    lines = warnings([*given, "VLLMX_PORT", "VLLMX_CONFIG"], FIELDS, [])
    assert [re.findall(r"VLLMX_\w+", line) for line in lines] == [
        ["VLLMX_CPU_IAS", "VLLMX_CPU_ISA"],
        ["VLLMX_MAX_NUM_SEQUENCES", "VLLMX_MAX_NUM_SEQS"],
        ["VLLMX_PORTT", "VLLMX_PORT"],
        ["VLLMX_QQQ"],
    ]
    assert "docs/serving.md" in lines[3]


def test_plugins_of_others_have_their_own_prefix() -> None:
    given = ["VLLMX_ACME_SPEED", "VLLMX_NICE_TOOL_X", "VLLMX_ACMESPEED"]
    lines = warnings(given, FIELDS, ["vllmx-acme", "nice.tool"])
    assert len(lines) == 1
    assert "VLLMX_ACMESPEED" in lines[0]


@pytest.mark.parametrize("command", ["serve", "complete", "bench", "quantize", "env"])
def test_every_command_warns_once(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("VLLMX_SERVER_PORT", "1")
    monkeypatch.setenv("VLLMX_SEED", "1")
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert result.stderr.count("warning: ") == 1
    assert "VLLMX_SERVER_PORT is not read" in result.stderr
    monkeypatch.delenv("VLLMX_SERVER_PORT")
    assert not CliRunner().invoke(cli, [command, "--help"]).stderr


def test_all_that_is_read_is_registered_and_documented() -> None:
    known = {*VARIABLES, *(PREFIX + name.upper() for name in FIELDS)}
    sources = list((ROOT / "packages").glob("*/src/**/*.py"))
    read = {
        name
        for path in sources
        for name in re.findall(r"[\"'](VLLMX_[A-Z0-9_]+)", path.read_text())
    }
    assert set(VARIABLES) <= read, "nobody reads these"
    assert not read - known - {PREFIX}
    documented = (ROOT / "docs" / "serving.md").read_text()
    assert not [name for name in VARIABLES if f"`{name}`" not in documented]
