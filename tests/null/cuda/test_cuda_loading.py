"""The host's part of loading on CUDA: memory plan, weights through small buffers, refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions, free_memory
from vllmx_core.errors import CapacityError, ConfigError, WeightFormatError
from vllmx_core.system.memory import format_bytes
from vllmx_core.weights.part import Layout, StoredPart, WeightPart
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_core.weights.tensor import bf16_to_f32, f32_to_bf16
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.loading.weights import load_weights
from vllmx_cuda.matrices import pieces
from vllmx_cuda.matrices.codes8 import Codes8
from vllmx_cuda.matrices.form import Target
from vllmx_cuda.matrices.matrix import Matrix
from vllmx_cuda.matrices.plan import WeightPlan, plan_weights
from vllmx_cuda.program.planning import load_sizes
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulated_products import array, wide
from vllmx_testing.step_checks import decoder
from vllmx_testing.synthetic import ArraySource, Builder

LIMITS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "f32",
}


def options(**changes: Any) -> LoadOptions:
    return LoadOptions(**(LIMITS | changes))


def planned(specs: Any, tables: Any, source: Any, dtype: str) -> WeightPlan:
    values = sum(table.size for table in tables.values())
    return plan_weights(specs, values, source, Target(dtype, 90), 64)


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice()


@pytest.mark.parametrize("piece_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("stored", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_weights_arrive_rounded_fused_and_tied(
    device: EmulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    stored: Any,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
    builder = Builder(19)
    builder.embedding("embed", 24)
    builder.linear("fused", (5, 9, 3), 24, biases=[0, 2])
    builder.vector("norm", 24, offset=1.0)
    builder.rope("rope", 8, positions=50)
    builder.tied("head", "embed", 24)
    source = ArraySource(builder.arrays, stored)
    plan = planned(builder.specs, builder.tables, source, dtype)
    loaded = load_weights(builder.specs, builder.tables, source, plan, device, device.empty(0))
    held = {name: source.part(name).dequantize() for name in source.names()}

    def rounded(values: Any) -> Any:
        if dtype == "bf16":
            return bf16_to_f32(f32_to_bf16(values))
        return values.astype({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float32)

    embed, head, fused = loaded["embed"], loaded["head"], loaded["fused"]
    assert isinstance(embed, Matrix)
    assert isinstance(head, Matrix)
    assert isinstance(fused, Matrix)
    assert embed.segments is head.segments, "a tied head is held once"
    np.testing.assert_array_equal(
        wide(embed.segments[0].data, dtype).reshape(19, 24), rounded(held["embed.weight"])
    )
    parts = [held[f"fused.{i}.weight"] for i in range(3)]
    np.testing.assert_array_equal(
        wide(fused.segments[0].data, dtype).reshape(17, 24), rounded(np.concatenate(parts))
    )
    bias = np.concatenate([held["fused.0.bias"], np.zeros(9, np.float32), held["fused.2.bias"]])
    assert fused.bias is not None
    assert fused.rounded_bias is not None
    np.testing.assert_array_equal(array(fused.bias, np.float32), bias)
    np.testing.assert_array_equal(wide(fused.rounded_bias, dtype), rounded(bias))
    for name, want in (("norm", held["norm.weight"] + 1), ("rope", builder.tables["rope"])):
        vector = loaded[name]
        assert isinstance(vector, Memory)
        np.testing.assert_array_equal(array(vector, np.float32), want.reshape(-1))
    assert device.allocated_bytes == plan.num_bytes


def test_other_layouts_are_dequantised_by_rows(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 6 * 2)
    asked: list[tuple[int, int]] = []

    class Halved(Layout):
        kind = "halved"

        def decode(self, part: StoredPart, begin: int, end: int) -> Any:
            asked.append((begin, end))
            return part.buffers["weight"].rows(begin, end).to_f32() / 2

    class Halves(ArraySource):
        def part(self, name: str) -> WeightPart:
            return replace(super().part(name), layout=Halved(8))

    values = np.arange(54, dtype=np.float32).reshape(9, 6)
    spec = WeightSpec("w", "linear", (PartSpec("w", 9),), 6)
    source = Halves({"w": values})
    plan = planned([spec], {}, source, "f32")
    loaded = load_weights([spec], {}, source, plan, device, device.empty(0))["w"]
    assert isinstance(loaded, Matrix)
    np.testing.assert_array_equal(
        array(loaded.segments[0].data, np.float32), (values / 2).reshape(-1)
    )
    assert sorted(asked) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]
    assert "halved weights are dequantised at load" in caplog.text


def test_a_missing_tensor_is_found_before_anything_is_read(device: EmulatedDevice) -> None:
    model, source = decoder()
    arrays = {name: source.part(name).dequantize() for name in source.names()}
    del arrays["1.down.0.weight"]
    with pytest.raises(WeightFormatError, match=r"1\.down\.0\.weight"):
        CudaBackend(lambda: device).load(model, ArraySource(arrays), options())
    assert device.calls["launch"] == 0


def test_what_is_planned_is_what_is_taken(device: EmulatedDevice) -> None:
    model, source = decoder()
    before = device.allocated_bytes
    many = options(memory_fraction=0.3, max_num_seqs=2000, enforce_eager=True)
    loaded = CudaBackend(lambda: device).load(model, source, many)
    taken = device.allocated_bytes - before
    budget = 0.3 * device.info.memory_bytes
    assert 0.9 * budget < taken <= budget
    loaded.close()
    del loaded
    assert device.allocated_bytes == before, "close gives everything back"


def test_kv_blocks_are_what_the_memory_leaves(device: EmulatedDevice) -> None:
    model, source = decoder()
    plan = load_sizes(model, source, options(), "f32", "f32", device)
    assert plan.kv.num_blocks == 8 * 4, "4 sequences at full length"
    fraction = {"max_num_seqs": 1 << 10, "memory_fraction": 0.7, "max_model_len": 4096}
    plan = load_sizes(model, source, options(**fraction), "f32", "f32", device)
    used = plan.weights.num_bytes + plan.layout.num_bytes + plan.staging_bytes + plan.kv.num_bytes
    assert used < 0.7 * device.info.memory_bytes
    assert plan.kv.num_blocks < (1 << 10) * 256


def test_the_log_says_what_is_counted(
    device: EmulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    model, source = decoder()
    caplog.set_level("INFO", "vllmx.cuda")
    plan = load_sizes(model, source, options(memory_fraction=0.75), "f32", "f32", device)
    (line,) = (r.getMessage() for r in caplog.records if "--memory-fraction" in r.getMessage())
    assert f"{format_bytes(device.free_bytes())} of" in line
    assert "0.75 of it" in line
    assert f"KV cache ({format_bytes(plan.kv.num_bytes)})" in line


def test_refusals_name_value_limit_and_remedy() -> None:
    model, source = decoder()

    def load(memory_bytes: int = 1 << 26, **changes: Any) -> None:
        device = EmulatedDevice(memory_bytes=memory_bytes)
        CudaBackend(lambda: device).load(model, source, options(**changes))

    with pytest.raises(CapacityError, match=r"weights take .* as f32.*free on emulated GPU"):
        load(memory_bytes=1000)
    with pytest.raises(CapacityError, match=r"max_model_len 128.*--memory-fraction"):
        load(memory_bytes=31_000_000, memory_fraction=0.01)
    with pytest.raises(ConfigError, match=r"block_size 24.*power of two"):
        load(block_size=24)
    with pytest.raises(ConfigError, match=r"dtype 'f8': choose bf16, f16, f32"):
        load(dtype="f8")
    with pytest.raises(ConfigError, match="no KV cache of bf16: choose auto, f32, int8 or fp8"):
        load(kv_cache_dtype="bf16")
    with pytest.raises(ConfigError, match="CUDA backend has no KV cache of q8,q4: choose auto"):
        load(kv_cache_dtype="q8,q4")


def test_a_backend_tells_what_its_device_has_free(device: EmulatedDevice) -> None:
    assert free_memory(CudaBackend(lambda: device)) == device.info.memory_bytes


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("cols", [4096, 7168])
def test_codes_and_scales_share_a_piece(cols: int, block_rows: int) -> None:
    """A pinned buffer of a byte over 32 MiB takes 64, for CuPy rounds it up."""
    rows = 40_960
    form = Codes8("f8e4m3", block_rows, 128, coded_products=True)
    part: Any = SimpleNamespace(shape=(rows, cols))
    data = Memory(0, form.num_bytes(rows, cols), None)
    sizes = [piece.num_bytes for piece in form.pieces(part, data, 0, rows)]
    assert 0.9 * pieces.PIECE_BYTES < max(sizes) <= pieces.PIECE_BYTES
