"""Memory that GPUs read from each other, against a stand-in for CuPy: which calls are made, and in
which order. Whether sums are right is shown on the emulator, that CUDA likes it nowhere."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import ConfigError, RankLostError
from vllmx_cuda.device import cupy_device, nccl, peers
from vllmx_cuda.device.cupy_device import CupyDevice
from vllmx_cuda.device.nccl import NcclRanks
from vllmx_cuda.device.peers import CudaIpc, UnreachableError
from vllmx_cuda.device.ranks import Share, Ties
from vllmx_cuda.kernel_specs import DTYPES, KERNELS
from vllmx_cuda.kernel_specs.ranks import MAX_RANKS, parts_at
from vllmx_cuda.program.one_shot import OneShot

from .cupy_fakes import CUDARuntimeError
from .test_cuda_nccl import STREAM, Alone, fake_nccl

SUMMED = Ties(sums=1024, item=2)


class Three(Alone):
    """Ranks that all vote alike."""

    def all_reduce(self, x: Any) -> Any:
        return 3 * x


@pytest.fixture
def joined(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[CupyDevice, NcclRanks]:
    """A rank whose trial went well, which a stand-in cannot show."""
    monkeypatch.delenv(peers.SWITCH, raising=False)
    monkeypatch.setattr(cupy_device, "load_nccl", lambda: fake_nccl(log))
    monkeypatch.setattr(peers, "_try", lambda device, found: log.append("trial"))
    monkeypatch.setattr(Alone, "abort_word", ctypes.c_uint32(0))
    return device, device.join(Three(1), SUMMED)


def test_memory_is_cleared_before_others_open_it(
    joined: tuple[CupyDevice, NcclRanks], log: list[Any]
) -> None:
    """And the kernel of the trial is compiled before anybody waits for it."""
    names = ("malloc", "memset", "device synchronize", "handle", "open", "load", "trial")
    calls = [one for one in log if (one[0] if isinstance(one, tuple) else one) in names]
    size = 2 << 20
    assert [one if one[0] != "load" else "load" for one in calls] == [
        ("malloc", size),
        ("memset", 0, size),
        "device synchronize",
        "handle",
        "load",
        ("open", 64),
        ("open", 64),
        "trial",
    ]
    found = joined[1].peers
    assert found is not None
    table = np.ctypeslib.as_array((ctypes.c_uint64 * 3).from_address(found.table.address))
    assert table.tolist() == [found.own.address] * 3  # the others say what this one says
    assert (found.rank, found.num_ranks, found.ended) == (1, 3, False)


def test_small_sums_stand_among_others_in_a_capture(
    joined: tuple[CupyDevice, NcclRanks], log: list[Any]
) -> None:
    """On the stream that is captured, between products and calls of NCCL."""
    device, ranks = joined
    assert ranks.peers is not None
    sums = OneShot(device, ranks.peers, "bf16")
    scale = KERNELS["scale"].variant(VX_DTYPE=DTYPES["bf16"], VX_VEC=1)
    x, y, z, w = (device.empty(1 << 12) for _ in range(4))
    device.prepare([scale, *sums.variants])
    log.clear()

    def enqueue() -> None:
        device.launch(scale, {"count": 6}, [x, y, 6, 2.0])
        sums.sum(2, x, y)
        sums.norm(2, y, x, w, z, 1e-5)
        ranks.all_reduce(z, z, 1 << 20, "bf16")

    device.capture(enqueue)
    calls = [one[0] if isinstance(one, tuple) else one for one in log]
    assert calls == [
        "stream",
        "begin capture",
        "launched",
        "launched",
        "launched",
        "allReduce",
        "end capture",
        "upload graph",
    ]
    assert [one[2:] for one in log[3:5]] == [((2, 1, 1), (64, 1, 1), 0, STREAM)] * 2


@pytest.mark.parametrize("what", ["no peer access", "no handles", "another rank says no"])
def test_nccl_makes_all_sums_where_memory_is_not_to_be_had(
    what: str,
    device: CupyDevice,
    log: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(address: int) -> bytes:
        raise CUDARuntimeError("cudaErrorNotSupported: operation not supported")

    class Refused(Three):
        def all_reduce(self, x: Any) -> Any:
            return 2 * x if what == "another rank says no" else 3 * x

        def all_gather(self, x: Any, widths: Any) -> Any:
            other = x.copy()
            if what == "no peer access" and x.shape == (1, 3):
                other[0, 1] = 7
            return np.hstack([x, other, x])

    monkeypatch.setattr(cupy_device, "load_nccl", lambda: fake_nccl(log))
    if what == "no handles":
        monkeypatch.setattr(device._runtime, "ipcGetMemHandle", refuse)
    ranks = device.join(Refused(0), SUMMED)
    assert ranks.peers is None
    reasons = {
        "no peer access": "GPU 1 cannot read the memory of GPU 7",
        "no handles": "cudaErrorNotSupported",
        "another rank says no": "another rank could not share memory",
    }
    assert f"go through NCCL: {reasons[what]}" in caplog.text.replace(
        "GPU memory cannot be shared: ", ""
    )
    ranks.all_reduce(device.empty(16), device.empty(16), 4, "bf16")


def test_whoever_has_nothing_to_sum_shares_nothing(
    device: CupyDevice, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy_device, "load_nccl", lambda: fake_nccl(log))
    assert device.join(Three(0), Ties()).peers is None
    assert not [one for one in log if one[0] == "malloc"]


def test_an_abort_ends_the_waits_of_kernels(
    joined: tuple[CupyDevice, NcclRanks], log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs first, for what NCCL has behind them in the stream would wait for them."""
    _, ranks = joined
    assert ranks.peers is not None
    monkeypatch.setattr(nccl, "time", SimpleNamespace(sleep=lambda seconds: None))
    Alone.abort_word.value = 1
    log.clear()
    with pytest.raises(RankLostError, match="the other ranks have ended"):
        ranks.wait(lambda: False)
    assert ranks.peers.ended
    assert log == [("abort",)]


