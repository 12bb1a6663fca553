"""Ranks of the torch backend: threads in one process, whose tensors go through the communicator of
the host or through a process group of torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from vllmx_core.backend import LoadOptions
from vllmx_core.communicator import ArrayRanks
from vllmx_core.errors import ConfigError, RankLostError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.part import WeightSource
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.ranks import RankThreads, ThreadCommunicator
from vllmx_torch import device, ranks
from vllmx_torch.backend import TorchBackend
from vllmx_torch.loaded import TorchLoadedModel
from vllmx_torch.plugin import vllmx_backends
from vllmx_torch.ranks import ProcessGroupRanks, host_ranks

from .test_sharding import CONFIGS, TEXT, of


def options(**more: object) -> LoadOptions:
    return LoadOptions(
        dtype="f32",
        max_model_len=64,
        num_kv_blocks=4,
        max_num_seqs=2,
        num_threads=1,
        **more,  # type: ignore[arg-type]
    )


def chunks(loaded: TorchLoadedModel) -> F32:
    """(T, V) logits of the text in two steps."""
    found = []
    for begin, end in ((0, 9), (9, len(TEXT))):
        whole = np.arange(end - begin, dtype=np.int32)
        rows = sampling_rows(end - begin, num_logprobs=[0] * (end - begin), whole=whole)
        plan = make_plan([Row(TEXT[begin:end], begin, [3], "all")], 16)
        logits = loaded.step(plan, rows).result().logits
        assert logits is not None
        found.append(logits)
    return np.concatenate(found)


def check(model: Model, source: WeightSource, count: int) -> None:
    expected = chunks(TorchBackend().load(model, source, options()))

    def load(end: ThreadCommunicator) -> TorchLoadedModel:
        mine = sharded(model, source, 64, end.rank, count)
        return TorchBackend().load(mine, source, options(communicator=end))

    threads = RankThreads(count, load)
    found = threads.each(chunks)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])  # or they would draw different ids
    threads.close()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "name", ["2 kv heads, tied", "1 kv head", "biases everywhere", "experts with biases and sinks"]
)
def test_ranks_together_equal_one(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cpu")
    check(*of(CONFIGS[name]), count)


@pytest.mark.parametrize("kind", ["host", "gloo"])
def test_sums_and_parts_of_three_ranks(kind: str) -> None:
    """The process group is tested, too, which CUDA devices use with NCCL in the place of gloo."""
    widths, parts = [2, 5, 3], [torch.full((4, n), float(n)) for n in (2, 5, 3)]

    def make(end: ThreadCommunicator) -> tuple[int, ArrayRanks[torch.Tensor]]:
        return end.rank, host_ranks(
            end, torch.device("cpu")
        ) if kind == "host" else ProcessGroupRanks.meet(end, kind)

    def work(one: tuple[int, ArrayRanks[torch.Tensor]]) -> Sequence[torch.Tensor]:
        rank, end = one
        total = end.all_reduce(torch.arange(6.0).view(2, 3) * (rank + 1))
        return total, end.all_gather(parts[rank], widths)

    threads = RankThreads(3, make)
    for total, gathered in threads.each(work):
        assert torch.equal(total, torch.arange(6.0).view(2, 3) * 6)
        assert torch.equal(gathered, torch.cat(parts, dim=1))
    threads.close()


def test_who_waits_for_a_rank_that_has_gone_is_told() -> None:
    gone = threading.Event()
    threads = RankThreads(2, lambda end: [end.rank, ProcessGroupRanks.meet(end, "gloo")])

    def work(one: list[object]) -> str:
        rank, end = one
        if rank == 1:
            del end
            one.pop()  # its connections close
            gone.set()
            return ""
        gone.wait()
        assert isinstance(end, ProcessGroupRanks)
        with pytest.raises(RankLostError) as raised:
            end.all_reduce(torch.ones(4))
        return raised.value.message

    assert threads.each(work)[0].startswith("a call between ranks failed: ")
    threads.close()


def test_process_groups_are_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's folder is not found on the other host, which rank 1 of these two stands for."""
    own = ranks._folder_of_rank_0
    monkeypatch.setattr(
        ranks, "_folder_of_rank_0", lambda end, folder: own(end, folder) + "x" * end.rank
    )
    with pytest.raises(ConfigError, match="must be on one host: leave out --rank-hosts"):
        RankThreads(2, lambda end: ProcessGroupRanks.meet(end, "gloo"))


def test_each_rank_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_count", lambda kind: 4)
    assert device.device_of_rank(torch.device("cuda:1"), 2) == torch.device("cuda:3")
    assert device.device_of_rank(torch.device("cpu"), 7) == torch.device("cpu")
    with pytest.raises(ConfigError, match="lower --tensor-parallel-size to 3"):
        device.device_of_rank(torch.device("cuda:1"), 3)


def test_memory_is_divided_where_ranks_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that have numbers are a rank's own, with all of their memory."""
    (spec,) = vllmx_backends()
    monkeypatch.setattr(device, "available_devices", lambda: ["cuda:0", "cuda:1", "mps", "cpu"])
    monkeypatch.delenv(device.DEVICE_VARIABLE, raising=False)
    assert spec.has_own_devices()
    for shared in ("mps", "cpu"):
        monkeypatch.setenv(device.DEVICE_VARIABLE, shared)
        assert not spec.has_own_devices()
