"""Sums over ranks that read each other's memory: emulated devices whose kernels wait for each
other, with the checker of races between ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from vllmx_cuda.kernel_specs import Kernel, Launch
from vllmx_cuda.kernel_specs.types import arguments
from vllmx_testing.cuda.emulator import Emulator, empty
from vllmx_testing.cuda.emulator.peers import PeerGroup

from .cuda_arrays import NUMPY_TYPES, RELATIVE, Array, inout, normal, on_device, wide
from .cuda_peers import Peers, Rank

# Vectors of all widths, one value, and a little more than a block takes
CASES = [
    ("f32", 1, 2), ("f32", 33, 4), ("f32", 130, 2), ("f32", 36, 2), ("f32", 1032, 2),
    ("f16", 1, 4), ("f16", 33, 2), ("f16", 130, 2), ("f16", 1032, 2),
    ("bf16", 1, 2), ("bf16", 33, 2), ("bf16", 130, 4), ("bf16", 1032, 4), ("bf16", 257, 3),
]  # fmt: skip
CALLS = (3, 1, 3, 2, 3)
"""The rows of each call: slots of a block are used in turn, by calls that it takes part in."""
WRAPS = 0xFFFFFFFE


def parts(dtype: str, width: int, ranks: int, rows: int, seed: int) -> list[Array]:
    random = np.random.default_rng(seed)
    return [normal(random, (rows, width), dtype) for _ in range(ranks)]


def total(arrays: list[Array]) -> Array:
    added: Array = np.sum([wide(array) for array in arrays], 0)
    return added


def near(got: Array, want: Array, dtype: str, ranks: int) -> None:
    """Sums of numbers about 1 are rounded once in `dtype`, and in float32 for each rank."""
    limit = RELATIVE[dtype] + ranks * 1e-6
    np.testing.assert_allclose(wide(got), want, rtol=limit, atol=4 * limit)


@pytest.mark.parametrize(("dtype", "width", "ranks"), CASES)
def test_sums_of_all_ranks(emulator: Emulator, dtype: str, width: int, ranks: int) -> None:
    kind = np.dtype(NUMPY_TYPES[dtype])
    calls = CALLS if width < 1000 else (1,)
    given = [parts(dtype, width, ranks, rows, seed) for seed, rows in enumerate(calls)]
    found = [[empty((rows, width), kind) for _ in range(ranks)] for rows in calls]
    peers = Peers(emulator, ranks, 3, width, kind.itemsize, WRAPS)

    def work(rank: Rank) -> None:
        for xs, ys in zip(given, found, strict=True):
            rank.sum(xs[rank.rank], ys[rank.rank], dtype)

    peers.run(work)
    for xs, ys in zip(given, found, strict=True):
        near(ys[0], total(xs), dtype, ranks)
        for other in ys[1:]:
            np.testing.assert_array_equal(other, ys[0])
    assert not any(rank.stop[0] for rank in peers.ranks)


@pytest.mark.parametrize(("dtype", "width", "ranks"), CASES)
def test_norms_of_sums(emulator: Emulator, dtype: str, width: int, ranks: int) -> None:
    """The residual, which all ranks have, takes the sum over, rounded once."""
    kind, random = np.dtype(NUMPY_TYPES[dtype]), np.random.default_rng(width)
    calls = CALLS[:3] if width < 1000 else (1,)
    given = [parts(dtype, width, ranks, rows, seed) for seed, rows in enumerate(calls)]
    before = [wide(normal(random, (rows, width), dtype)) for rows in calls]
    weight = on_device(random.standard_normal(width), np.float32)
    residuals = [[inout(rows, kind) for _ in range(ranks)] for rows in before]
    found = [[empty((rows, width), kind) for _ in range(ranks)] for rows in calls]
    peers = Peers(emulator, ranks, 3, width, kind.itemsize)

    def work(rank: Rank) -> None:
        mine = rank.rank
        for xs, residual, ys in zip(given, residuals, found, strict=True):
            rank.norm(xs[mine], residual[mine], weight, ys[mine], dtype)

    peers.run(work)
    for xs, old, residual, ys in zip(given, before, residuals, found, strict=True):
        near(residual[0], total(xs) + old, dtype, ranks)
        new = wide(residual[0])
        scale = 1 / np.sqrt((new**2).mean(1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(
            wide(ys[0]), new * scale * wide(weight), rtol=2 * RELATIVE[dtype], atol=1e-6
        )
        for same in (residual, ys):
            for other in same[1:]:
                np.testing.assert_array_equal(other, same[0])


def test_a_sum_may_take_the_place_of_what_is_added(emulator: Emulator) -> None:
    """In rows that are narrower than their slots."""
    xs = [inout(array, np.float32) for array in parts("f32", 36, 2, 3, 1)]
    want = total(xs)
    peers = Peers(emulator, 2, 4, 64, 4)
    peers.run(lambda rank: rank.sum(xs[rank.rank], xs[rank.rank], "f32"))
    near(xs[0], want, "f32", 2)
    np.testing.assert_array_equal(xs[1], xs[0])


def test_a_rank_that_never_comes_ends_the_others(emulator: Emulator) -> None:
    """They leave what they were to compute as it was, and tell their hosts."""
    xs, kind = parts("bf16", 33, 4, 3, 2), NUMPY_TYPES["bf16"]
    ys = [inout(np.full((3, 33), 7), kind) for _ in xs]
    peers = Peers(emulator, 4, 3, 33, 2)
    peers.run(lambda rank: rank.sum(xs[rank.rank], ys[rank.rank], "bf16"), only=3)
    assert [int(rank.stop[0]) for rank in peers.ranks] == [1, 1, 1, 0]
    for y in ys:
        np.testing.assert_array_equal(wide(y), 7)


def test_a_host_ends_the_waits_of_its_rank(emulator: Emulator) -> None:
    """Long before patience ends: each block looks at the host's word now and then."""
    xs = parts("f32", 1, 2, 3, 2)
    ys = [inout(np.zeros((3, 1)), np.float32) for _ in xs]
    peers = Peers(emulator, 2, 3, 1, 4)
    peers.ranks[0].stop[0] = 1
    peers.run(lambda rank: rank.sum(xs[0], ys[0], "f32", patience=1 << 26), only=1)
    np.testing.assert_array_equal(ys[0], 0)


