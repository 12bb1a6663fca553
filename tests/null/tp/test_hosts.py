"""Hosts of ranks, without a model: keys, hellos and addresses."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, RankLostError
from vllmx_core.system import greeter, handshake
from vllmx_core.system.deadline import Deadline
from vllmx_core.system.greeter import listen
from vllmx_core.system.handshake import (
    LET_IN,
    MAGIC_BYTES,
    BusyError,
    HandshakeError,
    Service,
    answer,
    call,
    read_key,
)
from vllmx_tp import __version__, hosts
from vllmx_tp.hosts import COMMAND, connect
from vllmx_tp.loading import share_of_host
from vllmx_tp.messages import RANKS, Purpose

from tests.waiting import PATIENCE_S

KEY, OTHER_KEY, GROUP = b"k" * 32, b"o" * 32, b"g" * 16
HELLO_BYTES = MAGIC_BYTES + 32 + 4 + 1 + len(GROUP) + 32


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


# --- keys -----------------------------------------------------------------------------------------
def test_a_key_is_long_and_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match="need --rank-key-file: make one by"):
        read_key(None)
    with pytest.raises(ConfigError, match="No such file"):
        read_key(str(file))
    file.write_bytes(KEY + b"\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"may be read by others: chmod 600 "):
        read_key(str(file))
    file.chmod(0o600)
    assert read_key(str(file)) == KEY
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="holds 5 bytes, at least 32"):
        read_key(str(file))


def test_a_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLMX_RANK_KEY", KEY.decode())
    assert read_key(None) == KEY
    monkeypatch.setenv("VLLMX_RANK_KEY", "short")
    with pytest.raises(ConfigError, match="VLLMX_RANK_KEY holds 5 bytes, at least 32"):
        read_key(None)


def greeted(
    pool: ThreadPoolExecutor, caller: Callable[[socket.socket], None]
) -> Future[tuple[int, bytes]]:
    """What comes of a call for the side that waits."""
    ours, theirs = socket.socketpair()

    def wait() -> tuple[int, bytes]:
        with theirs:
            found = answer(theirs, KEY, RANKS)
            theirs.sendall(LET_IN)
            return found

    future = pool.submit(wait)
    with ours:
        caller(ours)
        if ours.fileno() >= 0:
            ours.shutdown(socket.SHUT_WR)  # all that will come
        future.exception()
    return future


def test_who_has_the_key_is_let_in(pool: ThreadPoolExecutor) -> None:
    future = greeted(pool, lambda ours: call(ours, KEY, GROUP, Purpose.PARTS, RANKS))
    assert future.result() == (Purpose.PARTS, GROUP)


def test_what_a_connection_is_for_is_proved(pool: ThreadPoolExecutor) -> None:
    """Who stands between two hosts cannot take one connection for another."""

    class Liar(socket.socket):
        def sendall(self, data: Any, *flags: int) -> None:  # type: ignore[override]
            super().sendall(bytes(data).replace(GROUP, b"h" * 16), *flags)

    def lie(ours: socket.socket) -> None:
        with Liar(fileno=os.dup(ours.fileno())) as liar, suppress(HandshakeError):
            call(liar, KEY, GROUP, Purpose.STEPS, RANKS)

    with pytest.raises(HandshakeError):
        greeted(pool, lie).result()


def test_who_has_another_key_is_told_and_not_let_in(pool: ThreadPoolExecutor) -> None:
    def try_to(ours: socket.socket) -> None:
        with pytest.raises(HandshakeError, match="another key: give both the same --rank-key-file"):
            call(ours, OTHER_KEY, GROUP, Purpose.STEPS, RANKS)

    with pytest.raises(HandshakeError):
        greeted(pool, try_to).result()


def test_who_repeats_a_proof_is_not_let_in(pool: ThreadPoolExecutor) -> None:
    """No proof that was overheard lets anybody in, nor the waiting side's own."""

    def echo(ours: socket.socket) -> None:
        deadline = Deadline(PATIENCE_S)
        ours.sendall(handshake.receive(ours, HELLO_BYTES, deadline))
        ours.sendall(handshake.receive(ours, 32, deadline))

    with pytest.raises(HandshakeError, match="another key"):
        greeted(pool, echo).result()
    overheard: list[bytes] = []

    class Ear(socket.socket):
        def sendall(self, data: Any, *flags: int) -> None:  # type: ignore[override]
            overheard.append(bytes(data))
            super().sendall(data, *flags)

    def listened_to(ours: socket.socket) -> None:
        with Ear(fileno=os.dup(ours.fileno())) as ear:
            call(ear, KEY, GROUP, Purpose.STEPS, RANKS)

    greeted(pool, listened_to).result()

    def replay(ours: socket.socket) -> None:
        for data in overheard:
            ours.sendall(data)

    with pytest.raises(HandshakeError, match="another key"):
        greeted(pool, replay).result()


