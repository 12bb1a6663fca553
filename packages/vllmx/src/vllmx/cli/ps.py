"""`vllmx ps`: the models of a running server, and which of them are loaded."""

from __future__ import annotations

import json
from typing import Any

import click
from vllmx_core.errors import ConfigError
from vllmx_core.system.memory import format_bytes

from vllmx.cli.running_server import get_from_server
from vllmx.cli.tables import print_table


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="A running server.")
@click.option("--api-key", envvar="VLLMX_API_KEY", help="Bearer token.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """List the models of a running server and their state."""
    cards = cards_of(url.rstrip("/"), api_key)
    if as_json:
        click.echo(json.dumps(cards, indent=1))
        return
    rows = [("MODEL", "STATE", "SIZE", "CONTEXT")]
    for card in cards:
        size, context = card.get("size_bytes"), card.get("max_model_len")
        shown = "" if size is None else format_bytes(size)
        state = card.get("state") or "loaded"
        rows.append((str(card["id"]), state, shown, f"{context:,}" if context else ""))
    print_table(rows)


def cards_of(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """The models of a server, as it lists them. Raises ConfigError."""
    body = get_from_server(url, "/v1/models", api_key)
    try:
        cards: list[dict[str, Any]] = json.loads(body)["data"]
        return [card for card in cards if card["id"]]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{url}/v1/models is not a list of models: check --url") from None
