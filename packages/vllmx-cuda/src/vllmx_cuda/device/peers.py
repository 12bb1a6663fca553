"""Sets up GPU memory that all ranks of a model can read, for small sums without NCCL.

`one_shot.cu` adds the shared rows in one launch. The driver reports which GPUs support peer access.
Some drivers report it on machines where it does not work, so the ranks first run a trial with known
sums. If the trial fails, NCCL computes all sums.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from vllmx_core.communicator import Communicator
from vllmx_core.errors import ConfigError
from vllmx_core.plan import AnyArray

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.device.ranks import Peers, Share
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant
from vllmx_cuda.kernel_specs.ranks import MAX_RANKS

logger = logging.getLogger("vllmx.cuda")
T = TypeVar("T")

SWITCH = "VLLMX_CUDA_ONE_SHOT"
"""Selects how ranks sum. 0: always NCCL; 1 or unset: small sums through shared memory, if that
works."""
PATIENCE = 1 << 26
"""Polls for another rank before a block gives up: half a minute or more. The hosts notice a dead
rank long before."""
TRIAL_PATIENCE = 1 << 22
_TRIAL_WIDTH = 64
_NAME_BYTES = 64
_UNIT = 2 << 20
"""The driver's allocation unit: a whole one, so that others cannot open unrelated memory."""


class UnreachableError(Exception):
    """A rank cannot read the memory of another one; the message says why."""


class Reach(Protocol):
    """Access to the device memory of other ranks. All methods raise UnreachableError."""

    @property
    def place(self) -> int:
        """Number of the device on its host."""
        ...

    def check(self, place: int) -> None:
        """Checks that this device can read the memory of that one."""
        ...

    def share(self, num_bytes: int) -> tuple[Memory, bytes]:
        """Allocates zeroed memory that others may open. Returns it with its name, at most 64
        bytes."""
        ...

    def open(self, name: bytes) -> int:
        """Returns the local address of another rank's shared memory."""
        ...


