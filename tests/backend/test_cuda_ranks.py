"""Ranks of the CUDA backend without a GPU: an emulated device each, on threads of one process."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.errors import RankLostError
from vllmx_core.model import Model
from vllmx_core.plan import F32, StepResult
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.part import WeightSource
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device import peers
from vllmx_cuda.device.ranks import Ties
from vllmx_cuda.kernel_specs import Variant
from vllmx_testing.cuda import emulated_device
from vllmx_testing.cuda.emulated_device import EmulatedDevice, EmulatedRanks, EmulatedReach
from vllmx_testing.cuda.emulator import Emulator
from vllmx_testing.cuda.emulator.peers import PeerGroup
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.ranks import RankThreads, ThreadCommunicator

from tests.integration.image_models import FAMILIES, save
from tests.integration.test_image_models import REGISTRY, plans, prompt

from .cuda_models import MODEL, Quantised, _can_emulate, fp8_rows, without_embedding
from .test_cpu_rank_formats import CONFIG as WIDE
from .test_cpu_rank_formats import Blocks
from .test_cuda_images import answers
from .test_cuda_quantised import gguf_as
from .test_cuda_w4 import FORMS as INTEGERS
from .test_cuda_w4 import quantised
from .test_sharding import CONFIGS, TEXT, of

__all__ = ["_can_emulate"]  # a fixture
EMULATOR = Emulator()
"""One for all ranks: their kernels run one at a time, and wait for none of the others'."""


class Watched(EmulatedDevice):
    """Keeps its end among the ranks, and counts the launches in which they meet."""

    def join(self, communicator: Any, ties: Ties) -> EmulatedRanks:
        self.ranks = super().join(communicator, ties)
        self.met = Counter[str]()
        return self.ranks

    def launch(self, variant: Variant, sizes: Any, arguments: Any) -> None:
        if variant.kernel.meets and hasattr(self, "met"):
            self.met[variant.kernel.entry] += 1
        super().launch(variant, sizes, arguments)


Rank = tuple[LoadedModel, Watched]
BY_TOKEN = {"whole_experts": True, "in_place_ranks": 1}
"""What makes few ranks add the answers of experts as many do."""


def options(dtype: str, **more: Any) -> LoadOptions:
    return LoadOptions(
        dtype=dtype,
        max_model_len=64,
        num_kv_blocks=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        encoder_cache_bytes=0,
        **more,
    )


def load(model: Model, source: WeightSource, given: LoadOptions, **how: Any) -> Rank:
    device = Watched(emulator=EMULATOR, **how)
    return CudaBackend(lambda: device, tune_s=0, capture_s=0).load(model, source, given), device


def ranks_of(
    model: Model,
    source: WeightSource,
    count: int,
    dtype: str,
    *,
    shares: dict[str, Any] | None = None,
    **how: Any,
) -> RankThreads[Rank]:
    def make(end: ThreadCommunicator) -> Rank:
        mine = sharded(model, source, 64, end.rank, count, **shares or {})
        return load(mine, source, options(dtype, communicator=end), **how)

    return RankThreads(count, make)


def logits(loaded: LoadedModel, ids: list[int], position: int) -> F32:
    """(T, V) of a step."""
    whole = np.arange(len(ids), dtype=np.int32)
    rows = sampling_rows(len(ids), num_logprobs=[0] * len(ids), whole=whole)
    plan = make_plan([Row(ids, position, [3], "all")], 16)
    result: StepResult = loaded.step(plan, rows).result()
    assert result.logits is not None
    return result.logits


def text(rank: Rank) -> F32:
    """(T, V) of a prompt and of tokens behind it, of which the graphs' second uses are replays."""
    behind = [([token], 9 + at) for at, token in enumerate(TEXT[9:12])]
    steps = [(TEXT[:9], 0), *behind]
    return np.concatenate([logits(rank[0], *step) for step in steps])


@pytest.mark.parametrize(
    ("name", "count", "dtype", "how"),
    [
        ("2 kv heads, tied", 2, "f32", {}),
        ("2 kv heads, tied", 4, "bf16", {}),
        ("biases everywhere", 2, "f32", {"deferred": True}),
        ("experts with biases and sinks", 2, "f32", {}),
        ("experts with biases and sinks", 2, "f32", {"shares": {"whole_experts": True}}),
        ("experts with biases and sinks", 4, "f32", {"shares": BY_TOKEN, "deferred": True}),
        ("8 kv heads", 3, "f32", {}),
    ],
)
def test_ranks_together_equal_one(name: str, count: int, dtype: str, how: dict[str, Any]) -> None:
    model, source = of(CONFIGS[name])
    expected = text(load(model, source, options(dtype)))
    ranks = ranks_of(model, source, count, dtype, **how)
    found = ranks.each(text)
    near = 2e-5 if dtype == "f32" else 0.05
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=near * np.abs(expected).max())
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])  # or they would draw different ids
    ranks.each(lambda rank: rank[0].close())
    ranks.close()


