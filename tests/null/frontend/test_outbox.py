"""What the core says while nobody listens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from vllmx_engine.wire import outbox
from vllmx_engine.wire.outbox import Outbox

from tests.waiting import PATIENCE_S


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ours, theirs:
        yield ours, theirs


def test_nobody_waits_for_a_reader_and_all_arrives_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    box = Outbox(ours, pytest.fail)
    frames = [b"%06d," % number * 100 for number in range(2000)]
    assert all(box.put(frame) for frame in frames)
    assert not box.flush(0.01)
    wanted, read = b"".join(frames), bytearray()
    theirs.settimeout(PATIENCE_S)
    while len(read) < len(wanted):
        read += theirs.recv(1 << 16)
    assert read == wanted
    assert box.flush(PATIENCE_S)


def test_what_the_kernel_takes_at_once_needs_no_thread(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    box, before = Outbox(ours, pytest.fail), threading.active_count()
    for _ in range(100):
        assert box.put(b"x" * 100)
        assert theirs.recv(1000) == b"x" * 100
    assert threading.active_count() == before


def test_too_much_behind_one_frame_is_told(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING_BYTES", 1000)
    ours, theirs = pair
    box = Outbox(ours, lambda: None)
    assert box.put(b"x" * (1 << 20)), "one frame may be of any size"
    assert box.put(b"y" * 1000)
    assert not box.put(b"z")
    size = 0
    theirs.settimeout(PATIENCE_S)
    while size < (1 << 20) + 1001:
        size += len(theirs.recv(1 << 16))
    assert box.flush(PATIENCE_S)
    assert box.put(b"x")


def test_a_reader_that_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    gone = threading.Event()
    box = Outbox(ours, gone.set)
    box.put(b"x" * (1 << 20))
    theirs.close()
    assert gone.wait(PATIENCE_S)
    gone.clear()
    assert box.flush(PATIENCE_S)
    box.put(b"x")
    assert gone.is_set()
