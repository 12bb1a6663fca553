"""MCP servers, good and bad: what models are offered, what calls come to, and who ends when."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllmx_server.mcp import server as one_server
from vllmx_server.mcp.offered import MAX_TOOLS

from tests.waiting import PATIENCE_S, wait_until

from .conftest import HERE, StartServers, scripted


def gone(pid: int) -> bool:
    """Ended, be it that nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_calls_and_their_results(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    monkeypatch.setenv("TOKEN", "t0ken")
    entry = scripted("well", env={"OWN": "${TOKEN}"}, allowedTools=["echo", "env", "fail", "image",
                     "structured", "long", "large", "noise"], maxResultBytes=1000)  # fmt: skip
    started = start_servers(s=entry)
    assert started.settle("s") is None
    assert "s__die" not in [tool.name for tool in started.servers.tools("s")]
    echoed = started.call("s__echo", '{"a": [1, "é"]}')
    assert (json.loads(echoed.text), echoed.is_error) == ({"a": [1, "é"]}, False)
    seen = started.call("s__env").text.split()
    assert "OWN" in seen
    assert "PATH" in seen
    assert not {"SECRET_OF_OURS", "TOKEN"} & set(seen)
    failed = started.call("s__fail")
    assert (failed.text, failed.is_error, failed.code) == ("no such city", True, None)
    assert started.call("s__image").text == "look\n[image image/png, 1000 characters: not shown]"
    assert started.call("s__structured").text == '{"a":1}'
    assert started.call("s__noise", '{"b": 1}').text == '{"b": 1}'
    long = started.call("s__long").text
    assert long == "ab" * 500 + "\n[cut: the first 1000 of 200000 bytes]"
    wrong = started.call("s__echo", '{"a": ')
    assert (wrong.text, wrong.is_error) == ("the arguments are not a JSON object", True)


def test_a_result_of_100_mb_is_an_error_of_that_call_alone(start_servers: StartServers) -> None:
    started = start_servers(s=scripted("well"))
    large = started.begin("s__large")
    assert "larger than what is read" in large.result(PATIENCE_S).text
    assert started.call("s__echo", '{"a": 1}').text == '{"a": 1}'


def test_a_server_that_ends_in_a_call_is_started_again(
    start_servers: StartServers, caplog: pytest.LogCaptureFixture
) -> None:
    started = start_servers(s=scripted("well"), other=scripted("well"))
    assert started.settle("other") is None
    with caplog.at_level(logging.WARNING):
        died = started.call("s__die")
        assert died.is_error
        wait_until(lambda: bool(caplog.records))
        wait_until(lambda: started.servers.fault("s") is None)
    assert [record.getMessage() for record in caplog.records] == [
        "MCP server s: it ended with code 3; it is tried again"
    ]
    assert started.call("s__echo").text == "{}"
    assert started.call("other__echo").text == "{}"


def test_a_server_that_hangs_in_a_call_is_started_again(
    start_servers: StartServers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(one_server, "_PING_S", 0.1)
    started = start_servers(s=scripted("well", callTimeoutSeconds=0.3), other=scripted("well"))
    hung = started.call("s__hang")
    assert (hung.text, hung.is_error) == ("the tool did not answer within 0.3 s", True)
    wait_until(lambda: "it does not answer any more" in caplog.text)
    wait_until(lambda: started.servers.fault("s") is None)
    left = started.begin("other__hang")
    assert left.cancel()


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("dies", "it ended with code 1: cannot open the data"),
        ("babbles", "it writes lines that are not messages"),
        ("one-line", "it writes lines that are not messages"),
        ("hangs", "it does not answer"),
        ("no-list", "it cannot be reached (ValidationError)"),
        ("deep", "it cannot be reached (MCPError)"),
    ],
)
def test_a_server_that_does_not_start(
    start_servers: StartServers, caplog: pytest.LogCaptureFixture, mode: str, fault: str
) -> None:
    """The log says it once, however often it is tried."""
    slow = mode in ("hangs", "one-line")
    with caplog.at_level(logging.WARNING):
        started = start_servers(s=scripted(mode, startTimeoutSeconds=1 if slow else PATIENCE_S))
        found = started.settle("s")
        if mode == "dies":
            time.sleep(0.3)
    told = f"MCP server s: {fault}; it is tried again"
    if mode == "one-line":  # by its length, or by the time that passes
        assert found in ("it writes lines of more than 4194304 bytes", "it does not answer")
    else:
        assert found == fault.partition(":")[0]
        assert [record.getMessage() for record in caplog.records] == [told]
    assert started.servers.tools("s") == ()


