"""The GPU benchmark without a GPU: budgets of time, tables, random checkpoints, and its parts on a
device whose kernels do nothing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_cuda.device.device import Product
from vllmx_cuda.kernel_specs import Variant
from vllmx_models.families.qwen import qwen3
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulated_products import array

GPU = Path(__file__).resolve().parents[2] / "bench" / "gpu"
MODULES = ("checkpoints", "devices", "measure", "parts", "table", "call", "golden", "warm", "start",
           "synthetic_vocab")  # fmt: skip


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports modules of bench/gpu, which is a folder of scripts."""
    monkeypatch.syspath_prepend(str(GPU))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield __import__
    for name in MODULES:
        sys.modules.pop(name, None)


class IdleDevice(EmulatedDevice):
    """Launches nothing; ids and logits are zeros."""

    def launch(self, variant: Variant, sizes: dict[str, int], arguments: Any) -> None:
        shape = variant.launch(sizes)
        assert all(shape.grid), variant.kernel.entry
        if variant.kernel.entry in ("sample_pick", "sample_among"):
            named = dict(
                zip((one.name for one in variant.kernel.arguments), arguments, strict=True)
            )
            self.submit("launch", lambda: array(named["ids"], np.int32).fill(0))

    def multiply(self, product: Product, *operands: Any) -> None:
        return


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8 blocks", "q4_k_m"])
def test_random_checkpoints_are_what_they_say(bench: Any, form: str) -> None:
    made = bench("checkpoints")
    config = made.SHAPES["tiny"]
    source, model = made.RandomSource(config, form), qwen3(dict(config))
    bits = 0
    for spec in model.weights():
        for part_spec in spec.parts:
            part = source.part(part_spec.name)
            values = part.dequantize()
            assert values.shape[0] == part_spec.rows
            assert np.isfinite(values).all()
            assert spec.kind == "vector" or 1e-4 < np.abs(values).mean() < 0.2, part_spec.name
            if spec.kind == "linear":
                bits += sum(8 * raw.data.nbytes for raw in part.buffers.values())
    assert source.linear_bytes(model) * 8 == bits
    kinds = {source.part(name).layout.kind for name in source.names()}
    assert (
        kinds
        == {
            "bf16": {"dense"},
            "fp8": {"dense", "fp8"},
            "fp8 blocks": {"dense", "fp8"},
            "q4_k_m": {"dense", "gguf"},
        }[form]
    )


def test_the_mix_is_that_of_llama_cpp(bench: Any) -> None:
    """The model has 8B weights: bits of a weight, and the types of the first and a middle layer."""
    made = bench("checkpoints")
    source = made.RandomSource(made.SHAPES["8b"], "q4_k_m")

    def kind(name: str) -> str:
        shape = source._shapes[name]
        from vllmx_models.formats.gguf.quantize.mixes import type_of

        return type_of("q4_k_m", made._gguf_name(name), shape, source._layers)

    assert kind("model.layers.0.self_attn.v_proj.weight") == "Q6_K"
    assert kind("model.layers.0.self_attn.q_proj.weight") == "Q4_K"
    assert kind("model.layers.5.mlp.down_proj.weight") == "Q4_K"
    assert kind("lm_head.weight") == "Q6_K"


