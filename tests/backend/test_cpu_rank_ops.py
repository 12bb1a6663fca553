"""Sums and parts of ranks in native code, each rank with two threads, in more pieces than one."""

from __future__ import annotations

import ctypes
import operator
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure

import numpy as np
import pytest
from vllmx_core.communicator import tree_sum
from vllmx_core.plan import F32
from vllmx_cpu.lowering.ranks import VxAllGather, VxAllReduce, ranks_of
from vllmx_cpu.native import Team, choose_isa
from vllmx_cpu.structs import VxJob, VxStep
from vllmx_cpu.tape import Call, make_tape
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import BUFFER_BYTES, Region

WIDTHS = (5000, 4100, 3)
"""Parts of a row: more than a thread takes at once, hardly so, and next to nothing."""
ROWS = 40
SUM_WIDTH = BUFFER_BYTES // (4 * ROWS) + 100


def run(region: Region, rank: int, turns: int) -> tuple[F32, F32]:
    """What a rank comes to: `turns` gathers and sums behind each other, of which each sum adds up
    what the one before came to."""
    part, total = numbers(rank)
    widths = WIDTHS[: region.num_ranks]
    gathered = np.zeros((ROWS, sum(widths)), np.float32)
    meeting = ranks_of(SharedMemoryCommunicator(region, rank))
    own = (ctypes.c_int32 * len(widths))(*widths)
    arguments: dict[str, Structure] = {
        "all_gather": VxAllGather(
            meeting, part.ctypes.data, gathered.ctypes.data, ctypes.addressof(own)
        ),
        "all_reduce": VxAllReduce(meeting, total.ctypes.data, total.ctypes.data, SUM_WIDTH),
    }
    isa = choose_isa()
    calls = [Call(name, isa.op(name, type(one)), one) for name, one in arguments.items()] * turns
    tape, job = make_tape(calls), VxJob(step=VxStep(T=ROWS, R=1, L=1))
    job.records, job.num_records = tape.records, len(calls)
    team = Team(2)
    team.run(job)
    team.close()
    return gathered, total


def run_in_python(region: Region, rank: int, turns: int) -> tuple[F32, F32]:
    """The same by the communicator alone, for backends that have no code of their own for it."""
    part, total = numbers(rank)
    communicator, gathered = SharedMemoryCommunicator(region, rank), part
    for _ in range(turns):
        gathered = communicator.all_gather(part, WIDTHS[: region.num_ranks])
        total = communicator.all_reduce(total)
    return gathered, total


def numbers(rank: int) -> tuple[F32, F32]:
    """A rank's part of rows, and its summand."""
    random = np.random.default_rng(rank)
    part = random.standard_normal((ROWS, WIDTHS[rank]), np.float32)
    return part, random.standard_normal((ROWS, SUM_WIDTH), np.float32)


@pytest.mark.parametrize("bridged", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_all_parts_and_the_same_sums(ranks: int, bridged: int) -> None:
    region, turns = Region.create(ranks), 3
    for rank in range(ranks):
        region.bridged(rank)[0] = bridged
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(lambda rank: run(region, rank, turns), range(ranks)))
    check(found, ranks, turns)
    region.close()


def check(found: list[tuple[F32, F32]], ranks: int, turns: int) -> None:
    """All ranks have what their numbers come to after so many turns."""
    parts, summands = zip(*(numbers(rank) for rank in range(ranks)), strict=True)
    expected = summands[0]
    for summand in summands[1:]:
        expected = expected + summand
    for _ in range(turns - 1):
        expected = tree_sum([expected] * ranks, operator.add)
    for gathered, total in found:
        np.testing.assert_array_equal(gathered, np.concatenate(parts, axis=1))
        np.testing.assert_array_equal(total, expected)


def test_native_code_and_the_communicator_put_parts_in_the_same_places() -> None:
    """Native code sends as long pieces as the communicator where a link is waiting for them."""
    region, turns = Region.create(2), 3
    for rank in range(2):
        region.bridged(rank)[0] = 1
    with ThreadPoolExecutor(2) as pool:
        native = pool.submit(run, region, 0, turns)
        found = [native.result, pool.submit(run_in_python, region, 1, turns).result]
        check([one() for one in found], 2, turns)
    region.close()


def test_two_ranks_write_where_they_have_read() -> None:
    region = Region.create(2)
    read = [region.part(1, count).ctypes.data for count in range(8)]
    written = [region.part(0, count).ctypes.data for count in range(8)]
    assert written[2:] == read[:-2]
    assert len({*read, *written}) == 4, "neighbouring parts of two ranks lie apart"
    assert not set(read[:2]) & set(written[:2])
    region.close()
