"""More connections than a server has descriptors for: it goes on, and so does its core."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, wait_until

from .conftest import MakeFake, RunningServer

OTHER_ADDRESS = "127.0.0.2"


def connect(server: RunningServer, source: str = "127.0.0.1") -> socket.socket:
    port = int(server.url.rpartition(":")[2])
    return socket.create_connection(
        ("127.0.0.1", port), timeout=PATIENCE_S, source_address=(source, 0)
    )


def get(server: RunningServer, path: str, source: str = "127.0.0.1") -> bytes:
    """The whole answer; empty when the connection was closed without one."""
    with connect(server, source) as client:
        try:
            client.sendall(b"GET %b HTTP/1.0\r\n\r\n" % path.encode())
            return b"".join(iter(lambda: client.recv(65536), b""))
        except ConnectionError:
            return b""


@contextmanager
def idle_connections(server: RunningServer, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect(server)) for _ in range(count)]


def num_descriptors(server: RunningServer) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.fixture(autouse=True)
def needs_linux() -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("looks into /proc, and takes any address of 127.0.0.0/8")


def test_more_connections_than_descriptors(fake_server: MakeFake) -> None:
    with fake_server(open_files=128) as server:
        started_s = time.monotonic()
        with idle_connections(server, 300):
            assert num_descriptors(server) < 128 - 32
            assert b" 503 " in get(server, "/health"), "its address has its share"
            assert b" 200 " in get(server, "/health", OTHER_ADDRESS)
            os.kill(server.core_pid(), signal.SIGKILL)
            wait_until(lambda: b" 503 " in get(server, "/health", OTHER_ADDRESS))
            wait_until(lambda: b" 200 " in get(server, "/health", OTHER_ADDRESS))
        wait_until(lambda: b" 200 " in get(server, "/health"))
        about_connections = [line for line in server.lines if "--max-connections" in line]
        assert 1 <= len(about_connections) <= 1 + time.monotonic() - started_s, "one a second"


def test_more_connections_than_the_limit_of_files_allows(fake_server: MakeFake) -> None:
    with (
        pytest.raises(AssertionError, match="--max-connections 100 is more than the 64"),
        fake_server("--max-connections", "100", open_files=128),
    ):
        pass
