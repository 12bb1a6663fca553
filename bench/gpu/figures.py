"""Speed on the GPU at real shapes with random weights, beside what the card can do.

    python bench/gpu/figures.py OUT.json [--shapes 0.6b,8b] [--seconds 180]

Decode steps are given as a share of the measured copy bandwidth (weights and the context's keys and
values, once each), prefills as a share of the measured rate of a large bf16 product. Contexts that
do not fit beside each other share their blocks, which is said. Steps are launched one ahead, as the
engine does; times are those of the device, medians.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.errors import VllmxError
from vllmx_core.plan import StepPlan
from vllmx_core.testing.plans import Row, make_plan, sampling_rows
from vllmx_core.weights import DENSE, RawTensor, WeightPart
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.cupy_device import CupyDevice
from vllmx_cuda.device import Product
from vllmx_models.qwen3 import qwen3

PAGE = 16
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
BATCHES, CONTEXTS, PREFILLS = (1, 4, 16, 64, 128, 256), (128, 1024, 8192, 32768), (512, 2048, 8192)
STEPS = 12


class RandomSource:
    """Dense bf16 tensors of any name: the beginning of one random buffer."""

    def __init__(self, model: Any) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        for spec in model.weights():
            for part in spec.parts:
                shape = (part.rows,) if spec.kind == "vector" else (part.rows, spec.cols)
                self._shapes[part.name] = shape
        count = max(int(np.prod(shape)) for shape in self._shapes.values())
        random = np.random.default_rng(0)
        words = random.integers(0, 1 << 16, 1 << 24)
        words = words & 0x807F | 0x3C00  # magnitudes of 0.008 to 0.016, both signs
        self._words = np.resize(words.astype(np.uint16), count)

    def names(self) -> Collection[str]:
        return self._shapes

    def part(self, name: str) -> WeightPart:
        shape = self._shapes[name]
        data = self._words[: int(np.prod(shape))].view(np.uint8)
        return WeightPart(name, shape, DENSE, {"weight": RawTensor(name, "bf16", shape, data)})

    def close(self) -> None:
        return


def ceilings() -> dict[str, float]:
    """GB/s of a copy on the device, read and written; TFLOP/s of a bf16 product."""
    device, size, n = CupyDevice.open(), 1 << 30, 8192
    source, target = device.zeros(size), device.zeros(size)
    product = Product(n, n, n, "bf16", "bf16")

    def seconds(call: Any) -> float:
        found = []
        for _ in range(8):
            begin = device.event()
            call()
            end = device.event()
            end.wait()
            found.append(end.seconds_since(begin))
        return statistics.median(found[2:])

    copied = 2 * size / seconds(lambda: device.copy(target, source)) / 1e9
    with device.tuning():
        device.multiply(product, source, source, target)
    rate = 2 * n**3 / seconds(lambda: device.multiply(product, source, source, target)) / 1e12
    device.close()
    return {"copy_gb_s": copied, "bf16_tflop_s": rate}


def decode_plan(batch: int, context: int, num_blocks: int) -> tuple[StepPlan, bool]:
    """One token for each row at the end of its context; whether rows share blocks."""
    needed = -(-context // PAGE)
    rows = [
        Row([7], context - 1, [(i * needed + j) % num_blocks for j in range(needed)])
        for i in range(batch)
    ]
    return make_plan(rows, PAGE), batch * needed > num_blocks


def median_s(loaded: LoadedModel, plan: StepPlan) -> tuple[float, float]:
    """(device, wall) seconds of a step, the next one launched before the last is read."""
    rows = sampling_rows(plan.num_logit_rows)
    for _ in range(2):
        loaded.step(plan, rows).result()
    begin, device_s, waiting = time.perf_counter(), [], loaded.step(plan, rows)
    for _ in range(STEPS):
        following = loaded.step(plan, rows)
        device_s.append(waiting.result().elapsed_s)
        waiting = following
    waiting.result()
    return statistics.median(device_s), (time.perf_counter() - begin) / (STEPS + 1)


def measure(shape: str, limits: dict[str, float], deadline: float) -> dict[str, Any]:
    config = COMMON | SHAPES[shape]
    model = qwen3(config)
    begin = time.perf_counter()
    loaded = CudaBackend().load(
        model, RandomSource(model),
        LoadOptions(
            dtype="bf16", max_model_len=40960, max_num_seqs=256, max_num_batched_tokens=8192,
            shrink_to_fit=True,
        ),
    )  # fmt: skip
    found: dict[str, Any] = {"load_s": time.perf_counter() - begin, "info": loaded.info.details}
    layers, head, kv_heads = config["num_hidden_layers"], 128, 8
    body = loaded.info.weight_bytes - 40960 * head * 4
    if not config["tie_word_embeddings"]:
        body -= config["vocab_size"] * config["hidden_size"] * 2  # a table that is only gathered
    for context in CONTEXTS:
        for batch in BATCHES:
            if time.perf_counter() > deadline:
                found["cut"] = f"out of time before decode {batch} x {context}"
                return found
            plan, shared = decode_plan(batch, context, loaded.info.num_kv_blocks)
            device_s, wall_s = median_s(loaded, plan)
            read = body + batch * context * layers * 2 * kv_heads * head * 2
            found[f"decode {batch} x {context}"] = {
                "device_ms": device_s * 1e3, "wall_ms": wall_s * 1e3,
                "share_of_copy": read / device_s / 1e9 / limits["copy_gb_s"],
                "tokens_s": batch / wall_s, "blocks_shared": shared,
            }  # fmt: skip
    weights = sum(
        spec.rows * spec.cols for spec in model.weights() if spec.kind == "linear"
    ) - config["vocab_size"] * config["hidden_size"]  # fmt: skip
    for length in PREFILLS:
        blocks = list(range(-(-length // PAGE)))
        plan = make_plan([Row([i % 1000 for i in range(length)], 0, blocks)], PAGE)
        device_s, _ = median_s(loaded, plan)
        flop = 2 * weights * length
        flop += 2 * layers * config["num_attention_heads"] * head * length**2
        found[f"prefill {length}"] = {
            "device_ms": device_s * 1e3, "tokens_s": length / device_s,
            "share_of_matmul": flop / device_s / 1e12 / limits["bf16_tflop_s"],
        }  # fmt: skip
    loaded.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="0.6b,8b", help=", ".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=180.0)
    chosen = parser.parse_args()
    deadline = time.perf_counter() + chosen.seconds
    try:
        report: dict[str, Any] = {"ceilings": ceilings()}
        for shape in chosen.shapes.split(","):
            report[shape] = measure(shape, report["ceilings"], deadline)
            chosen.out.write_text(json.dumps(report, indent=1))
    except VllmxError as error:
        print(error.message, file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
