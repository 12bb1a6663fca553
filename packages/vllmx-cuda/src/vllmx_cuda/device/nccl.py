"""Ranks through NCCL, on the stream of their device. CuPy's wheel has the binding; the library
comes with a wheel of NVIDIA's."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllmx_core.communicator import Communicator
from vllmx_core.errors import BackendUnavailableError, ConfigError, RankLostError

from vllmx_cuda.compiler.libraries import open_library
from vllmx_cuda.device.device import Memory
from vllmx_cuda.device.dtypes import ITEM_BYTES

# nccl.h: ncclDataType_t and ncclRedOp_t; CuPy passes such numbers on, and names no bf16
_TYPES = {"f16": 6, "f32": 7, "bf16": 9}
_SUM = 0
_ID_BYTES = 128
_LOOK_S = 20e-6


def load_nccl() -> Any:
    """CuPy's binding, with NVIDIA's library behind it. Raises BackendUnavailableError."""
    open_library("nccl")  # or the binding would look for it in the system alone
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise BackendUnavailableError(
            f"ranks on GPUs need CuPy's binding of NCCL ({error}): pip install"
            " 'vllmx-cuda[cuda13,nccl13]', or 'vllmx-cuda[cuda12,nccl12]' for CUDA 12"
        ) from error
    if not getattr(nccl, "available", True):
        raise BackendUnavailableError(
            "this CuPy was built without NCCL, which ranks on GPUs need: install it from its"
            " wheels, or leave out --tensor-parallel-size"
        )
    return nccl


def _of_rank_0(communicator: Communicator, found: Sequence[int]) -> tuple[int, ...]:
    """Gathers the id that rank 0 made for the group. Raises ConfigError, on all ranks, where they
    are on several hosts: which of its GPUs a rank has is counted on one."""
    host = np.frombuffer(hashlib.sha256(_host()).digest(), np.int8)
    row = np.concatenate([np.array(found, np.int8), host])[None]
    rows = communicator.all_gather(row, [row.shape[1]] * communicator.num_ranks)
    ids, hosts = np.split(rows.reshape(communicator.num_ranks, -1), [_ID_BYTES], axis=1)
    if (hosts != hosts[0]).any():
        raise ConfigError(
            "ranks of backend 'cuda' must be on one host: leave out --rank-hosts, or choose"
            " --backend cpu",
            param="rank_hosts",
        )
    return tuple(map(int, ids[0]))


def _host() -> bytes:
    """A name that no other machine has."""
    return f"{platform.node()} {uuid.getnode()}".encode()


class NcclRanks:
    """`vllmx_cuda.device.ranks.DeviceRanks`. Made on every rank at once.

    Args:
        nccl: `cupy.cuda.nccl`.
        communicator: of the host, by which ranks find each other and see the group's end.
        stream: address of the device's stream.
    """

    def __init__(self, nccl: Any, communicator: Communicator, stream: int) -> None:
        self._nccl, self._communicator, self._stream = nccl, communicator, stream
        shared = communicator.shared
        self._aborted = None if shared is None else ctypes.c_uint32.from_address(shared.abort)
        found = nccl.get_unique_id() if communicator.rank == 0 else (0,) * _ID_BYTES
        chosen = _of_rank_0(communicator, found)
        self._comm: Any = self._call(
            lambda: nccl.NcclCommunicator(communicator.num_ranks, chosen, communicator.rank)
        )

    @property
    def rank(self) -> int:
        return self._communicator.rank

    def all_reduce(self, x: Memory, y: Memory, count: int, dtype: str) -> None:
        """See `DeviceRanks.all_reduce`."""
        spans = x.address, y.address
        self._call(lambda: self._comm.allReduce(*spans, count, _TYPES[dtype], _SUM, self._stream))

    def all_gather(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        """See `DeviceRanks.all_gather`. One call each, in a group that runs as one: their sizes
        differ, which NCCL's own all-gather has no way to say."""
        self._call(self._nccl.groupStart)
        try:
            begin = y.address
            for root, count in enumerate(counts):
                source = x.address if root == self.rank else begin
                self._broadcast(source, begin, count, dtype, root)
                begin += count * ITEM_BYTES[dtype]
        finally:
            self._call(self._nccl.groupEnd)

    def _broadcast(self, source: int, target: int, count: int, dtype: str, root: int) -> None:
        self._call(
            lambda: self._comm.broadcast(source, target, count, _TYPES[dtype], root, self._stream)
        )

    def agree(self, *, wanted: bool) -> bool:
        """See `DeviceRanks.agree`."""
        votes = self._communicator.all_reduce(np.array([float(wanted)], np.float32))
        return bool(votes[0] == self._communicator.num_ranks)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Waits until `is_over` says so. Raises RankLostError where the others have ended."""
        while not is_over():
            if self._aborted is not None and self._aborted.value:
                self._comm.abort()  # or its kernels would wait for ever, and this process with them
                raise RankLostError("the other ranks have ended")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Leaves the group. May be called twice."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        if self._aborted is not None and self._aborted.value:
            comm.abort()
        else:
            comm.destroy()

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._nccl.NcclError as error:
            raise RankLostError(f"a call between ranks failed: {error}") from error
