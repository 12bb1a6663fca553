"""`vllmx doctor`: what is wrong with this machine, a model or a server, and what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click
from vllmx_core.errors import VllmxError
from vllmx_core.records import Record
from vllmx_core.system.memory import GIB, format_bytes, free_bytes, remedy_for

_TIMEOUT_S = 5
_LEAST_BYTES = GIB
_LEAST_FILES = 1024
_CLOCK_S = 300
"""Seconds by which a clock may be off; certificates fail with more."""


class Finding(Record):
    """The result of one check."""

    check: str
    state: Literal["ok", "warning", "problem"]
    text: str
    remedy: str = ""


def _good(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


@click.command()
@click.argument("model", required=False)
@click.option("--url", help="A running server to check too.")
@click.option("--api-key", envvar="VLLMX_API_KEY", help="Bearer token for --url.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port to serve on.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def doctor(
    model: str | None, url: str | None, api_key: str | None, port: int, as_json: bool
) -> None:
    """Check this machine, and MODEL and a server if they are given; exit code 1 for a problem.

    `vllmx env` prints what a bug report needs.
    """
    found = [*_machine(), *_network(port)]
    if model is not None:
        found += _model(model)
    if url is not None:
        found += _server(url.rstrip("/"), api_key)
    if as_json:
        fields = Finding.__struct_fields__
        click.echo(json.dumps([{key: getattr(one, key) for key in fields} for one in found]))
    else:
        for one in found:
            colour = {"ok": "green", "warning": "yellow", "problem": "red"}[one.state]
            remedy = f": {one.remedy}" if one.remedy else ""
            click.echo(
                f"{click.style(f'{one.state:<8}', fg=colour)} {one.check}: {one.text}{remedy}"
            )
    if any(one.state == "problem" for one in found):
        sys.exit(1)


def _machine() -> Iterator[Finding]:
    yield from _backends()
    free = free_bytes()
    state: Literal["ok", "warning"] = "ok" if free >= _LEAST_BYTES else "warning"
    remedy = f"end other programs, or find more: {remedy_for(free)}" if state != "ok" else ""
    yield Finding("memory", state, f"{format_bytes(free)} are free", remedy)
    yield from _folders()
    yield from _presets()
    if sys.platform != "win32":
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if 0 <= files < _LEAST_FILES:
            text = f"a process may open {files} files, which bounds a server's connections"
            yield Finding("open files", "warning", text, f"ulimit -n {_LEAST_FILES * 16}")


def _backends() -> Iterator[Finding]:
    from vllmx_core.plugins.registry import load_registry
    from vllmx_core.plugins.specs import BackendSpec

    registry = load_registry()
    failed = [f"{each.key}: {each.error}" for each in registry.plugins if each.error]
    for line in failed + registry.conflicts()[0]:
        yield Finding("plugins", "problem", line, "`vllmx plugins` lists all")
    try:
        chosen, why = registry.choose_backend()
        yield _good("backend", f"{chosen.name} ({why})")
    except VllmxError as error:
        yield Finding("backend", "problem", error.message, "pip install 'vllmx[cpu]'")
    has_gpu = Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()
    for spec in registry.all(BackendSpec):
        reason = spec.unavailable_reason() if spec.name == "cuda" and has_gpu else None
        if reason is not None:
            yield Finding("GPU", "problem", f"an NVIDIA GPU is here and not used: {reason}")


def _folders() -> Iterator[Finding]:
    """The cache of models and the folder for temporary files."""
    from vllmx_models.hub_cache import cache_folder, cached_models

    cache = cache_folder()
    for check, folder, variable in (
        ("cache", cache, "HF_HOME"),
        ("temporary files", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        place = folder
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        remedy = f"change its owner, or set {variable} to another folder"
        if not os.access(place, os.W_OK | os.X_OK):
            yield Finding(check, "problem", f"{folder} cannot be written", remedy)
        elif free < _LEAST_BYTES:
            text = f"{format_bytes(free)} are free in {folder}"
            yield Finding(check, "warning", text, f"`vllmx rm` deletes models, or set {variable}")
        else:
            yield _good(check, f"{folder}, {format_bytes(free)} free")
    for model in cached_models():
        if model.fault and model.is_current:
            remedy = f"`vllmx pull {model.name}` completes it, `vllmx rm {model.name}` deletes it"
            yield Finding("cache", "warning", f"{model.name}: {model.fault}", remedy)


def _presets() -> Iterator[Finding]:
    from vllmx.cli.presets import presets

    try:
        presets()
    except VllmxError as error:
        yield Finding("short names", "problem", error.message, "correct the file")


def _network(port: int) -> Iterator[Finding]:
    """The port, proxies, the hub and the clock."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            yield _good("port", f"{port} is free")
        except OSError as error:
            text = f"{port} cannot be used ({error.strerror})"
            yield Finding("port", "warning", text, "serve with another --port, or end its user")
    import urllib.request

    proxies = {name: url for name, url in urllib.request.getproxies().items() if "://" in url}
    if "http" in proxies and not urllib.request.proxy_bypass("127.0.0.1"):
        text = f"requests to 127.0.0.1 go to the proxy {_host(proxies['http'])}"
        yield Finding("proxy", "warning", text, "set NO_PROXY=127.0.0.1,localhost")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        yield Finding("hub", "warning", "HF_HUB_OFFLINE forbids downloads", "unset it to download")
        return
    yield from _hub(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")


def _host(url: str) -> str:
    """A URL without the password that it may have."""
    return url.rpartition("@")[2].rpartition("//")[2]


def _hub(endpoint: str) -> Iterator[Finding]:
    import urllib.error
    import urllib.request
    from email.utils import parsedate_to_datetime

    try:
        request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310
        with urllib.request.build_opener().open(request, timeout=_TIMEOUT_S) as answer:
            date = answer.headers["date"]
    except urllib.error.HTTPError as error:
        date = error.headers["date"]  # it answers, which is enough
    except (OSError, ValueError) as error:
        text = f"{endpoint} cannot be reached ({getattr(error, 'reason', error)})"
        remedy = "check the network, HF_ENDPOINT, proxies and the clock; local models work without"
        yield Finding("hub", "warning", text, remedy)
        return
    yield _good("hub", f"{endpoint} answers")
    off_s = abs(time.time() - parsedate_to_datetime(date).timestamp()) if date else 0.0
    if off_s > _CLOCK_S:
        text = f"it differs from the hub's by {off_s:,.0f} s, so certificates and tokens fail"
        yield Finding("clock", "problem", text, "set this machine's clock")


def _model(name: str) -> Iterator[Finding]:
    """The header of a model at hand, and its size next to the free memory."""
    from vllmx.cli.cached import facts_of_model

    try:
        facts = facts_of_model(name)
    except VllmxError as error:
        yield Finding("model", "problem", error.message)
        return
    if "fault" in facts:
        yield Finding("model", "problem", facts["fault"])
        return
    size = round(facts["parameters"] * facts["bits_per_weight"] / 8)
    text = f"{name}: {facts['architecture']}, {format_bytes(size)} of weights"
    if size > free_bytes():
        remedy = f"`vllmx plan {name}` shows what fits; a GPU may have more"
        yield Finding("model", "warning", f"{text}, more than the host's free memory", remedy)
    else:
        yield _good("model", text)


def _server(url: str, api_key: str | None) -> Iterator[Finding]:
    from vllmx.cli.ps import cards_of

    try:
        cards: list[dict[str, Any]] = cards_of(url, api_key)
    except VllmxError as error:
        yield Finding("server", "problem", error.message)
        return
    for card in cards:
        if card.get("state") == "failed":
            yield Finding("server", "problem", f"{card['id']} cannot be loaded: {card['error']}")
    yield _good("server", f"{url} serves {', '.join(str(card['id']) for card in cards)}")
