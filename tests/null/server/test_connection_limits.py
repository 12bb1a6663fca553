"""Connections when many want one: limits in all and for each address, hosts, descriptors."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from vllmx_core.errors import ConfigError
from vllmx_server.config import ServerConfig
from vllmx_server.http.connections.serving import ConnectionLimits, Listener, Place, network_of
from vllmx_server.http.connections.settings import connection_limit
from vllmx_server.http.hosts import allowed_hosts

from tests.waiting import PATIENCE_S, until

from .conftest import MakeServer
from .test_http1 import GET, is_closed, read_answer


async def test_an_address_has_its_share(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"max_connections": 20, "max_connections_per_address": 3}
    async with make_server(fields) as served:
        mine = [await served.connect() for _ in range(3)]
        for reader, writer in mine:
            writer.write(GET)
            assert (await read_answer(reader))[0] == 200
        started_s = asyncio.get_running_loop().time()
        for _ in range(50):
            refused, writer = await served.connect()
            status, headers, body = await read_answer(refused)
            assert (status, headers["connection"]) == (503, "close")
            assert headers["retry-after"] == "1"
            assert b'"overloaded"' in body
            await is_closed(refused)
        elapsed_s = asyncio.get_running_loop().time() - started_s
        assert sum("was refused: 127.0.0.1" in line for line in caplog.messages) <= 1 + elapsed_s
        mine[0][1].transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while True:  # its place is free as soon as the server has seen it leave
                reader, writer = await served.connect()
                writer.write(GET)
                with suppress(OSError, asyncio.IncompleteReadError):
                    if (await read_answer(reader))[0] == 200:
                        break


@contextmanager
def listening_for(
    limits: ConnectionLimits,
) -> Iterator[tuple[Listener, list[Place], socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        places: list[Place] = []
        sockets: list[socket.socket] = []

        def on_accepted(accepted: socket.socket, place: Place) -> None:
            sockets.append(accepted)
            place.close = accepted.close
            places.append(place)

        listener = Listener(listening, limits, on_accepted, refusal=b"no")
        listener.start()
        try:
            yield listener, places, listening
        finally:
            listener.stop()
            for accepted in sockets:
                accepted.close()


async def test_who_waits_longest_for_a_request_makes_room() -> None:
    with listening_for(ConnectionLimits(3, 9)) as (listener, places, listening):
        clients = []

        async def connect() -> None:
            clients.append(await asyncio.open_connection(*listening.getsockname()))

        for count in (1, 2, 3):
            await connect()
            await until(lambda count=count: len(places) >= count)  # type: ignore[misc]
        listener.set_idle(places[0], False)
        await connect()
        await is_closed(clients[1][0])
        for place in places:
            listener.set_idle(place, False)
        await connect()
        assert await clients[4][0].read() == b"no"
        listener.release(places[0])
        await connect()
        await until(lambda: len(places) >= 5)
        for _, writer in clients:
            writer.close()


async def test_out_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One try a tenth of a second, a line a second; who waits for a request makes room."""
    with listening_for(ConnectionLimits(9, 9)) as (_, places, listening):
        first, writer = await asyncio.open_connection(*listening.getsockname())
        await until(lambda: len(places) == 1)
        num_tries = 0

        def accept(_: socket.socket) -> None:
            nonlocal num_tries
            num_tries += 1
            raise OSError(24, "Too many open files")

        started_s = asyncio.get_running_loop().time()
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", accept)
            second, other = await asyncio.open_connection(*listening.getsockname())
            await is_closed(first)
            elapsed_s = asyncio.get_running_loop().time() - started_s
            assert 1 <= num_tries <= 1 + elapsed_s / 0.1
        await until(lambda: len(places) >= 2)
        writer.close()
        other.close()
        assert second is not None
    complaints = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert 1 <= len(complaints) <= 1 + elapsed_s


def test_addresses_of_one_customer() -> None:
    inet, inet6 = socket.AF_INET, socket.AF_INET6
    assert network_of(inet, ("192.0.2.1", 5)) == "192.0.2.1"
    assert network_of(inet6, ("::ffff:192.0.2.1", 5, 0, 0)) == "192.0.2.1"
    near, far = ("2001:db8:1:2::1", "2001:db8:1:2:3::"), "2001:db8:1:3::1"
    assert len({network_of(inet6, (name, 5, 0, 0)) for name in near}) == 1
    assert network_of(inet6, (far, 5, 0, 0)) != network_of(inet6, (near[0], 5, 0, 0))
    assert network_of(inet6, ("fe80::1%eth0", 5, 0, 2)) == "fe80::/64"
    assert network_of(socket.AF_UNIX, "") == ""


def test_how_many_connections_descriptors_allow() -> None:
    assert connection_limit(None, 1 << 16) == 16384
    assert connection_limit(None, 1024) == 768
    assert connection_limit(None, 128) == 64
    assert connection_limit(700, 1024) == 700
    with pytest.raises(ConfigError, match=r"769 .* 768 .* 1024 .*ulimit -Hn 1025"):
        connection_limit(769, 1024)


def test_the_soft_limit_is_raised() -> None:
    program = (
        "import resource\n"
        "from vllmx_server.http.connections.settings import raise_descriptor_limit\n"
        "hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 300)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 100, hard))\n"
        "assert raise_descriptor_limit() == hard\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost.:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("mine.example:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("evil.example@127.0.0.1", 403),
        ("127.0.0.1, evil.example", 403),
    ],
)
async def test_hosts_on_loopback(make_server: MakeServer, host: str, status: int) -> None:
    async with make_server({"allowed_hosts": ("Mine.example",)}) as served:
        for path in ("/health", "/v1/models", "/none"):
            response = await served.client.get(path, headers={"host": host})
            assert response.status_code in (status, 404)
            assert path == "/none" or response.status_code == status
        if status == 403:
            error = response.json()["error"]
            assert error["code"] == "host_not_allowed"
            assert "--allowed-hosts" in error["message"]


def test_where_hosts_are_checked() -> None:
    assert allowed_hosts(ServerConfig(host="127.0.0.5")) == {"localhost", "127.0.0.5"}
    assert allowed_hosts(ServerConfig(host="::1")) == {"localhost", "::1"}
    assert allowed_hosts(ServerConfig(host="localhost", allowed_hosts=("*",))) is None
    assert allowed_hosts(ServerConfig(host="0.0.0.0")) is None
    assert allowed_hosts(ServerConfig(uds="/tmp/x")) is None
    assert "a.example" in (
        allowed_hosts(ServerConfig(host="::", allowed_hosts=("a.example",))) or ()
    )
