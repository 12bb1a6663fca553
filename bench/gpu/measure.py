"""One part of the figures, in a process of its own; `call.py` runs them all.

    python bench/gpu/measure.py PART OUT.json --seconds 30 [--ceilings FILE] [--rehearse]

Steps are launched one ahead, as the engine does; device times are medians. What was measured is
written after every case, so that a part that is cut keeps what it had.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from checkpoints import SHAPES, RandomSource, prefill_flop, share
from devices import opener
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.errors import VllmxError
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.device import Device, Product
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import DTYPES, KERNELS
from vllmx_cuda.program.sampler import DeviceSampler, Draw
from vllmx_cuda.program.staging import PARAMETERS, parameter
from vllmx_models.families.qwen import qwen3
from vllmx_testing.plans import Row, make_plan, sampling_rows

STARTED_S = time.perf_counter()
PAGE = 16
WARM_S = 0.4


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    first: tuple[tuple[int, int], ...] = ((1, 128), (1, 1024), (16, 1024), (64, 1024), (256, 1024))
    """Batches and contexts of decode steps that are measured before all else."""
    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    contexts: tuple[int, ...] = (128, 1024, 8192, 32768)
    prefills: tuple[int, ...] = (2048, 8192, 512)
    steps: int = 12
    copy_bytes: int = 1 << 30
    square: int = 8192
    requests: int = 256
    new_tokens: int = 1024
    nodes: tuple[int, int] = (100, 300)
    vocab: int = 151_936
    options: dict[str, Any] = field(
        default_factory=lambda: {
            "max_model_len": 40960,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
        }
    )


REHEARSAL = Scale(
    ((3, 40),),
    (1, 3),
    (20, 40),
    (24,),
    2,
    1 << 12,
    16,
    3,
    4,
    (2, 4),
    500,
    {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 24},
)


@dataclass
class Bench:
    """What the parts share.

    Args:
        out: rewritten with `found` whenever something was measured.
    """

    scale: Scale
    deadline_s: float
    out: Path
    ceilings: dict[str, float]
    open_device: Callable[[], Device]
    rehearse: bool = False
    found: dict[str, Any] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        """Written at once, and never by half: a process may be killed at any time."""
        self.found[name] = value
        partial = self.out.with_suffix(".part")
        partial.write_text(json.dumps(self.found, indent=1))
        partial.replace(self.out)

    def late(self, before: str) -> bool:
        """Whether the time is over, which is noted."""
        if time.perf_counter() < self.deadline_s:
            return False
        self.note("cut", f"out of time before {before}")
        return True

    def load(self, shape: str, form: str, **changes: Any) -> tuple[LoadedModel, RandomSource]:
        shape = "tiny" if self.rehearse else shape
        model, source = qwen3(SHAPES[shape]), RandomSource(SHAPES[shape], form)
        options = LoadOptions(dtype="bf16", shrink_to_fit=True, **(self.scale.options | changes))
        begin = time.perf_counter()
        loaded = CudaBackend(self.open_device).load(model, source, options)
        self.note("load_s", time.perf_counter() - begin)
        weights_s = float(loaded.info.details["seconds for weights"])  # of the load
        self.note("weights_gb_s", loaded.info.weight_bytes / max(1e-3, weights_s) / 1e9)
        self.note("details", loaded.info.details)
        return loaded, source


def ceilings(bench: Bench) -> None:
    """GB/s of a copy on the device, read and written; TFLOP/s of a bf16 product; microseconds of a
    node of a graph that does next to nothing."""
    device, size, n = bench.open_device(), bench.scale.copy_bytes, bench.scale.square
    source, target = device.zeros(size), device.zeros(size)
    _fill(device, source)
    product = Product(n, n, n, "bf16", "bf16")
    with device.tuning():
        device.multiply(product, source, source, target)
    copied = _device_s(device, lambda: device.copy(target, source))
    multiplied = _device_s(device, lambda: device.multiply(product, source, source, target))
    bench.note("copy_gb_s", 2 * size / copied / 1e9)
    bench.note("bf16_tflop_s", 2 * n**3 / multiplied / 1e12)
    bench.note("node_us", _node_s(device, source, target, bench.scale.nodes) * 1e6)
    bench.note("launch_us", _launch_s(device, source, target, bench.scale.nodes[1]) * 1e6)
    device.close()


def _node_s(device: Device, source: Memory, target: Memory, nodes: tuple[int, int]) -> float:
    """The seconds of a node, by two graphs of kernels that scale 16 elements: what launching a
    graph costs cancels."""
    variant = KERNELS["scale"].variant(VX_DTYPE=DTYPES["bf16"], VX_VEC=1)
    device.prepare([variant])
    arguments = variant.kernel.ordered(x=source, y=target, count=16, factor=1.0)

    def enqueue(count: int) -> None:
        for _ in range(count):
            device.launch(variant, {"count": 16}, arguments)

    enqueue(1)
    device.synchronize()
    few, many = (device.capture(partial(enqueue, count)) for count in nodes)
    return (_device_s(device, many.launch) - _device_s(device, few.launch)) / (nodes[1] - nodes[0])


def _launch_s(device: Device, source: Memory, target: Memory, count: int) -> float:
    """Host seconds of a launch without a graph."""
    variant = KERNELS["scale"].variant(VX_DTYPE=DTYPES["bf16"], VX_VEC=1)
    arguments = variant.kernel.ordered(x=source, y=target, count=16, factor=1.0)
    begin = time.perf_counter()
    for _ in range(count):
        device.launch(variant, {"count": 16}, arguments)
    return (time.perf_counter() - begin) / count


def sampler(bench: Bench) -> None:
    """Microseconds of a draw by the kind of its rows, and by the model of bytes and nodes."""
    rows_of: dict[Draw, SamplingRows] = {
        "greedy": sampling_rows(1),
        "few": sampling_rows(1, temperature=0.6, top_k=20, top_p=0.95),
        "any": sampling_rows(1, temperature=0.6, top_p=0.95),
    }
    vocab, most = bench.scale.vocab, bench.scale.first[-1][0]
    device = bench.open_device()
    logits, ids = device.empty(4 * vocab * most), device.empty(4 * most)
    random = np.random.default_rng(0).standard_normal(vocab).astype(np.float32) * 3
    packed = device.pinned(4 * vocab)
    packed[...] = random.view(np.uint8)
    for row in range(most):
        device.upload(logits.at(4 * vocab * row), packed)
    made = DeviceSampler(device, vocab, most, ids)
    for count in sorted({1, most}):
        for draw, rows in rows_of.items():
            placed = {}
            for name in PARAMETERS:
                values = np.repeat(parameter(rows, name), count)
                pinned = device.pinned(values.nbytes)
                pinned[...] = values.view(np.uint8)
                placed[name] = device.empty(values.nbytes)
                device.upload(placed[name], pinned)
            device.synchronize()
            step: Any = SimpleNamespace(parameters=placed)
            enqueue = partial(made.enqueue_ids, logits, step, count, draw)
            enqueue()
            graph = device.capture(enqueue)
            found = {"us": _device_s(device, graph.launch) * 1e6}
            passes, nodes = {"any": (4, 6)}.get(draw, (1, 2))
            if bench.ceilings:
                found["model_us"] = passes * 4 * vocab * count / bench.ceilings["copy_gb_s"] / 1e3
                found["model_us"] += nodes * bench.ceilings["node_us"]
            bench.note(f"{draw} x {count}", found)
    device.close()


def _fill(device: Device, memory: Memory) -> None:
    """Fills memory with random bf16 of both signs: products of zeros draw less power, and run
    faster."""
    words = np.random.default_rng(0).integers(0, 1 << 16, 1 << 22).astype(np.uint16)
    raw = (words & np.uint16(0x807F) | np.uint16(0x3C00)).view(np.uint8)[: memory.num_bytes]
    pinned = device.pinned(raw.nbytes)
    pinned[...] = raw
    for begin in range(0, memory.num_bytes, raw.nbytes):
        size = min(raw.nbytes, memory.num_bytes - begin)
        device.upload(memory.at(begin, size), pinned[:size])
    device.synchronize()


def _device_s(device: Device, call: Callable[[], None]) -> float:
    """Median of some calls, once the clocks have had time to rise."""
    warm = time.perf_counter() + WARM_S
    while time.perf_counter() < warm:
        call()
        device.synchronize()
    found = []
    for _ in range(8):
        begin = device.event()
        call()
        end = device.event()
        end.wait()
        found.append(end.seconds_since(begin))
    return statistics.median(found[2:])


def model(shape: str, form: str, kv: str = "auto") -> Callable[[Bench], None]:
    """The part that measures decode and prefill of one model."""

    def measure(bench: Bench) -> None:
        loaded, source = bench.load(shape, form, kv_cache_dtype=kv)
        config = SHAPES["tiny" if bench.rehearse else shape]
        scale = bench.scale
        others = [(batch, context) for context in scale.contexts for batch in scale.batches]
        cases: list[tuple[str, Callable[[], Any]]] = [
            *_decodes(bench, loaded, source, config, scale.first),
            *(
                (f"prefill {n}", partial(_prefill, bench, loaded, config, n))
                for n in scale.prefills
            ),
            *_decodes(bench, loaded, source, config, others),
        ]
        for name, case in cases:
            if name in bench.found:
                continue
            if bench.late(name):
                return
            bench.note(name, case())
        loaded.close()

    return measure


def _decodes(
    bench: Bench,
    loaded: LoadedModel,
    source: RandomSource,
    config: Any,
    cases: Sequence[tuple[int, int]],
) -> Iterator[tuple[str, Callable[[], Any]]]:
    for case in cases:
        name = f"decode {case[0]} x {case[1]}"
        yield name, partial(_decode, bench, loaded, source, config, case)


def _decode(
    bench: Bench, loaded: LoadedModel, source: RandomSource, config: Any, case: tuple[int, int]
) -> dict[str, Any]:
    """A step of one token a row. The floor is what must be read: the checkpoint's matrices and the
    keys and values of every context, once."""
    batch, context = case
    needed, blocks = -(-context // PAGE), loaded.info.num_kv_blocks
    rows = [
        Row([7], context - 1, [(i * needed + j) % blocks for j in range(needed)])
        for i in range(batch)
    ]
    device_s, wall_s, host_s = _step_s(loaded, make_plan(rows, PAGE), bench.scale.steps)
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    token_bytes = 2 * values
    if loaded.info.kv_cache_dtype not in ("bf16", "f16"):  # codes, and a scale for each vector
        token_bytes = values + 4 * values // config["head_dim"]
    read = source.linear_bytes(qwen3(config)) + batch * context * token_bytes
    return {
        "device_ms": device_s * 1e3,
        "wall_ms": wall_s * 1e3,
        "gap_us": (wall_s - device_s) * 1e6,
        "host_us": host_s * 1e6,
        "share_of_copy": share(read / device_s / 1e9, bench.ceilings.get("copy_gb_s")),
        "tokens_s": batch / wall_s,
        "blocks_shared": batch * needed > blocks,
    }


def _prefill(
    bench: Bench, loaded: LoadedModel, config: Any, length: int
) -> dict[str, float | None]:
    vocab = config["vocab_size"]
    tokens = [i % vocab for i in range(length)]
    plan = make_plan([Row(tokens, 0, list(range(-(-length // PAGE))))], PAGE)
    device_s, _, host_s = _step_s(loaded, plan, max(2, bench.scale.steps // 3))
    return {
        "device_ms": device_s * 1e3,
        "tokens_s": length / device_s,
        "host_us": host_s * 1e6,
        "share_of_matmul": share(
            prefill_flop(config, length) / device_s / 1e12, bench.ceilings.get("bf16_tflop_s")
        ),
    }


def _step_s(loaded: LoadedModel, plan: StepPlan, steps: int) -> tuple[float, float, float]:
    """Seconds of a step on the device, by the wall clock, and of the call that enqueues it."""
    rows = sampling_rows(plan.num_logit_rows)
    for _ in range(2):
        loaded.step(plan, rows).result()
    device_s, host_s, waiting = [], [], loaded.step(plan, rows)
    begin = time.perf_counter()
    for _ in range(steps):
        called = time.perf_counter()
        following = loaded.step(plan, rows)
        host_s.append(time.perf_counter() - called)
        device_s.append(waiting.result().elapsed_s)
        waiting = following
    wall_s = (time.perf_counter() - begin) / steps
    waiting.result()
    return statistics.median(device_s), wall_s, statistics.median(host_s)


def throughput(bench: Bench) -> None:
    """Many requests through the engine's core, greedy, to a fixed length."""
    from vllmx_core.config import EngineConfig
    from vllmx_core.sampling import SamplingParams
    from vllmx_engine.core.engine_core import EngineCore
    from vllmx_engine.wire.messages import CoreRequest, pack_ids

    scale = bench.scale
    loaded, _ = bench.load("0.6b", "bf16", max_model_len=max(128, 2 * scale.new_tokens))
    config = EngineConfig(max_num_seqs=min(scale.requests, scale.options["max_num_seqs"]))
    core = EngineCore(loaded, config, max_model_len=max(128, 2 * scale.new_tokens), vocab_size=256)
    for index in range(scale.requests):
        prompt = [(index * 7 + j) % 256 for j in range(16)]
        params = SamplingParams(max_tokens=scale.new_tokens, temperature=0.0, ignore_eos=True)
        core.add(
            CoreRequest(
                request_id=str(index),
                prompt=pack_ids(prompt),
                params=params,
                max_tokens=scale.new_tokens,
                seed=index,
            )
        )
    begin, tokens, steps = time.perf_counter(), 0, 0
    while core.has_work and not bench.late("the last request was done"):
        tokens += sum(len(update.ids) for update in core.step())
        steps += 1
    seconds = time.perf_counter() - begin
    bench.note("requests", scale.requests)
    bench.note("tokens", tokens)
    bench.note("tokens_s", tokens / seconds)
    bench.note("step_ms", seconds / max(1, steps) * 1e3)
    core.close()


