"""`vllmx top`: a running server in the terminal."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from vllmx.cli.running_server import get_from_server

if TYPE_CHECKING:
    from vllmx.live_figures import Figures, Scrape

_HISTORY = 40
_CLEAR = "\x1b[H\x1b[J"


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="A running server.")
@click.option("--api-key", envvar="VLLMX_API_KEY", help="Bearer token.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--count", type=click.IntRange(1), help="End after so many looks.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each look.")
def top(url: str, api_key: str | None, interval: float, count: int | None, as_json: bool) -> None:
    """Show what a running server does: requests, tokens a second, latencies, memory."""
    from vllmx.live_figures import figures

    url, screen = url.rstrip("/"), sys.stdout.isatty() and not as_json
    old, done = _look(url, api_key), 0
    rates: list[float] = []
    try:
        while count is None or done < count:
            time.sleep(interval)
            new = _look(url, api_key)
            found = figures(old, new)
            old, done = new, done + 1
            if found is None:
                rates.clear()
                continue
            rates = [*rates, found.generated_s][-_HISTORY:]
            if as_json:
                click.echo(json.dumps(asdict(found)))
            else:
                click.echo((_CLEAR if screen else "") + shown(url, found, rates))
    except KeyboardInterrupt:
        return


def _look(url: str, api_key: str | None) -> Scrape:
    from vllmx.live_figures import scrape

    text = get_from_server(url, "/metrics", api_key).decode("utf-8", "replace")
    return scrape(text, time.monotonic())


def shown(url: str, now: Figures, rates: list[float]) -> str:
    """A screen of text."""
    from vllmx.live_figures import sparkline

    rows = [
        ("requests", f"{now.running:.0f} running, {now.waiting:.0f} waiting"),
        ("ended", f"{now.requests_s:.1f} a second, {now.preemptions_s:.1f} preemptions"),
        ("tokens/s", f"{now.generated_s:,.1f} generated, {now.prompt_s:,.1f} of prompts"),
        ("", sparkline(rates, _HISTORY)),
        ("first token", _times(now.first_token_s)),
        ("between tokens", _times(now.between_tokens_s)),
        ("KV cache", f"{_bar(now.kv_share)} {now.kv_share:.0%}"),
        ("prefix hits", _hits(now)),
        ("sessions", f"{now.sessions:.0f}"),
    ]
    for name, one in now.replicas.items():
        text = f"{one['running']:.0f} running, {one['waiting']:.0f} waiting"
        rate = f"{one['generated_s']:,.1f} tokens/s"
        rows.append((f"replica {name}", f"{text}, {rate}, KV {one['kv_share']:.0%}"))
    return "\n".join([url, "", *(f"{name:<16}{text}" for name, text in rows)])


def _hits(now: Figures) -> str:
    if now.prefix_share is None:
        return "-"
    below = f", {now.tier_share:.0%} from below the device" if now.tier_share else ""
    return f"{now.prefix_share:.0%}{below}"


def _times(both: tuple[float | None, float | None]) -> str:
    if both[0] is None or both[1] is None:
        return "-"
    return f"median {both[0] * 1e3:,.0f} ms, p99 {both[1] * 1e3:,.0f} ms"


def _bar(share: float) -> str:
    return f"[{'#' * round(20 * min(1.0, share)):<20}]"