def test_strange_tools_are_left_out(
    start_servers: StartServers, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        started = start_servers(s=scripted("strange"), many=scripted("thousands"))
        assert started.settle("s") is None
        assert started.settle("many") is None
    assert [tool.name for tool in started.servers.tools("s")] == ["s__good", "s__an_odd_n_me"]
    assert len(started.servers.tools("many")) == MAX_TOOLS
    told = sorted(record.getMessage() for record in caplog.records)
    assert len(told) == 2
    assert told[0].startswith("MCP server many: 4872 of its tools are left out: many__t128 is one")
    assert told[1].startswith("MCP server s: 6 of its tools are left out: s__good is there twice")


PARENT = """
import sys, time
from vllmx_server.mcp.settings import read_servers
from vllmx_server.mcp.servers import ToolServers
servers = ToolServers(read_servers(sys.argv[1], "--mcp-config"))
time.sleep(1000)
"""


def test_servers_end_with_us_even_by_sigkill(tmp_path: Path) -> None:
    """Those that heed nothing, and what they started."""
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    if not Path("/proc/self/stat").exists():
        pytest.skip("looks for processes in /proc, which is not here")
    pids, config = tmp_path / "pids", tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"s": scripted("stubborn", str(pids))}}))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(config)])
    try:
        wait_until(lambda: pids.exists() or parent.poll() is not None)
        server, started = map(int, pids.read_text().split())
        assert not gone(server)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: gone(server) and gone(started))


def test_closing_ends_servers_that_heed_nothing(
    start_servers: StartServers, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    started = start_servers(s=scripted("stubborn", str(pids)))
    wait_until(pids.exists)
    started.servers.close()
    wait_until(lambda: all(gone(int(pid)) for pid in pids.read_text().split()))


def test_a_process_with_many_descriptors_starts_servers(start_servers: StartServers) -> None:
    """As one that serves a thousand connections does."""
    resource = pytest.importorskip("resource", reason="limits of descriptors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may have {hard} descriptors here, and 2048 are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = []
    try:
        while not taken or taken[-1] < 1100:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        started = start_servers(s=scripted("well"))
        assert started.call("s__echo", '{"text": "a"}').is_error is False
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_official_server(start_servers: StartServers) -> None:
    started = start_servers(
        real={"command": sys.executable, "args": [str(HERE / "real_server.py"), "stdio"]}
    )
    assert started.settle("real") is None
    weather, add = started.servers.tools("real")
    assert weather.function == {
        "type": "function",
        "function": {
            "name": "real__get_weather",
            "description": "The weather of a city.",
            "parameters": weather.schema,
        },
    }
    assert weather.schema["required"] == ["city"]
    assert started.call("real__add", '{"a": 2, "b": 3}').text == "5"
    refused = started.call("real__add", '{"a": "x"}')
    assert refused.is_error
    assert add.tool == "add"


def test_a_server_that_is_busy_for_somebody_is_left_alone(
    start_servers: StartServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One leaves while another's call holds the server, which answers nobody meanwhile."""
    monkeypatch.setattr(one_server, "_PING_S", 0.05)
    started = start_servers(s=scripted("well"))
    slow = started.begin("s__slow")
    assert started.begin("s__echo").cancel()
    assert slow.result(PATIENCE_S).text == "at last"