class CudaIpc:
    """`vllmx_cuda.device.peers.Reach`.

    Args:
        runtime: `cupy.cuda.runtime`; the GPU `place` must be the thread's device.
    """

    def __init__(self, runtime: Any, place: int) -> None:
        self._runtime = runtime
        self._place = place

    @property
    def place(self) -> int:
        return self._place

    def check(self, place: int) -> None:
        ask = self._runtime.deviceCanAccessPeer
        if place != self._place and not self._call(lambda: ask(self._place, place)):
            raise UnreachableError(
                f"GPU {self._place} cannot read the memory of GPU {place} (nvidia-smi topo -p2p r)"
            )

    def share(self, num_bytes: int) -> tuple[Memory, bytes]:
        """See `Reach.share`. Not from a pool, for a handle opens a whole allocation."""
        size = -(-num_bytes // _UNIT) * _UNIT

        def make() -> tuple[int, bytes]:
            address = int(self._runtime.malloc(size))
            self._runtime.memset(address, 0, size)
            self._runtime.deviceSynchronize()  # before another rank writes there
            return address, bytes(self._runtime.ipcGetMemHandle(address))

        address, name = self._call(make)
        return Memory(address, num_bytes, self._runtime), name

    def open(self, name: bytes) -> int:
        return int(self._call(lambda: self._runtime.ipcOpenMemHandle(name)))

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._runtime.CUDARuntimeError as error:
            raise UnreachableError(f"GPU memory cannot be shared: {error}") from error


def is_wanted() -> bool:
    """Reads `SWITCH`. Raises ConfigError for values other than 0 and 1."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}={value}: set it to 1 or 0, or leave it out", param=SWITCH)
    return value != "0"


def open_peers(
    device: Device,
    communicator: Communicator,
    reach: Reach,
    width: int,
    item: int,
    patience: int = PATIENCE,
) -> Peers | None:
    """Opens shared memory for sums of rows of `width` elements, on all ranks at once. Returns None
    if NCCL must compute them; the log says why.

    Args:
        item: bytes of an element.
    """
    rank, num_ranks = communicator.rank, communicator.num_ranks
    facts = _gather(communicator, [int(is_wanted()), reach.place, device.info.num_processors])
    if not width or num_ranks > MAX_RANKS or not facts[:, 0].all():
        return None
    share = Share.of(width, item, int(facts[:, 2].min()))
    if not share.blocks:
        return None

    def offer() -> tuple[Memory, bytes]:
        for place in facts[:, 1]:
            reach.check(int(place))
        return reach.share(share.num_bytes)

    def opened(names: AnyArray) -> list[int]:
        device.prepare([_trial_kernel()])  # now: the trial does not wait long for others
        return [
            own.address if other == rank else reach.open(name.tobytes())
            for other, name in enumerate(names)
        ]

    try:
        own, name = _all(communicator, offer)
        names = _gather(communicator, np.frombuffer(name.ljust(_NAME_BYTES, b"\0"), np.int8))
        addresses = _all(communicator, lambda: opened(names))
        peers = _peers(device, own, addresses, share, communicator, patience)
        _all(communicator, lambda: _try(device, peers))
    except UnreachableError as error:
        logger.warning("all sums between ranks go through NCCL: %s", error)
        return None
    logger.info("sums of up to %d rows go through memory that all ranks read", share.blocks)
    return peers


def _gather(communicator: Communicator, row: Sequence[int] | AnyArray) -> AnyArray:
    """Returns the rows of all ranks, (ranks, N)."""
    mine = np.atleast_2d(np.asarray(row, getattr(row, "dtype", np.int32)))
    ranks = communicator.num_ranks
    rows: AnyArray = communicator.all_gather(mine, [mine.shape[1]] * ranks)
    return rows.reshape(ranks, -1)


def _all(communicator: Communicator, call: Callable[[], T]) -> T:
    """Returns the result of `call` on this rank. Raises UnreachableError on all ranks if one of
    them fails."""
    problem = UnreachableError("another rank could not share memory")
    found: list[T] = []
    try:
        found.append(call())
    except UnreachableError as error:
        problem = error
    votes = communicator.all_reduce(np.array([float(bool(found))], np.float32))
    if votes[0] != communicator.num_ranks:
        raise problem
    return found[0]


def _peers(
    device: Device,
    own: Memory,
    addresses: Sequence[int],
    share: Share,
    communicator: Communicator,
    patience: int,
) -> Peers:
    staged, stop = device.pinned(8 * len(addresses)), device.pinned(4)
    staged.view(np.uint64)[:] = addresses
    stop[:] = 0
    table = device.empty(staged.nbytes)
    device.upload(table, staged)
    device.synchronize()
    word = Memory(stop.ctypes.data, 4, stop)
    ranks = communicator.rank, communicator.num_ranks
    return Peers(own, table, word, share, *ranks, patience)


def _trial_kernel() -> Variant:
    return KERNELS["one_shot_sum"].variant(VX_DTYPE=DTYPES["f32"], VX_VEC=1)


def _try(device: Device, peers: Peers) -> None:
    """Adds numbers with known sums, in each block and through both buffers. Raises UnreachableError
    if a result is wrong."""
    width = min(_TRIAL_WIDTH, peers.share.slot_bytes // 4)
    shape = peers.share.blocks, width
    numbers = np.arange(shape[0] * width, dtype=np.float32).reshape(shape)
    staged = device.pinned(numbers.nbytes)
    x, y = device.empty(numbers.nbytes), device.empty(numbers.nbytes)
    told: tuple[Memory | int, ...]
    told = peers.table, peers.stop, width, *peers.arguments(4, TRIAL_PATIENCE)
    sizes = {"rows": shape[0], "width": width}
    for call in range(1, 4):
        staged.view(np.float32)[:] = (numbers * call + peers.rank).reshape(-1)
        device.upload(x, staged)
        device.launch(_trial_kernel(), sizes, (x, y, *told))
        device.download(staged, y)
        device.synchronize()
        want = numbers * call * peers.num_ranks + sum(range(peers.num_ranks))
        if peers.ended or (staged.view(np.float32).reshape(shape) != want).any():
            peers.stop.owner[:] = 0
            raise UnreachableError("memory of other GPUs is open to this one, but sums are wrong")