def test_each_rank_has_the_tower_whole(tmp_path: Path) -> None:
    """An image goes through in parts, with a step between them; both ranks have transformers'
    logits, to the last bit alike."""
    family = FAMILIES["qwen3_vl"]
    oracle = family.make()
    checkpoint = open_checkpoint(REGISTRY, save(oracle, tmp_path))
    model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    images = [family.image(2, 4, 3)]
    ids = prompt(images)[0]
    tower, steps = plans(model, ids, images, [4, 3, 40])

    def seen(rank: Rank) -> F32:
        for begin, end in ((0.0, 0.4), (0.4, 1.0)):
            rank[0].encode(tower, begin, end)  # type: ignore[attr-defined]  # it sees
            answers(rank[0], steps[:1])
        return answers(rank[0], steps)

    ranks = ranks_of(model, checkpoint.weights, 2, "f32")
    found, other = ranks.each(seen)
    wanted = family.logits(oracle, ids, images)
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 2e-5
    np.testing.assert_array_equal(other, found)
    ranks.each(lambda rank: rank[0].close())
    ranks.close()


STORED = {
    "Q8_0": lambda: Quantised(gguf_as({}, "Q8_0")),
    "FP8 rows": lambda: Quantised(without_embedding(fp8_rows)),
    "integers of 4 bits": lambda: quantised(*INTEGERS["compressed-tensors"]),
}


@pytest.mark.parametrize("stored", STORED)
def test_quantised_matrices_are_cut_as_they_are(
    stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Matrices are cut in groups and blocks of 32 columns, of which each rank has one of its heads'
    part."""
    check_cut(MODEL, STORED[stored](), caplog)


def test_blocks_of_fp8_are_cut_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of 128 by 128, as DeepSeek and Qwen write them."""
    model, _ = of(WIDE)
    check_cut(model, Blocks(model, "fp8"), caplog)


def check_cut(model: Model, source: WeightSource, caplog: pytest.LogCaptureFixture) -> None:
    loaded, device = load(model, source, options("bf16"))
    expected, whole = text((loaded, device)), loaded.info.weight_bytes
    with caplog.at_level(logging.INFO, "vllmx"):
        ranks = ranks_of(model, source, 2, "bf16")
    assert not [r for r in caplog.records if "dequantised" in r.getMessage()]
    found = ranks.each(text)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=0.05 * np.abs(expected).max())
    np.testing.assert_array_equal(found[1], found[0])
    assert ranks.each(lambda rank: rank[0].info.weight_bytes < 0.6 * whole) == [True] * 2
    ranks.each(lambda rank: rank[0].close())
    ranks.close()


def test_calls_lie_in_the_captured_step() -> None:
    """Calls come in the order of the layers, once as they are and once captured; a replay asks
    nothing."""
    model, source = of(CONFIGS["biases everywhere"])
    ranks = ranks_of(model, source, 2, "f32")

    def work(rank: Rank) -> list[str]:
        loaded, device = rank
        logits(loaded, [7], 0)
        asked = device.ranks.asked.copy()
        before = device.calls.copy()
        logits(loaded, [3], 1)
        assert device.ranks.asked == asked, "a replay enqueues its graph alone"
        assert (device.calls - before)["graph"] == 2
        assert not (device.calls - before)["all_reduce"]
        return asked

    first, second = ranks.each(work)
    step = [*["all_reduce 64 f32"] * 5, "all_gather [30, 31] f32"]
    assert first == second == [*step, *step]
    ranks.each(lambda rank: rank[0].close())
    ranks.close()