def another(rest: str) -> Any:
    """The handshake of another version of vllmx, with what follows the part of a hello that all
    versions have in common."""
    spec = find_spec("vllmx_core.system.handshake")
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    module._REST = struct.Struct(rest)
    return module


@pytest.mark.parametrize("rest", ["<B16s2s", "<B16s32s", "<B16s300s"])
@pytest.mark.parametrize(("version", "protocol"), [("9.9", 7), (__version__, 2), ("9.9", 1)])
def test_another_version_is_named_by_both(
    pool: ThreadPoolExecutor, version: str, protocol: int, rest: str
) -> None:
    """At once, however long its hello is: it had been waited for, as one that is busy."""
    other, older = another(rest), replace(RANKS, version=version, protocol=protocol)

    def says(its: tuple[str, int], mine: tuple[str, int]) -> str:
        one, this = (f"{version!r} with protocol {number}" for version, number in (its, mine))
        return re.escape(f"it runs vllmx-tp {one}, this host {this}: install the same vllmx on")

    def let_in(module: Any, service: Service) -> None:
        with place.accept()[0] as connection:
            module.answer(connection, KEY, service)

    mine, its = (__version__, RANKS.protocol), (version, protocol)
    with listen(("127.0.0.1", 0)) as place:
        address = place.getsockname()
        future = pool.submit(let_in, other, older)
        with pytest.raises(ConfigError, match=f"^--rank-hosts 127.0.0.1:.*: {says(its, mine)}"):
            connect(address, KEY, GROUP, Purpose.STEPS, PATIENCE_S, lambda: None)
        with pytest.raises(other.HandshakeError, match=says(mine, its)):
            future.result()
        future = pool.submit(let_in, handshake, RANKS)
        with (
            socket.create_connection(address) as connection,
            pytest.raises(other.HandshakeError, match=says(mine, its)),
        ):
            other.call(connection, KEY, GROUP, Purpose.STEPS, older)
        with pytest.raises(HandshakeError, match=says(its, mine)):
            future.result()


def test_a_version_that_is_no_text(pool: ThreadPoolExecutor) -> None:
    """Nothing of it reaches a terminal."""
    hello = (RANKS.magic + b"\n\x1b[2J".ljust(32, b"\0")).ljust(HELLO_BYTES)
    with pytest.raises(HandshakeError, match=r"vllmx-tp '\\n\\x1b\[2J' with"):
        greeted(pool, lambda ours: ours.sendall(hello)).result()


def test_what_is_no_hello(pool: ThreadPoolExecutor) -> None:
    for shorter in (b"GET / HTTP/1.1\r\n", b"SSH-2.0-OpenSSH_9\r\n"):
        with pytest.raises(HandshakeError, match="not a host of ranks: check the port"):
            greeted(pool, lambda ours, shorter=shorter: ours.sendall(shorter)).result()


def test_who_says_nothing_is_hung_up_on(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BusyError, match="does not answer"):
        answer(theirs, KEY, RANKS)


# --- addresses ------------------------------------------------------------------------------------
addresses = partial(greeter.addresses, param="rank_hosts", command=COMMAND)


def test_hosts_are_written_with_their_ports() -> None:
    assert addresses(None) == []
    assert addresses("a:1, [::1]:7000,") == [("a", 1), ("::1", 7000)]
    for wrong in ("a", "a:", ":5", "a:99999", "a:b", "a:-1"):
        with pytest.raises(ConfigError, match="is not a host:port"):
            addresses(wrong)


@pytest.mark.parametrize("twice", ["a:1,b:1,a:1", "A:1, a:01", "[::1]:1,::1:1"])
def test_a_host_is_named_once(twice: str) -> None:
    """It would have been waited for while it serves this very group."""
    part = twice.rpartition(",")[2].strip()
    with pytest.raises(ConfigError, match=rf"names '{re.escape(part)}' twice: name each host"):
        addresses(twice)
    assert len(addresses("a:1,a:2,b:1")) == 3