PARTS: dict[str, Callable[[Bench], None]] = {
    "ceilings": ceilings,
    "0.6b bf16": model("0.6b", "bf16"),
    "8b bf16": model("8b", "bf16"),
    "256 x 1024 on 0.6b": throughput,
    "sampler": sampler,
    "8b q4_k_m": model("8b", "q4_k_m"),
    "8b fp8 blocks": model("8b", "fp8 blocks"),
    "8b fp8": model("8b", "fp8"),
    "8b bf16, fp8 KV": model("8b", "bf16", "fp8"),
    "0.6b q4_k_m": model("0.6b", "q4_k_m"),
    "0.6b fp8 blocks": model("0.6b", "fp8 blocks"),
    "0.6b fp8": model("0.6b", "fp8"),
    "0.6b bf16, fp8 KV": model("0.6b", "bf16", "fp8"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ceilings", type=Path, help="what the part of that name wrote")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the emulator")
    chosen = parser.parse_args()
    bench = Bench(
        REHEARSAL if chosen.rehearse else Scale(),
        STARTED_S + chosen.seconds,
        chosen.out,
        json.loads(chosen.ceilings.read_text()) if chosen.ceilings else {},
        opener(chosen.rehearse),
        chosen.rehearse,
    )
    try:
        PARTS[chosen.part](bench)
    except VllmxError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