@pytest.mark.parametrize(
    "part",
    [
        "ceilings",
        "0.6b bf16",
        "8b bf16, fp8 KV",
        "8b q4_k_m",
        "0.6b fp8 blocks",
        "256 x 1024 on 0.6b",
        "sampler",
    ],
)
def test_parts_run_to_their_end(
    bench: Any, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = bench("measure")
    monkeypatch.setattr(measure, "WARM_S", 0.0)
    shared = measure.Bench(
        measure.REHEARSAL,
        time.perf_counter() + 60,
        tmp_path / "part.json",
        {"copy_gb_s": 100.0, "bf16_tflop_s": 1.0, "node_us": 2.0},
        IdleDevice,
        rehearse=True,
    )
    measure.PARTS[part](shared)
    found = json.loads((tmp_path / "part.json").read_text())
    assert found == shared.found
    wanted = {
        "ceilings": {"copy_gb_s", "bf16_tflop_s", "node_us", "launch_us"},
        "256 x 1024 on 0.6b": {"tokens_s", "step_ms"},
        "sampler": {f"{draw} x {count}" for draw in ("greedy", "few", "any") for count in (1, 3)},
    }.get(part, {"decode 3 x 40", "decode 1 x 20", "prefill 24", "load_s", "weights_gb_s"})
    assert wanted <= set(found)
    assert "cut" not in found
    if part == "256 x 1024 on 0.6b":
        assert found["tokens"] == 3 * 4
    for case, values in found.items():
        if case.startswith("decode"):
            assert values["wall_ms"] > 0
            assert values["host_us"] > 0


def test_a_start_reaches_its_first_token(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, devices = bench("start"), bench("devices")
    monkeypatch.setattr(devices, "opener", lambda rehearse: IdleDevice)
    start.write_model(tmp_path / "model", "tiny")
    found = start.first_token(tmp_path / "model", rehearse=True)
    assert 0 < found["imports_s"] < found["loaded_s"] < found["first_token_s"]


def test_a_part_that_is_late_keeps_what_it_has(bench: Any, tmp_path: Path) -> None:
    measure = bench("measure")
    shared = measure.Bench(
        measure.REHEARSAL,
        time.perf_counter() - 1,
        tmp_path / "part.json",
        {},
        IdleDevice,
        rehearse=True,
    )
    measure.PARTS["0.6b bf16"](shared)
    found = json.loads((tmp_path / "part.json").read_text())
    assert found["cut"] == "out of time before decode 3 x 40"
    assert found["load_s"] > 0


def test_the_table_says_what_was_found(bench: Any) -> None:
    figures = bench("table")

    def decode(ms: float, share: float, shared: bool) -> dict[str, Any]:
        return {"device_ms": ms, "share_of_copy": share, "blocks_shared": shared, "gap_us": 12.0}

    report = {
        "8b bf16": {
            "status": "killed after 30 s",
            "seconds": 30.0,
            "cut": "out of time before prefill 8192",
            "decode 1 x 128": decode(4.25, 0.853, False),
            "decode 256 x 128": decode(9.5, 0.71, False),
            "decode 256 x 32768": decode(41.0, 0.66, True),
            "prefill 512": {"device_ms": 20.0, "tokens_s": 25600.0, "share_of_matmul": 0.7},
        },
        "torch 8b": {
            "status": "ok",
            "seconds": 9.0,
            "torch": "2.11",
            "decode 1 x 8 failed": "Boom: no",
            "captured 1 x 1024": {"device_ms": 12.5, "share_of_copy": 0.4},
        },
        "start, warm": {"status": "ok", "seconds": 3.2, "first_token_s": 2.5},
    }
    text = figures.table(report)
    lines = text.splitlines()
    assert lines[0] == "8b bf16: killed after 30 s, 30.0 s"
    assert "out of time before prefill 8192" in lines[1]
    assert lines[2].split() == ["context", "1", "rows", "256", "rows", "gap", "us"]
    assert lines[3].split() == ["128", "4.250", "ms", "85%", "9.500", "ms", "71%", "12"]
    assert lines[4].split() == ["32768", "-", "41.000", "ms", "~66%", "12"]
    assert "prefill 512: 20.00 ms, 25600 tokens/s, 70% of the matmul rate" in lines[5]
    assert "first_token_s: 2.5" in text
    assert "captured 1 x 1024: 12.500 ms, 40% of the bandwidth" in text
    assert "decode 1 x 8 failed: Boom: no" in text


def test_the_table_holds_what_was_found_to_the_goals(bench: Any) -> None:
    figures = bench("table")
    step = {"share_of_copy": 0.9, "wall_ms": 0.3, "device_ms": 0.3, "blocks_shared": False}
    report = {
        "8b bf16": {
            "status": "ok",
            "seconds": 1.0,
            "decode 1 x 128": step,
            "decode 4 x 128": step | {"share_of_copy": 0.84},
            "decode 256 x 32768": step | {"share_of_copy": 0.2, "blocks_shared": True},
        },
        "0.6b bf16": {"status": "ok", "seconds": 1.0, "decode 1 x 128": step},
        "256 x 1024 on 0.6b": {"status": "ok", "seconds": 1.0, "tokens_s": 46_000.0},
        "start, warm": {"status": "ok", "seconds": 1.0, "first_token_s": 3.5},
        "sampler": {"status": "ok", "seconds": 1.0, "few x 1": {"us": 12.0}},
        "ceilings": {"status": "ok", "seconds": 1.0, "launch_us": 2.5},
    }
    lines = figures.table(report).splitlines()[-len(figures.GOALS) :]
    assert [line.strip() for line in lines] == [
        "8B BF16 decode, share of the bandwidth: 0.84 (decode 4 x 128), at least 0.85: MISSED",
        "0.6B batch 1, ms a step: 0.3 (decode 1 x 128), at most 0.36: MET",
        "0.6B x 256, tokens/s: 4.6e+04 (tokens_s), at least 45000: MET",
        "draw of one row with top_k, us: 12 (few x 1), at most 20: MET",
        "draws of 256 rows with top_k, us: not measured",
        "host time of a launch, us: 2.5 (launch_us), at most 2: MISSED",
        "0.6B prefill, share of the matmul rate: not measured",
        "8B prefill, share of the matmul rate: not measured",
        "warm start of the 0.6B, s: 3.5 (first_token_s), at most 3: MISSED",
    ]


def test_a_share_of_a_ceiling_that_is_missing_is_told_and_no_goal(bench: Any) -> None:
    step = {"device_ms": 4.0, "share_of_copy": None, "gap_us": 3.0, "wall_ms": 0.3}
    prefill = {"device_ms": 2.0, "tokens_s": 10.0, "share_of_matmul": None}
    found = {"status": "ok", "seconds": 1.0, "decode 1 x 128": step, "prefill 512": prefill}
    text = bench("table").table({"8b bf16": found})
    assert "4.000 ms ?" in text
    assert "prefill 512: 2.00 ms, 10 tokens/s, ? of the matmul rate" in text
    assert "8B BF16 decode, share of the bandwidth: not measured" in text


def test_parts_without_ceilings_keep_their_figures(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = bench("measure")
    monkeypatch.setattr(measure, "WARM_S", 0.0)
    shared = measure.Bench(
        measure.REHEARSAL,
        time.perf_counter() + 60,
        tmp_path / "part.json",
        {},
        IdleDevice,
        rehearse=True,
    )
    measure.PARTS["0.6b bf16"](shared)
    found = json.loads((tmp_path / "part.json").read_text())
    assert next(name for name in found if name.startswith("decode")) == "decode 3 x 40", "first"
    assert found["decode 1 x 20"]["share_of_copy"] is None
    assert found["prefill 24"]["share_of_matmul"] is None
    assert found["prefill 24"]["tokens_s"] > 0


def test_warming_knows_what_a_load_compiles(bench: Any) -> None:
    """The models are those of the first call, on their real widths and with their forms of
    weights."""
    warm, found = bench("warm"), {}
    for variant in warm.variants("sm_90a"):
        found.setdefault(variant.kernel.entry, []).append(variant)
    assert {"linear_mma", "w4_linear", "codes8_mma", "paged_decode_mma", "wrappers"} <= set(found)
    assert len({variant.module_key for of in found.values() for variant in of}) > 50


def test_the_sanitizer_sees_the_bounds_of_each_allocation(bench: Any) -> None:
    asked = []
    cuda = SimpleNamespace(
        Memory=lambda size: asked.append(size) or size,
        MemoryPointer=lambda memory, at: (memory, at),
    )
    pool = bench("devices").ExactPool(SimpleNamespace(cuda=cuda))
    assert [pool.malloc(size) for size in (1, 1000, 1000)] == [(1, 0), (1000, 0), (1000, 0)]
    assert asked == [1, 1000, 1000]
