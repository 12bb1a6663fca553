"""Links between hosts of ranks: parts go from region to region, behind a fence each as in
`test_fences`, and a link that breaks says why."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from vllmx_core.system.greeter import listen
from vllmx_tp import futex
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.link import Link, StageLink
from vllmx_tp.region import BUFFER_BYTES, Region, Word

from tests.waiting import PATIENCE_S, wait_until

from .hosted import end_all


@pytest.mark.parametrize("shares", [[(0,), (1,)], [(0, 1), (2, 3)], [(0,), (1,), (2,)]])
def test_ranks_add_and_gather_from_region_to_region(shares: list[tuple[int, ...]]) -> None:
    """Some arrays are more than a buffer holds; with three hosts, the first passes parts on."""
    count = sum(map(len, shares))
    regions, links, broken = [Region.create(count) for _ in shares], [], []
    for host, share in enumerate(shares[1:], 1):
        listener = listen(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        listener.close()
        others = [rank for rank in range(count) if rank not in share]
        links.append(Link(regions[0], ours, others, share, broken.append))
        links.append(Link(regions[host], theirs, share, others, broken.append))
    wide = BUFFER_BYTES // 8 + 17
    given = [np.random.default_rng(rank).standard_normal((2, wide)) for rank in range(count)]
    found: dict[int, list[Any]] = {}

    def run(region: Region, rank: int) -> None:
        comm = SharedMemoryCommunicator(region, rank)
        part = np.full((3, rank + 1), rank, np.float32)
        found[rank] = [comm.all_reduce(given[rank])]
        found[rank] += [comm.all_gather(part, [one + 1 for one in range(count)])]
        found[rank] += [int(comm.all_reduce(np.full(4, rank + turn))[0]) for turn in range(7)]

    threads = [
        threading.Thread(target=run, args=(region, rank))
        for region, share in zip(regions, shares, strict=True)
        for rank in share
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(count):
        total, gathered, *sums = found[rank]
        np.testing.assert_array_equal(total, found[0][0])
        np.testing.assert_allclose(total, sum(given), rtol=1e-12, atol=1e-12)
        assert gathered[0].tolist() == [one for one in range(count) for _ in range(one + 1)]
        assert sums == [count * (count - 1) // 2 + count * turn for turn in range(7)]
    assert not broken
    end_all(regions, links)


@contextmanager
def linked(
    kind: type[Link], ended: Callable[[str], None]
) -> Iterator[tuple[Region, socket.socket]]:
    """Rank 0's region with a link to rank 1, and the other end of its connection."""
    region = Region.create(2, 2 if kind is StageLink else 1)
    with listen(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    link = kind(region, ours, [0], [1], ended)
    with theirs:
        yield region, theirs
    region.aborted[0] = 1
    link.close()
    region.close()


SENT, TAKEN = int(Word.ARRIVED), int(Word.PIECES)
TOO_LONG = f"it sends a part of {BUFFER_BYTES + 4} bytes, more than the {BUFFER_BYTES} of a buffer"
ITS_WORDS = f"which is none of its words {SENT} and {TAKEN} of seats 1"


@pytest.mark.parametrize(
    ("kind", "words", "reason"),
    [
        (Link, (), "the other side has hung up"),
        (Link, (1, BUFFER_BYTES + 4), TOO_LONG),
        (StageLink, (), "the other side has hung up"),
        (StageLink, (SENT, 1, 1, BUFFER_BYTES + 4), TOO_LONG),
        (StageLink, (77, 1, 1, 0), f"it sends word 77 of seat 1, {ITS_WORDS}"),
        (StageLink, (TAKEN, 0, 1, 0), f"it sends word {TAKEN} of seat 0, {ITS_WORDS}"),
    ],
)
def test_a_link_that_breaks_says_why(kind: type[Link], words: tuple[int, ...], reason: str) -> None:
    ended: SimpleQueue[str] = SimpleQueue()
    with linked(kind, ended.put) as (_, other):
        other.sendall(struct.pack(f"<{len(words)}I", *words))
        other.shutdown(socket.SHUT_WR)
        assert ended.get(timeout=PATIENCE_S) == reason


@pytest.mark.parametrize(("kind", "head"), [(Link, ()), (StageLink, (SENT, 0))])
def test_a_part_is_sent_as_it_is_behind_its_counter(
    monkeypatch: pytest.MonkeyPatch, kind: type[Link], head: tuple[int, ...]
) -> None:
    expected = struct.pack(f"<{len(head) + 2}I", *head, 1, 3) + b"abc"
    with linked(kind, lambda reason: None) as (region, other):

        def fence() -> None:
            region.buffer(0, 1)[:3] = np.frombuffer(b"abc", np.uint8)

        monkeypatch.setattr(futex, "fence", fence)
        region.part_bytes(0, 1)[0] = 3
        region.word(0, Word.ARRIVED)[0] = 1
        assert other.recv(len(expected), socket.MSG_WAITALL) == expected


@pytest.mark.parametrize(("kind", "head"), [(Link, ()), (StageLink, (SENT, 1))])
def test_a_part_that_comes_is_counted_behind_its_bytes(
    monkeypatch: pytest.MonkeyPatch, kind: type[Link], head: tuple[int, ...]
) -> None:
    seen: list[tuple[int, int, bytes]] = []
    with linked(kind, lambda reason: None) as (region, other):
        arrived = region.word(1, Word.ARRIVED)

        def fence() -> None:
            size, part = region.part_bytes(1, 1), region.buffer(1, 1)
            seen.append((int(arrived[0]), int(size[0]), part[:3].tobytes()))

        monkeypatch.setattr(futex, "fence", fence)
        other.sendall(struct.pack(f"<{len(head) + 2}I", *head, 1, 3) + b"abc")
        wait_until(lambda: arrived[0] == 1)
        assert seen == [(0, 3, b"abc")]
