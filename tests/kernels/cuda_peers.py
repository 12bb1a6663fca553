"""Ranks of emulated devices that share memory, for the tests of one_shot.cu."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_cuda.kernel_specs.ranks import parts_at
from vllmx_testing.cuda.emulator import Emulator, empty
from vllmx_testing.cuda.emulator.peers import PeerGroup

from .cuda_arrays import Array, inout, on_device, options

PATIENCE = 200
Work = Callable[["Rank"], None]


class Rank:
    """One of them.

    Args:
        emulator: like which its own is.
        shares: what each rank shares.
    """

    def __init__(
        self, group: PeerGroup, rank: int, emulator: Emulator, shares: list[Array], sizes: Any
    ) -> None:
        self.rank, self.sizes = rank, sizes
        self.emulator = Emulator(
            check=emulator.check, order=emulator.order, folder=emulator.folder, peers=(group, rank)
        )
        self.table = on_device([share.ctypes.data for share in shares], np.uint64)
        self.stop = inout([0], np.uint32)

    def sum(self, x: Array, y: Array, dtype: str, patience: int = PATIENCE) -> None:
        self._launch("one_shot_sum", dtype, x.shape, [x, y], [], patience)

    def norm(
        self, x: Array, residual: Array, weight: Array, y: Array, dtype: str, eps: float = 1e-5
    ) -> None:
        self._launch("one_shot_norm", dtype, x.shape, [x, residual, weight, y], [eps], PATIENCE)

    def _launch(
        self, entry: str, dtype: str, shape: Any, arrays: Any, more: Any, patience: int
    ) -> None:
        rows, width = shape
        blocks, slot, ranks = self.sizes
        variant = KERNELS[entry].variant(**options(dtype, VX_VEC=vector_width(width, slot)))
        told = [self.table, self.stop, width, *more, blocks, slot, self.rank, ranks, patience]
        sizes = {"rows": rows, "width": width}
        self.emulator.launch(variant, sizes, [*arrays, *told], seed=self.rank)


class Peers:
    """All of them, with so many blocks of `slot` elements each."""

    def __init__(
        self, emulator: Emulator, num_ranks: int, blocks: int, slot: int, item: int, begin: int = 0
    ) -> None:
        self.group = PeerGroup(num_ranks)
        words = 9 * blocks
        self.shares = []
        for _ in range(num_ranks):
            share = empty(parts_at(blocks) + 2 * blocks * slot * item, np.uint8)
            share[: 4 * words].view(np.uint32)[:] = begin
            self.group.share(share)
            self.shares.append(share)
        sizes = blocks, slot, num_ranks
        self.ranks = [
            Rank(self.group, rank, emulator, self.shares, sizes) for rank in range(num_ranks)
        ]

    def run(self, work: Work, only: int | None = None) -> None:
        """`work` of all ranks at once, or of the first `only`; once."""
        try:
            self.group.run([partial(work, rank) for rank in self.ranks[:only]])
        finally:
            self.group.close()
