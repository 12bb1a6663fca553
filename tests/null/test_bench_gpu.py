"""The GPU benchmark without a GPU: budgets of time, tables, random checkpoints, and its parts on a
device whose kernels do nothing."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_cuda.device import Product
from vllmx_cuda.emulated_device import EmulatedDevice, array
from vllmx_cuda.kernel_specs import Variant
from vllmx_models.qwen3 import qwen3

GPU = Path(__file__).resolve().parents[2] / "bench" / "gpu"
MODULES = ("checkpoints", "devices", "measure", "figures", "start", "synthetic_vocab")


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
        if variant.kernel.entry == "sample_pick":
            self.submit("launch", lambda: array(arguments[-2], np.int32).fill(0))

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
    """Of an 8B model: bits of a weight, and the types of the first and a middle layer."""
    made = bench("checkpoints")
    source = made.RandomSource(made.SHAPES["8b"], "q4_k_m")

    def kind(name: str) -> str:
        shape = source._shapes[name]
        from vllmx_models.gguf.quantize.mixes import type_of

        return type_of("q4_k_m", made._gguf_name(name), shape, source._layers)

    assert kind("model.layers.0.self_attn.v_proj.weight") == "Q6_K"
    assert kind("model.layers.0.self_attn.q_proj.weight") == "Q4_K"
    assert kind("model.layers.5.mlp.down_proj.weight") == "Q4_K"
    assert kind("lm_head.weight") == "Q6_K"


@pytest.mark.parametrize(
    "part", ["ceilings", "0.6b bf16", "8b bf16, fp8 KV", "8b q4_k_m", "0.6b fp8 blocks",
             "256 x 1024 on 0.6b"],
)  # fmt: skip
def test_parts_run_to_their_end(
    bench: Any, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = bench("measure")
    monkeypatch.setattr(measure, "WARM_S", 0.0)
    shared = measure.Bench(
        measure.REHEARSAL, time.perf_counter() + 60, tmp_path / "part.json",
        {"copy_gb_s": 100.0, "bf16_tflop_s": 1.0}, IdleDevice, rehearse=True,
    )  # fmt: skip
    measure.PARTS[part](shared)
    found = json.loads((tmp_path / "part.json").read_text())
    assert found == shared.found
    wanted = {
        "ceilings": {"copy_gb_s", "bf16_tflop_s"},
        "256 x 1024 on 0.6b": {"tokens_s", "step_ms"},
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
        measure.REHEARSAL, time.perf_counter() - 1, tmp_path / "part.json", {}, IdleDevice,
        rehearse=True,
    )  # fmt: skip
    measure.PARTS["0.6b bf16"](shared)
    found = json.loads((tmp_path / "part.json").read_text())
    assert found["cut"] == "out of time before decode 1 x 20"
    assert found["load_s"] > 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_is_shared_and_what_is_left_goes_on(bench: Any, tmp_path: Path) -> None:
    figures, clock = bench("figures"), Clock()
    parts = [figures.Part("ceilings", 10), figures.Part("slow", 20), figures.Part("fast", 10),
             figures.Part("starved", 10)]  # fmt: skip
    limits = []

    def run(command: list[str], limit: float, more: dict[str, str], log: Path) -> str:
        limits.append(round(limit, 6))
        given = float(command[command.index("--seconds") + 1])
        assert math.isclose(given, limit - figures.MARGIN_S, abs_tol=0.06)
        name, path = command[2], Path(command[3])
        path.write_text(json.dumps({"of": name}))
        assert ("--ceilings" in command) == (name != "ceilings")
        clock.now += {"ceilings": 1, "slow": limit, "fast": 46.0}[name]
        return "killed" if name == "slow" else "ok"

    report = figures.run_parts(parts, tmp_path, 101.0, run=run, clock=clock)
    assert limits == [round(101 / 5, 6), 50.0, 25.0]
    assert report["slow"] == {"status": "killed", "seconds": 50.0, "of": "slow"}
    assert report["starved"]["status"] == "not started: no time left"
    assert json.loads((tmp_path / "figures.json").read_text()) == report
    assert clock.now <= 101


def test_a_cold_start_finds_no_compiled_kernels(bench: Any, tmp_path: Path) -> None:
    figures, seen = bench("figures"), []

    def run(command: list[str], limit: float, more: dict[str, str], log: Path) -> str:
        folder = Path(more["VLLMX_CACHE_DIR"])
        seen.append(folder.exists())
        folder.mkdir(exist_ok=True)
        return "ok"

    for _ in range(2):
        parts = [figures.Part("start, cold", 1), figures.Part("start, warm", 1)]
        figures.run_parts(parts, tmp_path, 100.0, run=run)
    assert seen == [False, True] * 2


def test_a_hanging_and_a_failing_part_cost_themselves(bench: Any, tmp_path: Path) -> None:
    run = bench("figures").run_process
    begin = time.perf_counter()
    hang = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    assert run(hang, 1.5, {}, tmp_path / "a.log") == "killed after 2 s"
    assert time.perf_counter() - begin < 30
    assert (tmp_path / "a.log").read_text() == "begun\n"
    fail = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['CODE']))"]
    assert run(fail, 60, {"CODE": "3"}, tmp_path / "b.log") == "failed, status 3: see b.log"


def test_the_table_says_what_was_found(bench: Any) -> None:
    figures = bench("figures")

    def decode(ms: float, share: float, shared: bool) -> dict[str, Any]:
        return {"device_ms": ms, "share_of_copy": share, "blocks_shared": shared, "gap_us": 12.0}

    report = {
        "8b bf16": {
            "status": "killed after 30 s", "seconds": 30.0,
            "cut": "out of time before prefill 8192",
            "decode 1 x 128": decode(4.25, 0.853, False),
            "decode 256 x 128": decode(9.5, 0.71, False),
            "decode 256 x 32768": decode(41.0, 0.66, True),
            "prefill 512": {"device_ms": 20.0, "tokens_s": 25600.0, "share_of_matmul": 0.7},
        },
        "torch 8b": {
            "status": "ok", "seconds": 9.0, "torch": "2.11", "decode 1 x 8 failed": "Boom: no",
            "captured 1 x 1024": {"device_ms": 12.5, "share_of_copy": 0.4},
        },
        "start, warm": {"status": "ok", "seconds": 3.2, "first_token_s": 2.5},
    }  # fmt: skip
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
    figures = bench("figures")
    step = {"share_of_copy": 0.9, "wall_ms": 0.3, "device_ms": 0.3, "blocks_shared": False}
    report = {
        "8b bf16": {
            "status": "ok", "seconds": 1.0, "decode 1 x 128": step,
            "decode 4 x 128": step | {"share_of_copy": 0.84},
            "decode 256 x 32768": step | {"share_of_copy": 0.2, "blocks_shared": True},
        },
        "0.6b bf16": {"status": "ok", "seconds": 1.0, "decode 1 x 128": step},
        "256 x 1024 on 0.6b": {"status": "ok", "seconds": 1.0, "tokens_s": 46_000.0},
        "start, warm": {"status": "ok", "seconds": 1.0, "first_token_s": 3.5},
    }  # fmt: skip
    lines = figures.table(report).splitlines()[-len(figures.GOALS) :]
    assert [line.strip() for line in lines] == [
        "8B BF16 decode, share of the bandwidth: 0.84 (decode 4 x 128), at least 0.85: MISSED",
        "0.6B batch 1, ms a step: 0.3 (decode 1 x 128), at most 0.36: MET",
        "0.6B x 256, tokens/s: 4.6e+04 (tokens_s), at least 45000: MET",
        "0.6B prefill, share of the matmul rate: not measured",
        "8B prefill, share of the matmul rate: not measured",
        "warm start of the 0.6B, s: 3.5 (first_token_s), at most 3: MISSED",
    ]


def test_goals_are_of_parts_and_figures_that_there_are(bench: Any, tmp_path: Path) -> None:
    figures, measure = bench("figures"), bench("measure")
    scale = measure.Scale()
    cases = {f"decode {b} x {c}" for b in scale.batches for c in scale.contexts}
    cases |= {f"prefill {length}" for length in scale.prefills} | {"tokens_s", "first_token_s"}
    for goal in figures.GOALS:
        assert goal.part in {part.name for part in figures.PARTS}
        assert any(case.startswith(goal.case) for case in cases), goal.case


def test_every_part_of_the_figures_exists(bench: Any) -> None:
    figures, measure = bench("figures"), bench("measure")
    ours = {part.name for part in figures.PARTS if part.script == "measure.py"}
    assert ours == set(measure.PARTS)
    names = [part.name for part in figures.PARTS]
    assert names[0] == "ceilings"
    assert names.index("start, cold") < names.index("start, warm")


def test_the_sanitizer_sees_the_bounds_of_each_allocation(bench: Any) -> None:
    asked = []
    cuda = SimpleNamespace(
        Memory=lambda size: asked.append(size) or size,
        MemoryPointer=lambda memory, at: (memory, at),
    )
    pool = bench("devices").ExactPool(SimpleNamespace(cuda=cuda))
    assert [pool.malloc(size) for size in (1, 1000, 1000)] == [(1, 0), (1000, 0), (1000, 0)]
    assert asked == [1, 1000, 1000]
