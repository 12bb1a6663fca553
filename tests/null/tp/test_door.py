"""Who gets in to a host of ranks, and what keeps nobody out."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from vllmx_core.system import greeter, handshake
from vllmx_core.system.greeter import MOST_GREETED, listen
from vllmx_core.system.handshake import BusyError, call
from vllmx_tp.hosts import connect
from vllmx_tp.listener import RankListener
from vllmx_tp.messages import RANKS, Purpose

from tests.waiting import PATIENCE_S

KEY = b"k" * 32
ONE, OTHER = b"1" * 16, b"2" * 16


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen(("127.0.0.1", 0)) as listener:
        yield listener


def called(listener: socket.socket, group: bytes, purpose: Purpose) -> socket.socket:
    """A connection that was let in. Raises BusyError."""
    connection = socket.create_connection(listener.getsockname())
    try:
        call(connection, KEY, group, purpose, RANKS)
    except BaseException:
        connection.close()
        raise
    return connection


def test_the_second_connection_is_of_the_same_group(listener: socket.socket) -> None:
    """Another server's first one was taken for it, and both groups died."""
    host = RankListener(listener, KEY)
    steps = called(listener, ONE, Purpose.STEPS)
    caller = host.caller()
    assert caller is not None
    for group, purpose in ((OTHER, Purpose.STEPS), (OTHER, Purpose.PARTS), (ONE, Purpose.STEPS)):
        with pytest.raises(BusyError, match="hangs up"):
            called(listener, group, purpose)
    parts = called(listener, ONE, Purpose.PARTS)
    with pytest.raises(BusyError, match="hangs up"):
        called(listener, ONE, Purpose.PARTS)
    with steps, parts:
        taken = caller.parts.get(timeout=PATIENCE_S)
        assert taken is not None
        with taken:
            for mine, its in ((steps, caller.steps), (parts, taken)):
                assert mine.getsockname() == its.getpeername()
    host.leave(caller)
    with connect(
        listener.getsockname(), KEY, OTHER, Purpose.STEPS, PATIENCE_S, lambda: None
    ) as connection:
        other = host.caller()
        assert other is not None
        assert other.steps.getpeername() == connection.getsockname()
        host.leave(other)


def test_a_second_connection_that_nobody_took_is_closed(listener: socket.socket) -> None:
    host = RankListener(listener, KEY)
    with called(listener, ONE, Purpose.STEPS):
        caller = host.caller()
        assert caller is not None
        with called(listener, ONE, Purpose.PARTS) as parts:
            host.leave(caller)
            assert parts.recv(1) == b""


def test_who_says_nothing_keeps_nobody_out(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are greeted at a time, whose time is never over."""
    monkeypatch.setattr(handshake, "HANDSHAKE_S", PATIENCE_S)
    host = RankListener(listener, KEY)
    with ExitStack() as stack:
        for _ in range(2 * MOST_GREETED):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        with called(listener, ONE, Purpose.STEPS):
            caller = host.caller()
            assert caller is not None
            host.leave(caller)


def test_no_descriptor_for_a_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host goes on when there are some again."""
    monkeypatch.setattr(greeter, "LOOK_S", 0.01)

    class Full(socket.socket):
        num_refused = 0

        def accept(self) -> tuple[socket.socket, Any]:
            if self.num_refused < 2:
                self.num_refused += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with listen(("127.0.0.1", 0)) as plain, Full(fileno=plain.detach()) as listener:
        host = RankListener(listener, KEY)
        with called(listener, ONE, Purpose.STEPS):
            caller = host.caller()
            assert caller is not None
            host.leave(caller)
    assert "Too many open files" in caplog.text


def test_a_socket_that_is_closed_ends_the_door(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeter, "LOOK_S", 0.01)
    host = RankListener(listener, KEY)
    listener.close()
    assert host.caller() is None
