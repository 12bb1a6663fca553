"""What the torch backend does beyond the conformance suite: devices, dtypes, layouts, refusals, and
that a step runs on its device without a look at any value."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.arrays import NUMPY
from vllmx_core.backend import LoadOptions, free_memory
from vllmx_core.cache.capacity import CachePlan
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.plan import LogitEdits, TokenCounts
from vllmx_core.sampling import gumbel_noise
from vllmx_core.weights.part import Layout, StoredPart, WeightPart, WeightSource
from vllmx_core.weights.tensor import RawTensor
from vllmx_testing.harness import PAGE, VOCAB, all_logprobs
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.step_checks import decoder
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel, tiny_decoder

torch = pytest.importorskip("torch", reason="vllmx-torch runs on torch")
pytest.importorskip("vllmx_torch")

from vllmx_torch.arrays import TORCH  # noqa: E402
from vllmx_torch.backend import TorchBackend  # noqa: E402
from vllmx_torch.device import DEVICE_VARIABLE, available_devices, choose_device  # noqa: E402
from vllmx_torch.kv_cache import allocate, plan_kv  # noqa: E402
from vllmx_torch.loaded import TorchLoadedModel  # noqa: E402
from vllmx_torch.weights import LinearWeight  # noqa: E402

LIMITS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")


def load(model: SyntheticModel, source: WeightSource, **options: Any) -> TorchLoadedModel:
    return TorchBackend().load(model, source, LoadOptions(**(LIMITS | options)))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_cache_takes_the_dtype_of_the_checkpoint(dtype: str) -> None:
    model, source = decoder()
    loaded = load(replace(model, shape=replace(model.shape, dtype=dtype)), source)
    assert loaded.info.kv_cache_dtype == dtype
    assert loaded.info.device == "cpu (1 threads)"
    loaded.close()


class TestDevice:
    def test_the_best_one_without_a_wish(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(DEVICE_VARIABLE)
        assert str(choose_device()) == available_devices()[0]
        assert available_devices()[-1] == "cpu"

    @pytest.mark.parametrize("wanted", ["tpu", "cuda:99", "cpu:1"])
    def test_an_unknown_one_is_refused(self, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
        monkeypatch.setenv(DEVICE_VARIABLE, wanted)
        with pytest.raises(ConfigError, match=rf"{DEVICE_VARIABLE}={wanted} .*cpu"):
            load(*decoder())
        assert (
            f"{DEVICE_VARIABLE}={wanted} is not a device" in TorchBackend().environment()["device"]
        )

    def test_gpus_are_found_by_kind_and_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        assert available_devices()[:2] == ["cuda:0", "cuda:1"]
        for wanted, found in (("", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
            monkeypatch.setenv(DEVICE_VARIABLE, wanted)
            assert str(choose_device()) == found


def test_a_step_never_looks_at_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on torch's meta device have shapes alone: a step that asked for a value, or that
    mixed devices, would fail, as it would stop a GPU from running ahead."""
    monkeypatch.setattr("vllmx_torch.backend.choose_device", lambda: torch.device("meta"))
    loaded = load(*decoder(dtype="bf16"), dtype="bf16")
    first = make_plan([Row(list(range(18)), 0, [0, 1], "all"), Row([3], 0, [2])], PAGE)
    loaded.step(first, sampling_rows(19, temperature=0.8, top_p=0.9, min_p=0.1, num_logprobs=25))
    start, ids, seen = (np.array(a, np.int32) for a in ([0, 2, 3], [4, 5, 4], [1, 0, 2]))
    counts = TokenCounts(start, ids, seen, pending=np.array([True, False]))
    edits = LogitEdits(
        np.array([0, 0, 1], np.int32), np.array([7], np.int32), np.ones(1, np.float32)
    )
    rows = sampling_rows(
        2,
        temperature=1.0,
        top_k=3,
        counts=counts,
        edits=edits,
        repetition_penalty=1.2,
        masks=np.ones((1, 1), np.uint32),
        mask_index=np.array([-1, 0], np.int32),
    )
    loaded.step(make_plan([Row([-18], 18, [0, 1]), Row([-19], 1, [2])], PAGE), rows)
    assert loaded._last_ids.device.type == "meta"
    assert loaded._last_ids.shape == (2,)


def test_noise_is_that_of_every_backend() -> None:
    seeds = np.array([0, 1, (1 << 64) - 1, 0x123456789ABCDEF0], np.uint64)
    positions = np.array([0, 5, (1 << 31) - 1, 77], np.int32)
    for size in (1, 131, 4099):
        x = np.zeros((4, size), np.float32)
        found = gumbel_noise(TORCH, torch.from_numpy(x), seeds, positions).numpy()
        expected = gumbel_noise(NUMPY, x, seeds, positions)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


