"""Joins ranks in a group of MLX (`mx.distributed`): a ring of TCP connections, or jaccl.

MLX asks nobody who he is: a ring takes the first connection that comes. So ranks meet here in
phases, by the communicator that they have anyway. They bind ports of the loopback (or the addresses
of `MLX_HOSTFILE`, where somebody has set it), try whether each reaches its neighbour, let MLX
connect, and then compare the ends of the connections: what one has on its right must be what the
next one has on its left, or somebody else sits there, and the group is not used. A phase that fails
on one rank ends the matter on all, and they meet through the host.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from vllmx_core.communicator import Communicator

from vllmx_metal.ranks import GroupRanks, MetalHostRanks, MetalRanks

logger = logging.getLogger("vllmx.metal")

SWITCH = "VLLMX_METAL_RING"
_SINCE = (0, 32, 4)
"""The MLX whose ring ends with an error when a rank is gone; earlier ones wait for ever."""
_PROCESS = int.from_bytes(os.urandom(7))
_PATIENCE_S = 2.0
_HEAD_START_S = 0.2
_NUMBERS = 4
"""The most numbers that a rank tells in a phase."""

Address = tuple[str, int]
_LOOPBACK: Address = ("127.0.0.1", 0)
"""The system chooses the port."""
_formed: set[str] = set()
"""Kinds of groups that this process has formed: MLX keeps the first one of a kind."""


class _NoGroupError(Exception):
    """Why these ranks do not become a group."""


def meet(communicator: Communicator | None) -> MetalRanks | None:
    """Makes a rank's end. All ranks of a model call it at once, in MLX's thread."""
    if communicator is None:
        return None
    if communicator.num_ranks == 1 or communicator.shared is None:  # stages; ranks of a test
        return MetalHostRanks(communicator)
    try:
        ranks = _joined(communicator)
    except _NoGroupError as error:
        logger.info("sums between ranks go through the host, not through MLX's ring: %s", error)
        return MetalHostRanks(communicator)
    logger.info("sums between ranks go through %s", ranks.over)
    return ranks


def _joined(communicator: Communicator) -> GroupRanks:
    """Raises _NoGroupError, on all ranks if on one."""
    phases = _Phases(communicator)
    processes = phases.together(lambda: [_PROCESS, _is_possible(), _jaccl_is_wanted()])
    if len(set(processes[:, 0].tolist())) < communicator.num_ranks:
        raise _NoGroupError("the ranks are threads of one process")
    if processes[:, 2].all():
        return GroupRanks(_jaccl(communicator, phases), communicator, "jaccl")
    return GroupRanks(_ring(communicator, phases), communicator, "ring")


def _is_possible() -> int:
    if os.environ.get(SWITCH) == "0":
        raise _NoGroupError(f"{SWITCH} is 0")
    if not mx.distributed.is_available("ring"):
        raise _NoGroupError("this build of MLX has none")
    if tuple(map(int, version("mlx").split(".")[:3])) < _SINCE:
        raise _NoGroupError(f"MLX {version('mlx')} would wait for ever for a rank that has died")
    if _formed:
        raise _NoGroupError("this process has had one, and MLX makes no second")
    return 1


class _Phases:
    """Steps that all ranks do together, and give up together."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def together(self, work: Callable[[], Sequence[int]]) -> npt.NDArray[np.int64]:
        """(ranks, numbers) that `work` gave each rank. Raises _NoGroupError on all if one did."""
        row, why = np.zeros((1, 1 + _NUMBERS), np.int64), None
        try:
            numbers = work()
            row[0, : 1 + len(numbers)] = 1, *numbers
        except (OSError, RuntimeError, ValueError, _NoGroupError) as error:
            why = str(error)
        ranks = self._communicator.num_ranks
        rows = self._communicator.all_gather(row, [row.size] * ranks).reshape(ranks, -1)
        if why is not None:
            raise _NoGroupError(why)
        (failed,) = np.nonzero(rows[:, 0] == 0)
        if len(failed):
            raise _NoGroupError(f"rank {failed[0]} cannot; its log says why")
        return rows[:, 1:]


# --- the ring -------------------------------------------------------------------------------------
def _ring(communicator: Communicator, phases: _Phases) -> mx.distributed.Group:
    rank, ranks = communicator.rank, communicator.num_ranks
    with ExitStack() as open_sockets:
        addresses = _reserve(rank, ranks, phases, open_sockets)
        _try_neighbours(rank, addresses, phases)
        _formed.add("ring")
        found: list[mx.distributed.Group] = []

        def connect() -> Sequence[int]:
            if rank == ranks - 1:  # it connects first, and MLX sleeps a second if that fails
                _await_listener(addresses[0])
            with _told(addresses, rank):
                found.append(mx.distributed.init(strict=True, backend="ring"))
            return _ends(addresses[rank], addresses[(rank + 1) % ranks])

        ends = phases.together(connect)
    if not np.array_equal(np.roll(ends[:, 2:4], 1, axis=0), ends[:, 0:2]):
        logger.warning("somebody else is in the ring of MLX's ranks: it is not used")
        raise _NoGroupError("its connections do not end at the ranks")
    return found[0]


