"""The file of MCP servers, lines of their output, and who is allowed what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_server.mcp.offered import OfferedTool, called, chosen
from vllmx_server.mcp.settings import ServerSettings, read_servers
from vllmx_server.mcp.transports import BabbleError, MessageLines, Pace, Unread

pytest.importorskip("mcp", reason="the package mcp is not installed")

CAT: dict[str, Any] = {"command": "cat"}
HTTP: dict[str, Any] = {"url": "http://127.0.0.1:1/mcp"}


def read(tmp_path: Path, text: str) -> tuple[ServerSettings, ...]:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    return read_servers(path, "--mcp-config")


def servers(tmp_path: Path, **entries: Any) -> tuple[ServerSettings, ...]:
    return read(tmp_path, json.dumps({"mcpServers": entries}))


def test_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "k1")
    files, web, *rest = servers(
        tmp_path,
        files={**CAT, "args": ["-u"], "env": {"A": "${KEY}x", "B": "$KEY"}, "cwd": str(tmp_path)},
        web={
            **HTTP,
            "headers": {"Authorization": "Bearer ${KEY}"},
            "type": "http",
            "allowedTools": ["a"],
            "callTimeoutSeconds": 5,
            "startTimeoutSeconds": 2.5,
            "maxResultBytes": 1000,
        },
        off={"command": "/not/there", "disabled": True},
    )
    assert rest == []
    assert (files.name, files.env) == ("files", {"A": "k1x", "B": "$KEY"})
    assert files.environment["A"] == "k1x"
    assert "KEY" not in files.environment
    assert web.headers == {"Authorization": "Bearer k1"}
    assert (web.allowed_tools, web.call_timeout_seconds) == (("a",), 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no servers"),
        ('{"mcpServers": {}, "inputs": []}', "unknown field 'inputs'"),
        ('{"mcpServers": {"a": {}, "a": {}}}', "'a' appears twice"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "needs a command or a url"),
        ({**CAT, **HTTP}, "needs a command or a url"),
        ({**CAT, "comand": 1}, "unknown field `comand`"),
        ({**CAT, "args": "x"}, "Expected `array`"),
        ({**CAT, "cwd": "/not/there"}, "is not a folder"),
        ({"command": "not-there-at-all"}, "is not a program on PATH"),
        ({**CAT, "env": {"A": "${NOT_SET_ANYWHERE}"}}, "NOT_SET_ANYWHERE, which is not set"),
        ({**CAT, "env": {"A=B": "x"}}, "not the name of a variable"),
        ({**CAT, "args": ["\0"]}, "NUL"),
        ({**CAT, "headers": {"a": "b"}}, "headers, which a command does not take"),
        ({**CAT, "type": "http"}, "contradict"),
        ({**HTTP, "type": "stdio"}, "contradict"),
        ({**HTTP, "type": "sse"}, "old type sse"),
        ({**HTTP, "env": {"A": "b"}}, "no url takes"),
        ({"url": "file:///etc"}, r"must be http\(s\)"),
        ({"url": "http://"}, r"must be http\(s\)"),
        ({**HTTP, "headers": {"a b": "c"}}, "cannot be sent"),
        ({**HTTP, "headers": {"a": "c\r\nd: e"}}, "cannot be sent"),
        ({**CAT, "callTimeoutSeconds": 0}, "callTimeoutSeconds"),
        ({**CAT, "maxResultBytes": 5}, "maxResultBytes"),
    ],
)
def test_entries_that_are_refused(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        servers(tmp_path, odd=entry)
    assert "mcp.json', server 'odd'" in info.value.message


@pytest.mark.parametrize("name", ["", "a__b", "_a", "a_", "a b", "a.b", "x" * 49, "é"])
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a name has"):
        servers(tmp_path, **{name: CAT})


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllmx_server.mcp import settings

    monkeypatch.setattr(settings, "version", lambda _: "1.27.0")
    with pytest.raises(ConfigError, match=r"pip install 'vllmx\[mcp\]'"):
        servers(tmp_path, a=CAT)


def fed(*pieces: bytes, max_bytes: int = 100) -> list[bytes | Unread]:
    lines = MessageLines(max_bytes)
    return [line for piece in pieces for line in lines.feed(piece)]


def test_lines_come_whole() -> None:
    assert fed(b'{"a"', b': 1}\n\n{"b": 2}\r\nhello\n{', b"}\n{") == [
        b'{"a": 1}',
        b'{"b": 2}\r',
        b"{}",
    ]


@pytest.mark.parametrize(
    "large",
    [
        b'{"jsonrpc": "2.0", "id": 17, "result": "%s"}\n',
        b'{"id":17,"jsonrpc":"2.0","result":"%s"}\n',
        b'{"result": {"id": 3, "x": "%s"}, "jsonrpc": "2.0", "id": 17}\n',
        b'{"result":{"x":"%s"},"id":17,"jsonrpc":"2.0"} \n',
    ],
)
@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_answers_that_are_too_large_are_told_by_their_id(large: bytes, size: int) -> None:
    data = large % (b"x" * 5000) + b"{}\n"
    found = fed(*(data[at : at + size] for at in range(0, len(data), size)))
    assert found == [Unread(17, "the answer is larger than what is read of one"), b"{}"]


@pytest.mark.parametrize(
    "large", [b'{"result": {"id": 3, "x": "%s"}}\n', b'{"x": "%s", "y": {"id": 3}}\n', b"%s\n"]
)
def test_other_long_lines_are_babble(large: bytes) -> None:
    with pytest.raises(BabbleError, match="more than 100 bytes"):
        fed(large % (b"x" * 5000))


def test_noise_is_bounded() -> None:
    lines = MessageLines()
    for _ in range(1000):
        assert not list(lines.feed(b"starting ...\n"))
    with pytest.raises(BabbleError, match="not messages"):
        list(lines.feed((b"x" * 20_000 + b"\n") * 100))


def test_a_flood_is_read_slowly() -> None:
    pace = Pace()
    assert pace.wait_s(1, 1 << 20, 1 << 20) == 0.0
    assert pace.wait_s(100_000, 0, 0) > 40.0


def offered_tool(server: str, name: str) -> OfferedTool:
    return OfferedTool(f"{server}__{name}", server, name, "", {})


def test_what_a_model_calls_and_a_request_allows() -> None:
    tools = [offered_tool("a", "x"), offered_tool("a", "y"), offered_tool("b", "y")]
    assert called(tools, "b__y") is tools[2]
    assert called(tools, "x") is tools[0]
    assert called(tools, "y") is None
    assert called(tools, "z") is None
    assert chosen(tools[:2], None, "p") == tools[:2]
    assert chosen(tools[:2], ["y"], "p") == [tools[1]]
    assert chosen(tools[:2], ["a__x"], "p") == [tools[0]]
    with pytest.raises(InvalidRequestError, match="p names 'z', which is none"):
        chosen(tools[:2], ["z"], "p")


def test_the_flag_names_a_file_that_is_read_first(tmp_path: Path) -> None:
    from click.testing import CliRunner
    from vllmx.cli.serve import serve
    from vllmx_core.errors import ConfigError

    arguments = ["--mcp-config", str(tmp_path / "none.json"), "--port", "0"]
    result = CliRunner().invoke(serve, arguments, standalone_mode=False)
    assert isinstance(result.exception, ConfigError)
    assert "--mcp-config" in result.exception.message
