"""The pages about the server name every route, field, flag, error code and metric that there is."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import msgspec
import pytest
from vllmx_engine.wire.messages import CoreStats
from vllmx_server.apis.completions.schema import CompletionRequest
from vllmx_server.apis.messages.schema import MessagesRequest
from vllmx_server.apis.responses.schema import ResponsesRequest
from vllmx_server.config import ServerConfig
from vllmx_server.generating.chat_body import ChatCompletionRequest
from vllmx_server.host.apis import all_routes
from vllmx_server.watch.metrics import Metrics

DOCS = Path(__file__).parents[3] / "docs"
TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("serving.md", "routes.md"))


def test_the_reference_is_what_the_document_says() -> None:
    page = runpy.run_path(str(DOCS / "list_api.py"))["page"]()
    for route in all_routes():
        if not route.path.startswith("/web/"):
            assert route.path.replace("{name:path}", "{name}") in page, route.path


def test_routes() -> None:
    for route in all_routes():
        if not route.path.startswith("/web/"):
            assert route.path.replace("{name:path}", "NAME") in TEXT


@pytest.mark.parametrize(
    "kind", [ChatCompletionRequest, CompletionRequest, MessagesRequest, ResponsesRequest]
)
def test_fields(kind: type[msgspec.Struct]) -> None:
    assert [name for name in kind.__struct_fields__ if f"`{name}`" not in TEXT] == []


def test_flags() -> None:
    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ServerConfig)]
    assert [flag for flag in flags if flag not in TEXT] == []


def test_metrics() -> None:
    text = Metrics("m", CoreStats, {"block_size": 16}).render().decode()
    names = set(re.findall(r"# TYPE vllmx:(\w+)", text))
    assert [name for name in sorted(names) if f"`{name}`" not in TEXT] == []


def test_routes_of_other_servers() -> None:
    page = (DOCS / "clients.md").read_text(encoding="utf-8")
    for route in all_routes(by_name=True):
        path = route.path.replace("{name:path}", "NAME")
        assert f"`{path}`" in page or f"{route.method} {path}`" in page, path