def test_no_host_is_called_at_port_0() -> None:
    with pytest.raises(ConfigError, match=r"--rank-hosts 'a:0': nobody listens at port 0: give"):
        addresses("a:0")
    assert greeter.addresses("a:0", "listen") == [("a", 0)]


def test_ranks_are_shared_out_evenly() -> None:
    assert share_of_host(EngineConfig(model="demo", tensor_parallel_size=4), 2) == 2
    with pytest.raises(ConfigError, match=r"3 ranks .* 2 hosts .* --tensor-parallel-size 2 or a"):
        share_of_host(EngineConfig(model="demo", tensor_parallel_size=3), 2)
    with pytest.raises(ConfigError, match=r"3 stages .* --pipeline-parallel-size 2 or a multiple"):
        share_of_host(EngineConfig(model="demo", pipeline_parallel_size=3), 2)
    both = EngineConfig(model="demo", pipeline_parallel_size=2, tensor_parallel_size=3)
    assert share_of_host(both, 2) == 3
    with pytest.raises(ConfigError, match=r"2 stages cannot .* --pipeline-parallel-size 3 or a"):
        share_of_host(both, 3)  # a stage is on one host


def test_a_port_in_use() -> None:
    with listen(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: Address already in use: choose"):
            listen(("127.0.0.1", port))
    with pytest.raises(ConfigError, match=r"192.0.2.1:7000: .*: name an address that this host"):
        listen(("192.0.2.1", 7000))


def let_in(connection: socket.socket) -> None:
    answer(connection, KEY, RANKS)
    connection.sendall(LET_IN)


def silent_place() -> tuple[socket.socket, Any]:
    """A port where nobody listens, and which no other program can take meanwhile."""
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    return place, place.getsockname()


def test_hosts_that_start_later_are_waited_for(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """The other host begins when this one has looked twice in vain."""
    place, address = silent_place()
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            place.listen()
            pool.submit(wait)

    def wait() -> None:
        with place.accept()[0] as connection:
            let_in(connection)

    connect(address, KEY, GROUP, Purpose.STEPS, PATIENCE_S, check).close()
    place.close()
    assert looks == 2
    (told,) = [record.getMessage() for record in caplog.records if "waiting" in record.message]
    assert told.startswith(f"waiting for ranks at 127.0.0.1:{address[1]} (Connection refused)")


def test_a_host_that_is_busy_is_waited_for(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has time when this one has tried once in vain."""
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.05)
    place = listen(("127.0.0.1", 0))

    def wait() -> None:
        monkeypatch.setattr(handshake, "HANDSHAKE_S", PATIENCE_S)
        while True:
            with place.accept()[0] as connection, suppress(HandshakeError, OSError):
                let_in(connection)
                return

    futures: list[Future[None]] = []

    def check() -> None:
        if not futures:
            futures.append(pool.submit(wait))

    connect(place.getsockname(), KEY, GROUP, Purpose.STEPS, PATIENCE_S, check).close()
    futures[0].result()
    place.close()


@pytest.mark.parametrize("way", ["reset", "hung up on", "hung up on behind the proof"])
def test_a_host_that_hangs_up_is_asked_again(pool: ThreadPoolExecutor, way: str) -> None:
    """It serves another group, or is started again."""

    def wait() -> None:
        with place.accept()[0] as connection:
            if way == "reset":
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            elif way != "hung up on":
                answer(connection, KEY, RANKS)
        with place.accept()[0] as connection:
            let_in(connection)

    with listen(("127.0.0.1", 0)) as place:
        future = pool.submit(wait)
        address = place.getsockname()
        connect(address, KEY, GROUP, Purpose.STEPS, PATIENCE_S, lambda: None).close()
        future.result()


def test_waiting_for_hosts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    place, address = silent_place()
    with pytest.raises(
        ConfigError, match=r"no host of ranks there within 0 s .* start `vllmx rank"
    ):
        connect(address, KEY, GROUP, Purpose.STEPS, 0.0, lambda: None)

    def check() -> None:
        raise RankLostError("rank 1 was killed")

    with pytest.raises(RankLostError):
        connect(address, KEY, GROUP, Purpose.STEPS, PATIENCE_S, check)
    place.close()

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(hosts.socket, "create_connection", unknown)
    with pytest.raises(ConfigError, match=r"the host is not known .* correct its name"):
        connect(("nowhere", 1), KEY, GROUP, Purpose.STEPS, 60.0, lambda: None)
