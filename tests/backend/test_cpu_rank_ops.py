"""Sums and parts of ranks in native code, each rank with two threads, in more pieces than one."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure

import numpy as np
import pytest
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
    """What a rank comes to: `turns` gathers and sums behind each other."""
    random = np.random.default_rng(rank)
    part = random.standard_normal((ROWS, WIDTHS[rank]), np.float32)
    x = random.standard_normal((ROWS, SUM_WIDTH), np.float32)
    gathered = np.zeros((ROWS, sum(WIDTHS)), np.float32)
    total = np.zeros_like(x)
    meeting, widths = (
        ranks_of(SharedMemoryCommunicator(region, rank)),
        (ctypes.c_int32 * 3)(*WIDTHS),
    )
    arguments: dict[str, Structure] = {
        "all_gather": VxAllGather(
            meeting, part.ctypes.data, gathered.ctypes.data, ctypes.addressof(widths)
        ),
        "all_reduce": VxAllReduce(meeting, x.ctypes.data, total.ctypes.data, SUM_WIDTH),
    }
    isa = choose_isa()
    calls = [Call(name, isa.op(name, type(one)), one) for name, one in arguments.items()] * turns
    tape, job = make_tape(calls), VxJob(step=VxStep(T=ROWS, R=1, L=1))
    job.records, job.num_records = tape.records, len(calls)
    team = Team(2)
    team.run(job)
    team.close()
    return gathered, total


@pytest.mark.parametrize("bridged", [0, 1])
def test_all_ranks_have_all_parts_and_the_same_sums(bridged: int) -> None:
    region = Region.create(3)
    for rank in range(3):
        region.bridged(rank)[0] = bridged
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: run(region, rank, 2), range(3)))
    randoms = [np.random.default_rng(rank) for rank in range(3)]
    parts = [
        random.standard_normal((ROWS, width), np.float32)
        for random, width in zip(randoms, WIDTHS, strict=True)
    ]
    first, second, third = (r.standard_normal((ROWS, SUM_WIDTH), np.float32) for r in randoms)
    for gathered, total in found:
        np.testing.assert_array_equal(gathered, np.concatenate(parts, axis=1))
        np.testing.assert_array_equal(total, (first + second) + third)
    region.close()
