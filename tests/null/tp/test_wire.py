"""The way between stages: arrays and messages through two buffers, and through links."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from vllmx_core.errors import RankLostError
from vllmx_core.plan import LogprobRows, StepResult
from vllmx_tp.communicator import Incoming, Outgoing, SharedMemoryCommunicator
from vllmx_tp.link import StageLink
from vllmx_tp.pipeline import decode_result, encode_result
from vllmx_tp.region import BUFFER_BYTES, Region

from tests.waiting import PATIENCE_S

from .hosted import end_all

LONG = np.arange(2 * BUFFER_BYTES // 4 + 77, dtype=np.int32).reshape(1, -1)
"""More than two buffers hold."""


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Does something on a thread, which must come to an end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def said(end: Outgoing) -> None:
    for count in range(5):
        end.send(np.full((3, count + 1), count, np.float64))
    end.send(LONG)
    end.send_message(b"")
    end.send_message(LONG.tobytes())
    end.send_message(b"short")


def check_heard(end: Incoming) -> None:
    for count in range(5):
        found = end.recv((3, count + 1), np.float64)
        np.testing.assert_array_equal(found, np.full((3, count + 1), count))
    np.testing.assert_array_equal(end.recv(LONG.shape, np.int32), LONG)
    assert [end.recv_message() for _ in range(3)] == [b"", LONG.tobytes(), b"short"]


def test_arrays_and_messages_in_their_order() -> None:
    region = Region.create(2, 2)
    for rank in (0, 1):
        with beside(lambda rank=rank: said(Outgoing(region, rank))):
            check_heard(Incoming(region, 1 - rank))
    region.close()


def test_counts_go_round() -> None:
    region = Region.create(2, 2)
    outgoing, incoming = Outgoing(region, 0), Incoming(region, 1)
    for end in (outgoing, incoming):
        end._count = 0xFFFFFFFE
    outgoing._sent[0] = outgoing._taken[0] = 0xFFFFFFFE
    with beside(lambda: said(outgoing)):
        check_heard(incoming)
    region.close()


def test_who_waits_is_told_of_the_end() -> None:
    region = Region.create(2, 2)
    region.aborted[0] = 1
    with pytest.raises(RankLostError):
        Incoming(region, 1).recv((1,), np.int32)
    outgoing = Outgoing(region, 0)
    outgoing.send(LONG[:, : BUFFER_BYTES // 2])  # both buffers are full
    with pytest.raises(RankLostError):
        outgoing.send(LONG[:, :1])
    region.close()


def test_pieces_go_round_three_hosts() -> None:
    """Each has a region of its own; what the second and the third say to each other goes through
    the first."""
    regions = [Region.create(3, 3) for _ in range(3)]
    broken: list[str] = []
    links = []
    for host in (1, 2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        others = [rank for rank in range(3) if rank != host]
        for region, end, own, far in (
            (regions[0], ours, others, [host]),
            (regions[host], theirs, [host], others),
        ):
            links.append(StageLink(region, end, own, far, broken.append))
    for rank in range(3):
        after = (rank + 1) % 3
        with beside(lambda rank=rank: said(Outgoing(regions[rank], rank))):
            check_heard(Incoming(regions[after], after))
    assert not broken
    end_all(regions, links)


def test_a_seat_has_one_use() -> None:
    """What ranks add and what stages hand on is counted in the same words."""
    for ranks, stages in ((2, 1), (2, 2)):
        region = Region.create(ranks, stages)
        end = SharedMemoryCommunicator(region, 0)
        assert (end.shared.stages is None) == (stages == 1)
        with pytest.raises(AssertionError, match=r"a region of one stage|a rank alone"):
            end.send(LONG) if stages == 1 else end.all_reduce(LONG)
        region.close()


def test_ranks_of_stages_add_and_hand_on_at_once() -> None:
    """Two stages of three ranks: what ranks of a stage add and what they hand on lie apart."""
    region = Region.create(6, 2)
    sums: dict[int, list[float]] = {}

    def run(rank: int) -> None:
        end, stage = SharedMemoryCommunicator(region, rank), rank // 3
        assert (end.rank, end.num_ranks) == (rank % 3, 3)
        sums[rank] = []
        for turn in range(5):
            given = np.full(4, 10.0**stage * (rank % 3 + 1) + turn)
            if stage:
                given += end.recv((4,), np.float64) * 1000
            total = end.all_reduce(given)
            sums[rank].append(float(total[0]))
            if not stage:
                end.send(given)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    first = [6.0 + 3 * turn for turn in range(5)]
    second = [60 + 3 * turn + 1000 * one for turn, one in enumerate(first)]
    assert [sums[rank] for rank in range(6)] == 3 * [first] + 3 * [second]
    region.close()


def test_pieces_of_several_ranks_go_to_another_host_and_back() -> None:
    """Each host has a stage of two ranks, and rank 0's place is told of results."""
    regions, broken = [Region.create(4, 2) for _ in range(2)], list[str]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    links = [
        StageLink(regions[0], ours, [0, 1], [2, 3], broken.append),
        StageLink(regions[1], theirs, [2, 3], [0, 1], broken.append),
    ]
    for rank in (0, 1, 2):
        after = (rank + 2) % 4
        with beside(lambda rank=rank: said(Outgoing(regions[rank // 2], rank))):
            check_heard(Incoming(regions[after // 2], after))
    assert not broken
    for region, link in zip(regions, links, strict=True):
        region.aborted[0] = 1
        link.close()
        region.close()


def test_a_result_is_what_it_was() -> None:
    logprobs = LogprobRows(
        np.array([-1, -2], np.float32),
        np.array([1, 9], np.int32),
        np.array([[3, 4], [5, -1]], np.int32),
        np.array([[-1, -2], [-3, -np.inf]], np.float32),
    )
    given = StepResult(np.array([7, -1], np.int32), logprobs, np.ones((1, 5), np.float32))
    found = decode_result(encode_result(given), 0.25)
    np.testing.assert_array_equal(found.ids, given.ids)
    assert found.logprobs is not None
    for name in LogprobRows.__struct_fields__:
        np.testing.assert_array_equal(getattr(found.logprobs, name), getattr(logprobs, name))
    np.testing.assert_array_equal(found.logits, given.logits)
    assert found.elapsed_s == 0.25
    vectors = StepResult(np.zeros(0, np.int32), vectors=np.ones((2, 3), np.float32))
    found = decode_result(encode_result(vectors), 0.0)
    np.testing.assert_array_equal(found.vectors, vectors.vectors)
    assert found.logprobs is None