def test_ranks_capture_the_same_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose time is over first would leave the others waiting in a step that it never makes."""
    model, source = of(CONFIGS["biases everywhere"])

    def make(end: ThreadCommunicator) -> Rank:
        mine, device = sharded(model, source, 64, end.rank, 2), Watched(emulator=EMULATOR)
        backend = CudaBackend(lambda: device, tune_s=0, capture_s=1e9 if end.rank else 0.0)
        return backend.load(mine, source, options("f32", communicator=end)), device

    ranks = RankThreads(2, make)
    assert ranks.each(lambda rank: rank[1].calls["graph"]) == [0, 0]
    ranks.each(lambda rank: rank[0].close())
    ranks.close()


def test_rows_go_to_the_ranks_that_add_them() -> None:
    """One token of four ranks is the last one's to add; who adds none is sent nothing. All of it
    lies in the captured step."""
    model, source = of(CONFIGS["experts with biases and sinks"])
    ranks = ranks_of(model, source, 4, "f32", shares=BY_TOKEN)

    def work(rank: Rank) -> list[str]:
        loaded, device = rank
        logits(loaded, [7], 0)
        asked = device.ranks.asked.copy()
        logits(loaded, [3], 1)
        assert device.ranks.asked == asked, "a replay enqueues its graph alone"
        device.ranks.asked.clear()
        logits(loaded, [5, 6, 1, 8, 2], 2)
        return [*asked, *device.ranks.asked]

    for found in ranks.each(work):
        exchange = ["all_to_all [0, 0, 0, 64] f32", "all_gather [0, 0, 0, 64] f32"]
        layers = ["all_reduce 64 f32", *exchange] * 2
        step = ["all_reduce 64 f32", *layers, "all_gather [15, 15, 15, 16] f32"]
        assert found[: 2 * len(step)] == [*step, *step]
        padded = "all_to_all [128, 128, 128, 128] f32"
        assert found.count(padded) == 2 * 2, "launched, then captured"
    ranks.each(lambda rank: rank[0].close())
    ranks.close()


def near(found: list[F32], expected: F32, part: float) -> None:
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=part * np.abs(expected).max())
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize(
    ("name", "count", "dtype", "how"),
    [
        ("2 kv heads, tied", 2, "f32", {}),
        ("biases everywhere", 4, "bf16", {"deferred": True}),
    ],
)
def test_small_sums_go_through_memory_that_ranks_share(
    name: str, count: int, dtype: str, how: dict[str, Any]
) -> None:
    """That of the embedding by itself, those of layers with the norms behind them; in captured
    steps, too."""
    model, source = of(CONFIGS[name])
    expected = text(load(model, source, options(dtype)))
    group = PeerGroup(count, endless=True)
    ranks = ranks_of(model, source, count, dtype, peers=group, **how)
    near(ranks.each(text), expected, 2e-5 if dtype == "f32" else 0.05)
    for _, device in ranks.ranks:
        assert device.ranks.peers is not None
        assert not [call for call in device.ranks.asked if "all_reduce" in call]
        assert device.met["one_shot_norm"] == 4 * device.met["one_shot_sum"] > 0
    ranks.each(lambda rank: rank[0].close())
    ranks.close()
    group.close()


def test_large_sums_go_through_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a prompt are large; behind small ones a norm writes codes in a launch of its own."""
    monkeypatch.setattr("vllmx_cuda.device.ranks.MOST_BYTES", 4 * 64 * 2 + 1)
    source = STORED["FP8 rows"]()
    expected = text(load(MODEL, source, options("bf16")))
    group = PeerGroup(2, endless=True)
    ranks = ranks_of(MODEL, source, 2, "bf16", peers=group)
    near(ranks.each(text), expected, 0.05)
    for _, device in ranks.ranks:
        sums = [call for call in device.ranks.asked if "all_reduce" in call]
        assert set(sums) == {f"all_reduce {9 * MODEL.shape.hidden_size} bf16"}
        assert device.met["one_shot_sum"]
    ranks.each(lambda rank: rank[0].close())
    ranks.close()
    group.close()


def test_a_rank_that_stays_away_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_device, "PATIENCE", 20)
    model, source = of(CONFIGS["biases everywhere"])
    group = PeerGroup(2, endless=True)
    ranks = ranks_of(model, source, 2, "f32", peers=group)

    def alone() -> None:
        with pytest.raises(RankLostError, match="did not take part in a sum"):
            logits(ranks.ranks[0][0], [7, 3], 0)

    ranks.all([alone, lambda: None])
    ranks.each(lambda rank: rank[0].close())
    ranks.close()
    group.close()


@pytest.mark.parametrize("what", ["cannot read", "reads what is not there", "switched off"])
def test_sums_go_through_nccl_where_memory_cannot_be_shared(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks find that out together, though one alone sees it."""

    def refuse(reach: EmulatedReach, name: bytes) -> int:
        if what == "cannot read":
            raise peers.UnreachableError("GPU 0 cannot read the memory of GPU 1")
        return nowhere.ctypes.data

    nowhere = np.zeros(1 << 20, np.uint8)
    if what == "switched off":
        monkeypatch.setenv(peers.SWITCH, "0")
    else:
        monkeypatch.setattr(EmulatedReach, "open", refuse)
    monkeypatch.setattr(peers, "TRIAL_PATIENCE", 20)
    model, source = of(CONFIGS["biases everywhere"])
    group = PeerGroup(2, endless=True)
    with caplog.at_level(logging.INFO, "vllmx"):
        ranks = ranks_of(model, source, 2, "f32", peers=group)
    for _, device in ranks.ranks:
        assert device.ranks.peers is None
    ranks.each(lambda rank: logits(rank[0], [7], 0))
    asked = ranks.ranks[0][1].ranks.asked
    assert asked.count("all_reduce 64 f32") == 5 * asked.count("all_gather [30, 31] f32")
    said = [r.getMessage() for r in caplog.records if "through NCCL" in r.getMessage()]
    reason = {"cannot read": "cannot read the memory", "switched off": "never"}
    assert len(said) == (0 if what == "switched off" else 2)
    assert all(reason.get(what, "sums are wrong") in line for line in said)
    ranks.each(lambda rank: rank[0].close())
    ranks.close()
    group.close()