def test_a_sum_that_waited_for_too_long_ends_the_group(
    joined: tuple[CupyDevice, NcclRanks], log: list[Any]
) -> None:
    """Also what comes behind it in the stream, which nobody else would end."""
    _, ranks = joined
    assert ranks.peers is not None
    ranks.peers.end()
    log.clear()
    for is_over in (False, True):
        with pytest.raises(RankLostError, match="did not take part in a sum"):
            ranks.wait(lambda over=is_over: over)
    ranks.close()
    assert log == [("abort",)] * 3


@pytest.mark.parametrize(("width", "item"), [(1024, 2), (4096, 2), (8192, 4), (33, 2), (1, 4)])
def test_rows_that_are_shared_are_less_than_half_a_mebibyte(width: int, item: int) -> None:
    share = Share.of(width, item, 132)
    assert 0 < share.blocks * width * item < 512 << 10
    assert share.slot_bytes % 256 == 0
    assert share.slot_bytes >= width * item
    assert share.num_bytes == parts_at(share.blocks) + 2 * share.blocks * share.slot_bytes
    assert Share.of(width, item, 1).blocks <= 16
    assert parts_at(1) >= 4 * (1 + MAX_RANKS)


def test_rows_that_no_share_holds() -> None:
    assert Share.of(512 << 10, 2, 132).blocks == 0


def test_what_the_switch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv(peers.SWITCH, value)
        assert peers.is_wanted() == wanted
    monkeypatch.setenv(peers.SWITCH, "no")
    with pytest.raises(ConfigError, match="VLLMX_CUDA_ONE_SHOT=no: set it to 1 or 0"):
        peers.is_wanted()


def test_a_handle_that_cuda_refuses(device: CupyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: bytes) -> int:
        raise CUDARuntimeError("cudaErrorMapBufferObjectFailed")

    monkeypatch.setattr(device._runtime, "ipcOpenMemHandle", refuse)
    with pytest.raises(UnreachableError, match="cudaErrorMapBufferObjectFailed"):
        CudaIpc(device._runtime, 0).open(bytes(64))
