"""Ranks of GPUs against stand-ins for CuPy and its binding of NCCL: which calls are made, in which
order, and on which stream. Nothing here proves that NCCL likes them."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.communicator import SharedAddresses
from vllmx_core.errors import BackendUnavailableError, ConfigError, RankLostError
from vllmx_cuda.compiler import libraries
from vllmx_cuda.device import cupy_device, nccl
from vllmx_cuda.device.cupy_device import CupyDevice
from vllmx_cuda.device.driver import DEVICE_VARIABLE, DeviceFacts, DriverFacts, choose_device
from vllmx_cuda.device.nccl import NcclRanks
from vllmx_cuda.device.ranks import Ties
from vllmx_cuda.kernel_specs import DTYPES, KERNELS
from vllmx_testing.ranks import RankThreads, ThreadCommunicator
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

from .cupy_fakes import CUDARuntimeError

STREAM = 77  # of the stand-in for CuPy


class NcclError(RuntimeError):
    pass


UNIQUE = bytes(range(64, 192))


def fake_nccl(log: list[Any], unique: bytes = UNIQUE) -> Any:
    """`cupy.cuda.nccl`, which notes its calls; test_cuda_nccl_binding.py has the real one."""

    class NcclCommunicator:
        def __init__(self, ranks: int, unique: bytes, rank: int) -> None:
            assert isinstance(unique, bytes)
            log.append(("init", ranks, unique, rank))

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: log.append((name, *arguments))

    return SimpleNamespace(
        NcclCommunicator=NcclCommunicator,
        NcclError=NcclError,
        get_unique_id=lambda: unique,
        groupStart=lambda: log.append("group"),
        groupEnd=lambda: log.append("group end"),
    )


class Alone(ThreadCommunicator):
    """One of three ranks, of which the others say what it says; they share an abort word."""

    abort_word = ctypes.c_uint32(0)

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @property
    def num_ranks(self) -> int:
        return 3

    @property
    def shared(self) -> Any:
        return SharedAddresses(0, 3, ctypes.addressof(self.abort_word), 0, 0, 0, 0, 0)

    def all_gather(self, x: Any, widths: Any) -> Any:
        return np.hstack([x, x, x])

    def send(self, x: Any) -> None:
        pass

    def recv(self, shape: Any, dtype: Any) -> Any:
        host = nccl._host_row()
        return host if shape == host.shape else np.zeros(shape, dtype)


@pytest.fixture
def joined(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[CupyDevice, NcclRanks]:
    monkeypatch.setattr(cupy_device, "load_nccl", lambda: fake_nccl(log))
    monkeypatch.setattr(Alone, "abort_word", ctypes.c_uint32(0))
    return device, device.join(Alone(0), Ties())


def test_all_ranks_have_the_id_of_the_first() -> None:
    logs: list[list[Any]] = [[], [], []]
    ranks = RankThreads(3, lambda end: NcclRanks(fake_nccl(logs[end.rank]), end, STREAM, Ties()))
    assert logs == [[("init", 3, UNIQUE, rank)] for rank in range(3)]
    assert [one.rank for one in ranks.ranks] == [0, 1, 2]
    assert ranks.each(lambda one: one.agree(wanted=True)) == [True] * 3
    assert ranks.each(lambda one: one.agree(wanted=one.rank > 0)) == [False] * 3
    ranks.close()


def test_ranks_on_two_hosts_are_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter([b"one", b"other"])
    monkeypatch.setattr(nccl, "_host", lambda: next(names))
    log: list[Any] = []

    def make(end: ThreadCommunicator) -> str:
        with pytest.raises(ConfigError, match="on one host: leave out --rank-hosts") as raised:
            NcclRanks(fake_nccl(log), end, STREAM, Ties())
        return raised.value.message

    ranks = RankThreads(2, make)
    assert len(set(ranks.ranks)) == 1
    assert not log
    ranks.close()


def test_calls_between_kernels_in_a_capture(
    joined: tuple[CupyDevice, NcclRanks], log: list[Any]
) -> None:
    """All on the stream that is captured; parts of unequal length in one group."""
    device, ranks = joined
    kernel = KERNELS["scale"].variant(VX_DTYPE=DTYPES["f32"], VX_VEC=1)
    x, y, z = (device.empty(256) for _ in range(3))
    device.prepare([kernel])
    log.clear()

    def enqueue() -> None:
        device.launch(kernel, {"count": 6}, [x, y, 6, 2.0])
        ranks.all_reduce(y, x, 6, "bf16")
        ranks.all_gather(x, z, [4, 3, 5], "f32")
        device.launch(kernel, {"count": 6}, [z, y, 6, 2.0])

    graph = device.capture(enqueue)
    calls = [entry[0] if entry[0] == "launched" else entry for entry in log]
    assert calls == [
        "stream",
        "begin capture",
        "launched",
        ("allReduce", y.address, x.address, 6, 9, 0, STREAM),
        "group",
        ("broadcast", x.address, z.address, 4, 7, 0, STREAM),
        ("broadcast", z.address + 16, z.address + 16, 3, 7, 1, STREAM),
        ("broadcast", z.address + 28, z.address + 28, 5, 7, 2, STREAM),
        "group end",
        "launched",
        "end capture",
        "upload graph",
    ]
    log.clear()
    graph.launch()
    assert log == ["launch graph"]


def test_stages_and_exchanges_in_a_capture(device: CupyDevice, log: list[Any]) -> None:
    """The rank between two stages is the second of the pair before it, and the first of the one
    behind. What ranks send each other goes in one group, but for what is empty."""
    ties = Ties(exchanges=True, sends=True, receives=True)
    ranks = NcclRanks(fake_nccl(log), Alone(1), STREAM, ties)
    x, y = device.empty(256), device.empty(256)
    log.clear()

    def enqueue() -> None:
        ranks.recv(x, 8, "bf16")
        ranks.all_to_all(x, y, [0, 4, 5], "bf16")
        ranks.send(y, 8, "f32")

    device.capture(enqueue)
    assert log == [
        "stream",
        "begin capture",
        ("recv", x.address, 8, 9, 0, STREAM),
        "group",
        ("recv", y.address, 4, 9, 0, STREAM),
        ("send", x.address, 4, 9, 1, STREAM),
        ("recv", y.address + 8, 4, 9, 1, STREAM),
        ("send", x.address + 8, 5, 9, 2, STREAM),
        ("recv", y.address + 16, 4, 9, 2, STREAM),
        "group end",
        ("send", y.address, 8, 7, 1, STREAM),
        "end capture",
        "upload graph",
    ]


def test_a_device_is_connected_before_its_memory_is_counted(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy_device, "load_nccl", lambda: fake_nccl(log))
    device.join(Alone(0), Ties(meets=False, sends=True))
    names = [entry[0] for entry in log if entry[0] in ("init", "send", "allReduce", "recv")]
    assert names == ["init", "send"]
    device.close()
    assert log.count(("destroy",)) == 1


def stage_ties(rank: int, count: int) -> Ties:
    return Ties(meets=False, sends=rank < count - 1, receives=rank > 0)


def test_neighbouring_stages_are_pairs() -> None:
    logs: list[list[Any]] = [[], [], []]
    ids = [bytes([rank] * 128) for rank in range(3)]

    def make(end: ThreadCommunicator) -> NcclRanks:
        fake = fake_nccl(logs[end.rank], ids[end.rank])
        return NcclRanks(fake, end, STREAM, stage_ties(end.rank, 3))

    ranks = RankThreads(3, make)
    assert logs == [
        [("init", 2, ids[0], 0)],
        [("init", 2, ids[0], 1), ("init", 2, ids[1], 0)],
        [("init", 2, ids[1], 1)],
    ]
    assert ranks.each(lambda one: one.agree(wanted=one._ties.sends)) == [True] * 3
    assert ranks.each(lambda one: one.agree(wanted=one._ties.receives)) == [False] * 3
    ranks.close()


def test_a_stage_on_another_host_is_refused_and_not_waited_for_in_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What makes a pair waits for ever, and no abort word ends it: the first stage goes there when
    the second one has taken its id."""

    def name() -> bytes:
        return threading.current_thread().name.encode()

    monkeypatch.setattr(nccl, "_host", name)
    region, log = Region.create(2, 2), list[Any]()

    def make(end: ThreadCommunicator) -> str:
        meeting = SharedMemoryCommunicator(region, end.rank)
        try:
            NcclRanks(fake_nccl(log), meeting, STREAM, stage_ties(end.rank, 2))
        except (ConfigError, RankLostError) as error:
            region.aborted[0] = 1  # as the process of a rank does that fails
            return f"{type(error).__name__}: {error}"
        return "joined"

    ranks = RankThreads(2, make)
    assert ranks.ranks[0] == "RankLostError: the other ranks have ended"
    assert "must be on one host: leave out --rank-hosts" in ranks.ranks[1]
    assert not log
    ranks.close()
    region.close()


