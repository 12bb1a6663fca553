"""The order of data and counters, on processors that keep none by themselves: whoever writes has
data, fence, counter, whoever reads has counter, fence, data. What stands in for a fence here looks
at the memory, and puts down what the other side has written, as if it came only then."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from vllmx_tp import futex
from vllmx_tp.communicator import Incoming, Outgoing, SharedMemoryCommunicator
from vllmx_tp.region import Region, Word

from tests.waiting import PATIENCE_S


def test_each_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for system in ("linux", "darwin"):
        assert futex.fence_of(system, "x86_64")() is None
    calls: list[None] = []
    barrier = ctypes.CFUNCTYPE(None)(lambda: calls.append(None))
    monkeypatch.setattr(futex, "_libc", SimpleNamespace(OSMemoryBarrier=barrier))
    futex.fence_of("darwin", "arm64")()
    assert len(calls) == 1


def test_threads_may_meet_in_a_fence() -> None:
    fence = futex.fence_of("linux", "aarch64")

    def run() -> None:
        for _ in range(1000):
            fence()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_piece_is_counted_behind_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is written behind the look at what was taken."""
    region = Region.create(2, 2)
    sent, size, buffer = region.word(0, Word.ARRIVED), region.part_bytes(0, 1), region.buffer(0, 1)
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        futex, "fence", lambda: seen.append((int(sent[0]), int(size[0]), int(buffer[0])))
    )
    Outgoing(region, 0).send(np.full(3, 7, np.uint8))
    assert seen == [(0, 0, 0), (0, 3, 7)]
    assert sent[0] == 1
    region.close()


@pytest.mark.parametrize("is_message", [False, True])
def test_a_piece_is_read_between_its_counters(
    monkeypatch: pytest.MonkeyPatch, is_message: bool
) -> None:
    region = Region.create(2, 2)
    taken, size, buffer = region.word(1, Word.PIECES), region.part_bytes(0, 1), region.buffer(0, 1)
    piece = (struct.pack("<Q", 3) if is_message else b"") + b"abc"
    seen: list[int] = []

    def fence() -> None:
        seen.append(int(taken[0]))
        size[0] = len(piece)
        buffer[: len(piece)] = np.frombuffer(piece, np.uint8) if len(seen) == 1 else 0

    monkeypatch.setattr(futex, "fence", fence)
    region.word(0, Word.ARRIVED)[0] = 1
    end = Incoming(region, 1)
    found = end.recv_message() if is_message else end.recv((3,), np.uint8).tobytes()
    assert found == b"abc"
    assert seen == [0, 0]
    assert taken[0] == 1
    region.close()


def test_a_part_is_counted_behind_its_bytes_and_read_behind_its_counter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    region = Region.create(2)
    mine, theirs = (region.word(rank, Word.ARRIVED) for rank in (0, 1))
    seen: list[tuple[int, int]] = []

    def fence() -> None:
        seen.append((int(mine[0]), int(region.part(0, 1)[0])))
        if len(seen) == 2:
            region.part(1, 1)[:2] = 6

    monkeypatch.setattr(futex, "fence", fence)
    theirs[0] = 1
    total = SharedMemoryCommunicator(region, 0).all_reduce(np.full(2, 5, np.uint8))
    assert total.tolist() == [11, 11]
    assert seen == [(0, 5), (1, 5)]
    region.close()