class Int8Source:
    """Matrices are stored as int8 with one factor, as a quantisation would have them."""

    def __init__(self, source: ArraySource) -> None:
        self._source = source

    def names(self) -> Any:
        return self._source.names()

    def part(self, name: str) -> WeightPart:
        part = self._source.part(name)
        if len(part.shape) == 1:
            return part
        codes = np.rint(part.dequantize() * 32).clip(-127, 127).astype(np.int8)
        raw = RawTensor(name, "i8", part.shape, codes.reshape(-1).view(np.uint8))
        return StoredPart(name, part.shape, OneFactor(8), {"weight": raw})


class OneFactor(Layout):
    kind = "int8"

    def decode(self, part: StoredPart, begin: int, end: int) -> Any:
        return part.buffers["weight"].rows(begin, end).to_f32() / np.float32(32)

    def close(self) -> None:
        self._source.close()


def test_a_quantised_layout_is_dequantised_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, source = decoder()
    quantised = Int8Source(source)
    dense = ArraySource({name: quantised.part(name).dequantize() for name in source.names()})
    plan = make_plan([Row(list(range(18)), 0, [0, 1], "all")], PAGE)
    results = []
    with caplog.at_level(logging.INFO, "vllmx.torch"):
        for checkpoint in (dense, quantised):
            loaded = load(model, checkpoint)
            results.append(all_logprobs(loaded, plan, VOCAB))
            loaded.close()
    np.testing.assert_array_equal(results[0], results[1])
    assert [m for m in caplog.messages if "int8 weights are dequantised at load and take" in m]


def test_tied_embeddings_are_held_once_and_sizes_are_right() -> None:
    sizes = []
    for tied in (False, True):
        builder = Builder(4096)
        builder.embedding("embed", 64)
        if tied:
            builder.tied("head", "embed", 64)
        else:
            builder.linear("head", 4096, 64, biases=[0])
        model = builder.build(
            64,
            lambda ops, w, step: ops.logits(
                ops.embedding(step.tokens, w["embed"]), step.logit_rows, w["head"]
            ),
        )
        loaded = load(model, ArraySource(builder.arrays), dtype="bf16")
        sizes.append(loaded.info.weight_bytes)
        table, head = loaded._weights["embed"], loaded._weights["head"]
        assert isinstance(table, torch.Tensor)
        assert isinstance(head, LinearWeight)
        assert (head.matrix.data_ptr() == table.data_ptr()) == tied
        loaded.close()
    assert sizes == [2 * 4096 * 64 * 2 + 4096 * 2, 4096 * 64 * 2]


class TestCacheSize:
    GIB = 1 << 30

    def plan(
        self, free: int, device: str = "cpu", used: int = 0, kv: str = "f32", **options: Any
    ) -> CachePlan:
        model = tiny_decoder(Builder(VOCAB))
        chosen = LoadOptions(**({"max_model_len": 4096, "max_num_seqs": 8} | options))
        return plan_kv(model.shape, chosen, kv, torch.device(device), free, used)

    def test_a_device_of_its_own_is_filled_and_the_host_is_not(self) -> None:
        many = 1 << 20
        assert self.plan(64 * self.GIB, max_num_seqs=many).num_bytes <= 4 * self.GIB
        assert self.plan(64 * self.GIB, "cuda", max_num_seqs=many).num_bytes > 57 * self.GIB

    @pytest.mark.parametrize("kv", ["f32", "bf16", "int8", "fp8"])
    def test_bytes_are_those_of_the_pages(self, kv: str) -> None:
        plan = self.plan(self.GIB, kv=kv, num_kv_blocks=256)
        pages = allocate(plan, torch.device("cpu"))
        assert plan.num_bytes == sum(page.k.num_bytes + page.v.num_bytes for page in pages)

    @pytest.mark.parametrize(
        ("free", "options", "message"),
        [
            (1 << 30, {"num_kv_blocks": 10}, r"4096.*256 blocks.*--num-kv-blocks to 256"),
            (1 << 30, {"kv_cache_memory_bytes": 1000}, r"raise --kv-cache-memory-bytes to \d+"),
            (3 << 20, {"memory_fraction": 0.1}, "--max-model-len to .*raise --memory-fraction"),
            (1 << 20, {"num_kv_blocks": 10**6}, "num_kv_blocks asks for .*lower --num-kv-blocks"),
        ],
    )
    def test_refusals_name_numbers_and_the_flag(
        self, free: int, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CapacityError, match=message):
            self.plan(free, **options)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllmx_torch.backend.free_bytes", lambda device: 1000)
    model, _ = decoder()
    with pytest.raises(CapacityError, match=r"weights take .* as f32, 1000 bytes .* on cpu"):
        load(model, ArraySource({}))


@pytest.fixture
def _progress(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "loading weights [##############################] 100%\n" in capsys.readouterr().err


@pytest.mark.usefixtures("_progress")
def test_progress_is_shown() -> None:
    load(*decoder(), progress=True).close()


def test_the_memory_that_is_told_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllmx_torch.backend.free_bytes", lambda device: 1000)
    assert free_memory(TorchBackend()) == 1000