RACE = "race between ranks: rank . (reads|writes) .*, which rank . (wrote|may still read)"
FAULTS = {
    "stored_plainly": RACE,
    "loaded_plainly": RACE,
    "told_before_the_barrier": RACE,
    "read_before_the_barrier": RACE,
    "written_again_at_once": f"{RACE}|Arrays are not equal",  # by who comes first
    "never_told": "deadlock between ranks",
}


def exchange(emulator: Emulator, entry: str) -> None:
    """Launches one of cuda_peer_faults.cu on two ranks. Raises KernelFault, an AssertionError."""
    kernel = Kernel(
        entry=entry,
        source="cuda_peer_faults.cu",
        options={},
        arguments=arguments("inout u8* a, inout u8* b, inout f32* y, i32 rank"),
        sizes=("rows",),
        rule=lambda sizes, options: Launch((1, 1, 1), 64),
    )
    group = PeerGroup(2)
    shared = [inout(np.zeros(2 * 64 * 4 + 8), np.uint8) for _ in range(2)]
    ys = [inout(np.zeros(64), np.float32) for _ in range(2)]
    for each in shared:
        group.share(each)

    def work(rank: int) -> None:
        own = Emulator(
            check=True, order=emulator.order, folder=Path(__file__).parent, peers=(group, rank)
        )
        own.launch(kernel.variant(), {"rows": 1}, [*shared, ys[rank], rank])

    try:
        group.run([partial(work, rank) for rank in range(2)])
    finally:
        group.close()
    for rank, y in enumerate(ys):
        np.testing.assert_array_equal(y, 6 * (64 * (1 - rank) + np.arange(64)[::-1]))


@pytest.mark.parametrize("entry", FAULTS)
def test_faults_between_ranks_are_found(emulator: Emulator, entry: str) -> None:
    with pytest.raises(AssertionError, match=FAULTS[entry]):
        exchange(emulator, entry)


def test_what_is_right_between_ranks_passes(emulator: Emulator) -> None:
    exchange(emulator, "right")
