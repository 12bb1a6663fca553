"""`vllmx parsers`: formats of answers, and which one a model's answers have."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click
from vllmx_core.config import EngineConfig
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import ParserSpec
from vllmx_core.system.logs import configure_logging

from vllmx.cli.command import ModelCommand
from vllmx.cli.options import engine_options, log_level_option, resolve


@click.command(cls=ModelCommand)
@engine_options
@log_level_option("warning")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def parsers(log_level: str, as_json: bool, **flags: Any) -> None:
    """Show how calls of tools and thoughts are read from the answers of MODEL.

    Without MODEL, list the formats that --tool-parser and --reasoning-parser name.
    """
    configure_logging(log_level)
    if flags["model_argument"] is None and flags["model"] is None:
        _list(as_json)
        return
    (config,) = resolve((EngineConfig,), flags)
    _show(config, as_json)


def _list(as_json: bool) -> None:
    specs = load_registry().all(ParserSpec)
    rows = []
    for spec in specs:
        made_of = spec.load()
        parts = {"tools": made_of.calls or made_of.channels}
        parts["reasoning"] = made_of.thinking or made_of.channels
        reads = [name for name, part in parts.items() if part is not None]
        rows.append({"name": spec.name, "aliases": list(spec.aliases), "reads": reads})
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        names = f"  ({', '.join(row['aliases'])})" if row["aliases"] else ""
        click.echo(f"{row['name']:<{width}}  {' and '.join(row['reads'])}{names}")


def _show(config: EngineConfig, as_json: bool) -> None:
    from vllmx_engine.client.chat import ChatRenderer, load_tokenizer
    from vllmx_engine.core.found_model import find_model

    model = find_model(config)
    found = ChatRenderer.of(config, load_tokenizer(model), model.registry).format
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=1, ensure_ascii=False))
        return
    click.echo(f"calls of tools: {found.tools_from}")
    for line in _example(found.format):
        click.echo(f"    {line}")
    click.echo(f"thoughts: {found.reasoning_from}")
    if found.format.thinking is not None:
        thinking = found.format.thinking
        click.echo(f"    {thinking.begin!r} ... {thinking.end!r}")


def _example(made_of: Any) -> list[str]:
    """Two calls as the model writes them."""
    from vllmx_engine.formats.writer import WrittenCall, write_calls

    if made_of.calls is None:
        return []
    calls = [WrittenCall("get_weather", {"city": "Oslo", "days": 2}), WrittenCall("now", {})]
    text: str = write_calls(made_of.calls, calls)
    return text.strip("\n").split("\n")
