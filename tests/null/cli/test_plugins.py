"""`vllmx plugins` always prints, with what is in conflict."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, entry_points
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from vllmx.cli import plugins as command
from vllmx.cli.group import cli
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import GROUP, Registry
from vllmx_core.plugins.specs import CommandSpec, ModelSpec


def plugin(name: str) -> SimpleNamespace:
    @hookimpl
    def vllmx_models() -> tuple[ModelSpec, ...]:
        return (ModelSpec(name, "builtins:dict", ("Phi",)),)

    @hookimpl
    def vllmx_commands() -> tuple[CommandSpec, ...]:
        return (CommandSpec("serve", "builtins:dict"),) if name == "theirs" else ()

    return SimpleNamespace(vllmx_models=vllmx_models, vllmx_commands=vllmx_commands)


def run(monkeypatch: pytest.MonkeyPatch, keys: list[str], *arguments: str) -> Result:
    registry = Registry()
    for key in keys:
        registry.add(plugin("theirs" if key.startswith("acme") else "phi"), key)
    monkeypatch.setattr(command, "load_registry", lambda: registry)
    return CliRunner().invoke(command.plugins, arguments)


def test_an_open_conflict_is_printed_and_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, ["acme:p", "other:p"])
    assert result.exit_code == 1
    assert "conflict: architecture 'Phi' is provided by both acme:p and other:p" in result.output
    assert "command 'serve' of acme:p is vllmx's own" in result.output
    result = run(monkeypatch, ["acme:p", "other:p"], "--prefer", "acme")
    assert result.exit_code == 0
    assert "note: architecture 'Phi' comes from acme:p, not from other:p" in result.output
    monkeypatch.setenv("VLLMX_PREFER", "other")
    found = json.loads(run(monkeypatch, ["acme:p", "other:p"], "--json").output)
    assert found["conflicts"] == []
    assert len(found["plugins"]) == 2


def test_ours_is_no_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, ["acme:p", "vllmx-models:models"])
    assert result.exit_code == 0
    assert "note: architecture 'Phi' comes from vllmx-models:models" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["nonsense"], ["env"]])
def test_a_plugin_that_fails_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, arguments: list[str]
) -> None:
    broken = EntryPoint("broken", "vllmx_no_such_module:plugin", GROUP)
    found = [*entry_points(group=GROUP), broken]
    monkeypatch.setattr("vllmx_core.plugins.registry.entry_points", lambda group: found)
    monkeypatch.setenv("VLLMX_SERVER_PORT", "1")  # an unknown variable is looked up among plugins
    CliRunner().invoke(cli, arguments)
    told = [record for record in caplog.records if "cannot be loaded" in record.getMessage()]
    assert len(told) == 1
