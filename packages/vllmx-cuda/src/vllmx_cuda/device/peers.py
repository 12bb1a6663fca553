"""Memory of the GPUs of a model's ranks that all of them read: small sums without NCCL.

`one_shot.cu` adds up what lies there in one launch. Which GPUs can do that, the driver says; and
since drivers have said so of machines where it did not work, ranks first try it with numbers whose
sums they know. Where it does not work, NCCL makes all sums.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from vllmx_core.communicator import Communicator
from vllmx_core.errors import ConfigError
from vllmx_core.plan import AnyArray

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.device.ranks import Peers, Share
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant
from vllmx_cuda.kernel_specs.one_shot import MAX_RANKS

logger = logging.getLogger("vllmx.cuda")
T = TypeVar("T")

SWITCH = "VLLMX_CUDA_ONE_SHOT"
"""Which way sums go. 0: all by NCCL; 1 or unset: small ones through memory that all ranks read,
where that works."""
PATIENCE = 1 << 26
"""How often a block looks for another rank before it gives up: half a minute or more. A rank that
dies is seen by the hosts long before."""
TRIAL_PATIENCE = 1 << 22
_TRIAL_WIDTH = 64
_NAME_BYTES = 64


class UnreachableError(Exception):
    """Why a rank cannot read the memory of another one."""


class Reach(Protocol):
    """How a rank comes to device memory of others. All raise UnreachableError."""

    @property
    def place(self) -> int:
        """Number of the device on its host."""
        ...

    def check(self, place: int) -> None:
        """Whether memory of that device can be read at all."""
        ...

    def share(self, num_bytes: int) -> tuple[Memory, bytes]:
        """Makes memory of zeros that others may open, and its name, of at most 64 bytes."""
        ...

    def open(self, name: bytes) -> int:
        """The address, here, of what another rank shares."""
        ...


def is_wanted() -> bool:
    """What `SWITCH` says. Raises ConfigError for anything but 0 and 1."""
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
    """Opens memory for sums of rows of so many elements, on all ranks at once. None where NCCL must
    make them, and the log says why.

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
        device.prepare([_trial_kernel()])  # now, for on trial nobody waits long for the others
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
    """(ranks, N): what each rank has."""
    mine = np.atleast_2d(np.asarray(row, getattr(row, "dtype", np.int32)))
    ranks = communicator.num_ranks
    rows: AnyArray = communicator.all_gather(mine, [mine.shape[1]] * ranks)
    return rows.reshape(ranks, -1)


def _all(communicator: Communicator, call: Callable[[], T]) -> T:
    """What the call gives on this rank. Raises UnreachableError on all ranks where it does so on
    one of them."""
    problem = UnreachableError("another rank could not go along")
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
    """Adds numbers whose sums are known, in each block and through both buffers. Raises
    UnreachableError where something else comes out."""
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