def test_who_waits_for_a_rank_that_has_gone_is_told(
    joined: tuple[CupyDevice, NcclRanks], log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of such a call would never end, and a wait in CUDA could not be left."""
    device, _ = joined
    event = device.event()
    looks = iter([False, False, True])
    device._runtime.eventQuery = lambda event: 600

    def look(seconds: float) -> None:
        if next(looks):
            Alone.abort_word.value = 1

    monkeypatch.setattr(nccl, "time", SimpleNamespace(sleep=look))
    log.clear()
    with pytest.raises(RankLostError, match="the other ranks have ended"):
        event.wait()
    assert log == [("abort",)]
    device._runtime.eventQuery = lambda event: 0
    log.clear()
    device.close()
    assert ("abort",) in log
    assert ("destroy",) not in log


def test_a_gpu_that_fails_ends_the_wait(joined: tuple[CupyDevice, NcclRanks]) -> None:
    """An event of a lost GPU is neither over nor pending: the query answers its error."""
    device, _ = joined
    event = device.event()
    device._runtime.eventQuery = lambda event: 700

    def refuse() -> None:
        raise CUDARuntimeError("cudaErrorIllegalAddress")

    event.event.synchronize = refuse
    with pytest.raises(CUDARuntimeError):
        event.wait()


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_an_end_that_hangs_in_nccl_is_left(
    joined: tuple[CupyDevice, NcclRanks], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL does while a captured graph has its calls."""
    monkeypatch.setattr(nccl, "_END_S", 0.01)
    device, ranks = joined
    hangs = threading.Event()
    setattr(ranks._group, how, hangs.wait)
    if how == "abort":
        Alone.abort_word.value = 1
        device._runtime.eventQuery = lambda event: 600
        with pytest.raises(RankLostError, match="the other ranks have ended"):
            device.event().wait()
    else:
        ranks.close()
    hangs.set()


def test_graphs_are_dropped_before_the_group_ends(
    joined: tuple[CupyDevice, NcclRanks], log: list[Any]
) -> None:
    """Also one that a traceback holds: NCCL waits for its end."""
    device, _ = joined
    held = device.capture(lambda: None)
    weakref.finalize(held.graph, log.append, "graph dropped")
    log.clear()
    device.close()
    assert log.index("graph dropped") < log.index(("destroy",))


def test_a_device_leaves_the_group_once(
    joined: tuple[CupyDevice, NcclRanks], log: list[Any]
) -> None:
    _, ranks = joined
    ranks.close()
    ranks.close()
    assert log[-1] == ("destroy",)
    assert log.count(("destroy",)) == 1


def test_what_nccl_refuses(joined: tuple[CupyDevice, NcclRanks]) -> None:
    device, ranks = joined

    def refuse(*arguments: Any) -> None:
        raise NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")

    ranks._group.allReduce = refuse
    x = device.empty(16)
    with pytest.raises(RankLostError, match="between ranks failed: NCCL_ERROR_SYSTEM_ERROR"):
        ranks.all_reduce(x, x, 4, "f32")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_wheel_folders", lambda kind, newest: [])
    monkeypatch.setattr(libraries, "_toolkits", list)
    asked: list[str] = []

    def refuse(name: str) -> None:
        asked.append(name)
        raise OSError

    monkeypatch.setattr(libraries.ctypes, "CDLL", refuse)
    with pytest.raises(BackendUnavailableError, match="nvidia-nccl-cu13, or nvidia-nccl-cu12"):
        nccl.load_nccl()
    assert asked == ["libnccl.so.2"]


def test_a_cupy_without_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "open_library", lambda stem: None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(BackendUnavailableError, match="binding of NCCL"):
        nccl.load_nccl()
    unavailable = SimpleNamespace(available=False)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=unavailable))
    with pytest.raises(BackendUnavailableError, match="built without NCCL"):
        nccl.load_nccl()


def test_each_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [(6, 1), (8, 0), (6, 1), (9, 0), (9, 0)]
    gpus = tuple(DeviceFacts(n, f"GPU {n}", kind, 1 << 30) for n, kind in enumerate(kinds))
    facts = DriverFacts((13, 0), gpus)
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert [choose_device(facts, rank).ordinal for rank in range(3)] == [1, 3, 4]
    monkeypatch.setenv(DEVICE_VARIABLE, "3")
    assert [choose_device(facts, rank).ordinal for rank in range(2)] == [3, 4]
    with pytest.raises(ConfigError, match="lower --tensor-parallel-size to 2"):
        choose_device(facts, 2)
