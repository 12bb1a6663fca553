"""Communication between ranks through NCCL, on the stream of their device. CuPy's wheel has the
binding; the library comes from NVIDIA's wheel."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
from vllmx_core.communicator import Communicator
from vllmx_core.errors import BackendUnavailableError, ConfigError, RankLostError
from vllmx_core.plan import AnyArray

from vllmx_cuda.compiler.libraries import open_library
from vllmx_cuda.device.memory import ITEM_BYTES, Memory
from vllmx_cuda.device.ranks import Peers, Ties, agreed

logger = logging.getLogger("vllmx.cuda")

# nccl.h: ncclDataType_t and ncclRedOp_t; CuPy passes such numbers on, and names no bf16
_TYPES = {"f16": 6, "f32": 7, "bf16": 9}
_SUM = 0
_ID_BYTES = 128
_LOOK_S = 20e-6
_END_S = 2.0
"""The most seconds to wait for the end of a group."""
_SENDER, _RECEIVER = 0, 1
"""The ranks of two neighbouring stages."""


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


def _host() -> bytes:
    """A name that no other machine has."""
    return f"{platform.node()} {uuid.getnode()}".encode()


def _host_row() -> AnyArray:
    return np.frombuffer(hashlib.sha256(_host()).digest(), np.int8)[None]


def _refuse_hosts() -> ConfigError:
    return ConfigError(
        "ranks of backend 'cuda' must be on one host: leave out --rank-hosts, or choose"
        " --backend cpu",
        param="rank_hosts",
    )


def _of_rank_0(communicator: Communicator, found: bytes) -> bytes:
    """Gathers the id that rank 0 made for the group. Raises ConfigError, on all ranks, where they
    are on several hosts: which of its GPUs a rank has is counted on one."""
    row = np.concatenate([np.frombuffer(found, np.int8)[None], _host_row()], axis=1)
    rows = communicator.all_gather(row, [row.shape[1]] * communicator.num_ranks)
    ids, hosts = np.split(rows.reshape(communicator.num_ranks, -1), [_ID_BYTES], axis=1)
    if (hosts != hosts[0]).any():
        raise _refuse_hosts()
    return bytes(ids[0])


_NOTHING = np.zeros(1, np.int8)


def _hand_on(communicator: Communicator, made: bytes) -> None:
    """Gives the next stage the id of the pair, and returns when it has taken it, for what makes a
    pair of them cannot be left. The piece behind the next is put down when a piece was taken."""
    communicator.send(_host_row())
    for piece in (np.frombuffer(made, np.int8), _NOTHING, _NOTHING):
        communicator.send(piece)


def _handed(communicator: Communicator) -> bytes:
    """Takes the id that the stage before has made. Raises ConfigError where it is on another host,
    and leaves the rest where it is, which the one before waits for."""
    host = _host_row()
    if (communicator.recv(host.shape, np.int8) != host).any():
        raise _refuse_hosts()
    found = communicator.recv((_ID_BYTES,), np.int8)
    for _ in range(2):
        communicator.recv(_NOTHING.shape, np.int8)
    return bytes(found)


class NcclRanks:
    """`vllmx_cuda.device.ranks.DeviceRanks`. Made on every rank at once. Ranks that meet are one
    group of NCCL, a stage and the one behind it are another of two.

    Args:
        nccl: `cupy.cuda.nccl`.
        communicator: of the host, by which ranks find each other and see the group's end.
        stream: address of the device's stream.
        ties: which calls will be made.
    """

    def __init__(self, nccl: Any, communicator: Communicator, stream: int, ties: Ties) -> None:
        self._nccl, self._communicator, self._stream = nccl, communicator, stream
        self._ties = ties
        shared = communicator.shared
        self._aborted = None if shared is None else ctypes.c_uint32.from_address(shared.abort)
        self._group: Any = None
        self._before: Any = None
        self._behind: Any = None
        self.peers: Peers | None = None
        if ties.meets:
            rank, count = communicator.rank, communicator.num_ranks
            found = nccl.get_unique_id() if rank == 0 else bytes(_ID_BYTES)
            self._group = self._open(count, _of_rank_0(communicator, found), rank)
        if ties.receives:
            self._before = self._open(2, _handed(communicator), _RECEIVER)
        if ties.sends:
            made = nccl.get_unique_id()
            _hand_on(communicator, made)
            self._behind = self._open(2, made, _SENDER)

    def _open(self, count: int, name: bytes, rank: int) -> Any:
        """Returns when all of the group have called it. NCCL has no deadline for that and cannot be
        left meanwhile: a rank that dies between the exchange of the id and this call leaves the
        others here. They are killed with the group, but for rank 0 (docs/scale.md says so). A
        thread of its own, with the device made current there, would let rank 0 go on."""
        return self._call(lambda: self._nccl.NcclCommunicator(count, name, rank))

    @property
    def rank(self) -> int:
        return self._communicator.rank

    def all_reduce(self, x: Memory, y: Memory, count: int, dtype: str) -> None:
        spans = x.address, y.address
        self._call(lambda: self._group.allReduce(*spans, count, _TYPES[dtype], _SUM, self._stream))

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
            lambda: self._group.broadcast(source, target, count, _TYPES[dtype], root, self._stream)
        )

    def all_to_all(self, x: Memory, y: Memory, counts: Sequence[int], dtype: str) -> None:
        """See `DeviceRanks.all_to_all`. Whoever gets nothing is not spoken to."""
        item, mine = ITEM_BYTES[dtype], counts[self.rank]
        begins = [0, *accumulate(counts)]
        self._call(self._nccl.groupStart)
        try:
            for peer, count in enumerate(counts):
                if count:
                    self._send(self._group, x.address + begins[peer] * item, count, dtype, peer)
                if mine:
                    self._recv(self._group, y.address + peer * mine * item, mine, dtype, peer)
        finally:
            self._call(self._nccl.groupEnd)

    def send(self, x: Memory, count: int, dtype: str) -> None:
        self._send(self._behind, x.address, count, dtype, _RECEIVER)

    def recv(self, y: Memory, count: int, dtype: str) -> None:
        self._recv(self._before, y.address, count, dtype, _SENDER)

    def _send(self, comm: Any, source: int, count: int, dtype: str, peer: int) -> None:
        self._call(lambda: comm.send(source, count, _TYPES[dtype], peer, self._stream))

    def _recv(self, comm: Any, target: int, count: int, dtype: str, peer: int) -> None:
        self._call(lambda: comm.recv(target, count, _TYPES[dtype], peer, self._stream))

    def connect(self, first: Memory) -> None:
        """Enqueues a call of every kind that the rank makes, by which NCCL connects it and takes
        its memory; `first` has eight bytes for each rank."""
        ranks = self._communicator.num_ranks
        if self._ties.meets:
            self.all_reduce(first, first, 1, "f32")
        if self._ties.exchanges:
            self.all_to_all(first, first.at(4 * ranks), [1] * ranks, "f32")
        if self._ties.receives:
            self.recv(first, 1, "f32")
        if self._ties.sends:
            self.send(first, 1, "f32")

    def agree(self, *, wanted: bool) -> bool:
        return agreed(self._communicator, self._ties, wanted=wanted)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Waits until `is_over` says so. Raises RankLostError where the others have ended."""
        while not is_over() and not self._lost:
            time.sleep(_LOOK_S)
        peers = self.peers
        if peers is not None and peers.ended:
            self._end("abort")  # or kernels would wait for ever, and this process with them
            peers.check()
        if not is_over():
            if peers is not None:
                peers.end()
            self._end("abort")
            raise RankLostError("the other ranks have ended")

    @property
    def _lost(self) -> bool:
        """True if another rank is lost, according to its process or to a sum of this rank."""
        gave_up = self.peers is not None and self.peers.ended
        return gave_up or (self._aborted is not None and bool(self._aborted.value))

    def close(self) -> None:
        """Leaves the group. May be called twice."""
        self._end("abort" if self._lost else "destroy")
        self._group = self._before = self._behind = None

    def _end(self, how: str) -> None:
        """Calls `how` of each communicator, for at most `_END_S`.

        NCCL returns from `abort` and `destroy` only once the last captured graph with one of its
        calls is gone, and a graph may outlive this call in the step that failed. `destroy` waits
        for the other ranks besides. So a daemon thread calls them, and may be left there: the
        kernels end as soon as `abort` has begun.
        """
        comms = [one for one in (self._group, self._before, self._behind) if one is not None]

        def run() -> None:
            for comm in comms:
                with suppress(self._nccl.NcclError):  # it ends all the same
                    getattr(comm, how)()

        thread = threading.Thread(target=run, name=f"vllmx-nccl-{how}", daemon=True)
        thread.start()
        thread.join(_END_S)
        if thread.is_alive():
            logger.warning("NCCL does not return from %s: going on without it", how)

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._nccl.NcclError as error:
            raise RankLostError(f"a call between ranks failed: {error}") from error