def _reserve(rank: int, ranks: int, phases: _Phases, open_sockets: ExitStack) -> list[Address]:
    """Everyone's address; this rank's is bound, so that nobody else takes it, and not heard."""
    wanted = _wanted(ranks)

    def bind() -> Sequence[int]:
        if wanted[0] == _LOOPBACK and ranks > (os.cpu_count() or 1):
            raise _NoGroupError("its threads never sleep, and there are more ranks than cores")
        one = open_sockets.enter_context(_bound(wanted[rank]))
        return [one.getsockname()[1], zlib.crc32(repr(wanted).encode())]

    found = phases.together(bind)
    if len(set(found[:, 1].tolist())) > 1:
        raise _NoGroupError("MLX_HOSTFILE differs between ranks")
    return [(host, int(port)) for (host, _), port in zip(wanted, found[:, 0], strict=True)]


def _wanted(ranks: int) -> list[Address]:
    """The address at which each rank is to listen: ports of the loopback that the system chooses,
    unless a file of addresses says otherwise, as MLX reads it."""
    file = os.environ.get("MLX_HOSTFILE")
    if file is None:
        return [_LOOPBACK] * ranks
    with suppress(OSError, ValueError, IndexError, TypeError, AttributeError):
        named = [one[0].rsplit(":", 1) for one in json.loads(Path(file).read_text())]
        if len(named) == ranks:
            return [(host, int(port)) for host, port in named]
    logger.warning("MLX_HOSTFILE has no addresses of %d ranks: it is not used", ranks)
    return [_LOOPBACK] * ranks


def _bound(address: Address) -> socket.socket:
    """A socket as MLX makes them, which may share its port with others of this user."""
    one = socket.socket()
    one.settimeout(_PATIENCE_S)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one


def _try_neighbours(rank: int, addresses: Sequence[Address], phases: _Phases) -> None:
    """Each calls the next one and says who he is: where ranks are on other hosts, or something
    between them lets nobody through, MLX would wait for ever."""
    with _bound(addresses[rank]) as own, socket.socket() as neighbour:
        phases.together(lambda: _listen(own))

        def call() -> Sequence[int]:
            neighbour.settimeout(_PATIENCE_S)
            neighbour.connect(addresses[(rank + 1) % len(addresses)])
            neighbour.sendall(_PROCESS.to_bytes(8))
            return [_PROCESS]

        names = phases.together(call)[:, 0].tolist()

        def hear() -> Sequence[int]:
            with own.accept()[0] as caller:
                caller.settimeout(_PATIENCE_S)
                if int.from_bytes(caller.recv(8, socket.MSG_WAITALL)) != names[rank - 1]:
                    raise _NoGroupError("a stranger called in a rank's place")
            return []

        phases.together(hear)
    phases.together(list)  # nobody listens any more when MLX connects


def _listen(one: socket.socket) -> Sequence[int]:
    one.listen(1)
    return []


def _await_listener(address: Address) -> None:
    """Returns when rank 0 listens, as far as this can be seen, or after a while."""
    table, port = Path("/proc/net/tcp"), f":{address[1]:04X}"
    if not table.exists() or not address[0].startswith("127."):
        time.sleep(_HEAD_START_S)
        return
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        lines = [line.split() for line in table.read_text().splitlines()[1:]]
        if any(line[1].endswith(port) and line[3] == "0A" for line in lines):
            return
        time.sleep(0.002)


@contextmanager
def _told(addresses: Sequence[Address], rank: int) -> Iterator[None]:
    """The variables by which MLX learns who is where."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[f"{host}:{port}"] for host, port in addresses], file)
        file.flush()
        with _environment({"MLX_HOSTFILE": file.name, "MLX_RANK": str(rank)}):
            yield


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _ends(own: Address, right: Address) -> list[int]:
    """The other end of the connection that this rank took, and this end of the one that it made, as
    numbers. Raises _NoGroupError unless there is one of each."""
    left_ends, right_ends = [], []
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family != socket.AF_INET or one.type != socket.SOCK_STREAM:
                continue
            here, there = one.getsockname(), one.getpeername()  # none where it is not connected
            if here[1] == own[1]:
                left_ends.append(there)
            elif there[1] == right[1]:
                right_ends.append(here)
    if len(left_ends) != 1 or len(right_ends) != 1:
        raise _NoGroupError(f"it has connections {left_ends} and {right_ends}")
    ends = (left_ends[0], right_ends[0])
    return [number for host, port in ends for number in (_number(host), port)]


def _number(host: str) -> int:
    return int.from_bytes(socket.inet_aton(host))


# --- jaccl ----------------------------------------------------------------------------------------
def _jaccl_is_wanted() -> int:
    """1 if MLX can reach others by RDMA here and knows the devices, else 0."""
    return int("MLX_IBV_DEVICES" in os.environ and mx.distributed.is_available("jaccl"))


def _jaccl(communicator: Communicator, phases: _Phases) -> mx.distributed.Group:
    """The devices' addresses go by the communicator, whose other ends are known."""
    rank, ranks = communicator.rank, communicator.num_ranks
    found: list[mx.distributed.Group] = []

    def gather(part: bytes, size: int) -> bytes:
        row = np.frombuffer(part[:size].ljust(size, b"\0"), np.uint8)[None]
        return communicator.all_gather(row, [size] * ranks).tobytes()

    def join() -> Sequence[int]:
        with _environment({"MLX_RANK": str(rank)}):
            found.append(
                mx.distributed.init(
                    strict=True,
                    backend="jaccl",
                    all_gather_factory=lambda rank, size: gather,
                )
            )
        return []

    _formed.add("jaccl")
    phases.together(join)
    return found[0]
