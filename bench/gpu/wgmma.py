"""Whether the wgmma variant of prefill is right on this GPU, and its speed beside the mma kernel.

    python bench/gpu/wgmma.py [--rehearse] [--untimed]

In a process of its own: a product that never ends, or an instruction that the
GPU refuses, costs nothing else. Exit status 1 when something differs. With "right" on all lines,
VLLMX_CUDA_WGMMA=1 may become the default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllmx_core.model import AttentionSpec
from vllmx_core.weights.tensor import bf16_to_f32, f32_to_bf16
from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant
from vllmx_cuda.kernel_specs.attention import KV_ELEM
from vllmx_cuda.program.attention_ops import prefill_kernel

PAGE_SHIFT, ARCH = 4, "sm_90a"
TOLERANCE = {"bf16": 0.05, "f16": 0.006}
"""The tolerance of attention over values of a standard deviation of one: weights and results are
rounded."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """Rows of (context with the row's own tokens, tokens)."""

    rows: tuple[tuple[int, int], ...]
    dtype: str = "bf16"
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    causal: bool = True

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(0, self.heads, self.kv_heads, self.size, self.size**-0.5)

    @property
    def flop(self) -> float:
        """The operations of queries that see what is before them."""
        pairs = sum(n * (context - n) + n * (n + 1) / 2 for context, n in self.rows)
        return 4.0 * pairs * self.size * self.heads


CHECKED = (
    Case(((700, 700), (300, 90), (1500, 1))),
    Case(((700, 300), (33, 33)), dtype="f16", heads=10, kv_heads=2, sinks=True),
    Case(((600, 500),), heads=14, kv_heads=2, size=64, window=200),
    Case(((700, 300), (65, 60)), heads=16, kv_heads=8, size=256, softcap=20.0),
    Case(((500, 130),), heads=6, kv_heads=6, size=192, causal=False),
)
TIMED = (
    Case(((2048, 2048),)),
    Case(((8192, 8192),)),
    Case(((32768, 4096),)),
    Case(((8192, 8192),), size=64, heads=14, kv_heads=2),
    Case(((8192, 8192),), size=256, heads=16, kv_heads=8),
)


def packed(values: Array, dtype: str) -> Array:
    return f32_to_bf16(values) if dtype == "bf16" else values.astype(np.float16)


def upload(device: Device, values: Array) -> Memory:
    pinned = device.pinned(values.nbytes)
    pinned[...] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    memory = device.empty(values.nbytes)
    device.upload(memory, pinned)
    device.synchronize()
    return memory


def download(device: Device, memory: Memory, kind: Any) -> Array:
    pinned = device.pinned(memory.num_bytes)
    device.download(pinned, memory)
    device.synchronize()
    return np.array(pinned).view(kind)


def wrappers_off(device: Device, dtype: str) -> float:
    """Greatest difference of what the wrappers compute and numpy does."""
    random = np.random.default_rng(8)
    kind = np.uint16 if dtype == "bf16" else np.float16
    a, b = (packed(random.standard_normal((n, 128)).astype(np.float32), dtype) for n in (64, 128))
    out = [device.empty(4 * size) for size in (64 * 192, 64 * 192, 128)]
    wrappers = KERNELS["wgmma_wrappers"]
    arguments = wrappers.ordered(
        a=upload(device, a), b=upload(device, b), scores=out[0], values=out[1], powers=out[2]
    )
    device.launch(wrappers.variant(VX_DTYPE=DTYPES[dtype]), {}, arguments)
    wide = [bf16_to_f32(x) if kind == np.uint16 else x.astype(np.float32) for x in (a, b)]
    rows, columns = wide[0] @ wide[1].T, wide[0] @ wide[1]
    wanted = np.hstack([rows, rows[:, 64:], columns, 2 * columns[:, 64:]])
    found = [download(device, memory, np.float32).reshape(64, 192) for memory in out[:2]]
    powers = np.exp2(np.concatenate([found[0][:, 0], -found[0][:, 0]]) / 8)
    apart = np.abs(download(device, out[2], np.float32) / powers - 1).max()
    return float(max(np.abs(np.hstack(found) - wanted).max(), apart))


def kernel(case: Case, wgmma: bool) -> tuple[Variant, int]:
    """One of the two, and the tokens of its tiles."""
    chosen = prefill_kernel(case.spec, case.dtype, KV_ELEM, ARCH, wgmma=wgmma)
    assert chosen is not None
    variant = KERNELS[chosen.entry].variant(VX_DTYPE=DTYPES[case.dtype], **chosen.options)
    return variant, chosen.tile_tokens


def prepared(device: Device, case: Case) -> Callable[[bool], tuple[Callable[[], None], Memory]]:
    """launch, out = prepared(...)(wgmma): the same inputs for both kernels."""
    random, page = np.random.default_rng(5), 1 << PAGE_SHIFT
    width = -(-max(context for context, _ in case.rows) // page)
    tokens, blocks = sum(n for _, n in case.rows), len(case.rows) * width
    shapes = [(tokens, case.heads, case.size)] + [(blocks, case.kv_heads, page, case.size)] * 2
    q, k, v = (
        upload(device, packed(random.standard_normal(shape, np.float32), case.dtype))
        for shape in shapes
    )
    table = upload(device, random.permutation(blocks).astype(np.int32))
    contexts = upload(device, np.array([context for context, _ in case.rows], np.int32))
    sinks = upload(device, np.ones(case.heads, np.float32)) if case.sinks else None

    def choose(wgmma: bool) -> tuple[Callable[[], None], Memory]:
        variant, tile_tokens = kernel(case, wgmma)
        listed = np.array(list(tiles(case, tile_tokens)), np.int32)
        tile_memory, out = upload(device, listed), device.empty(q.num_bytes)
        sizes = {"tiles": len(listed), "heads": case.heads, "kv_heads": case.kv_heads}
        arguments = variant.kernel.ordered(
            q=q,
            k_pages=k,
            v_pages=v,
            tiles=tile_memory,
            context_len=contexts,
            block_table=table,
            sinks=sinks,
            out=out,
            heads=case.heads,
            kv_heads=case.kv_heads,
            table_stride=width,
            page_shift=PAGE_SHIFT,
            window=case.window,
            causal=int(case.causal),
            scale=case.spec.scale,
            softcap=case.softcap,
        )
        return lambda: device.launch(variant, sizes, arguments), out

    return choose


def tiles(case: Case, step: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, first token, tokens, position), the longest contexts first, as a model plans them."""
    found, first = [], 0
    for row, (context, count) in enumerate(case.rows):
        for at in range(0, count, step):
            found.append((row, first + at, min(step, count - at), context - count + at))
        first += count
    return iter(sorted(found, key=lambda tile: -tile[3]))


def difference(device: Device, case: Case) -> float:
    """Greatest one between the two kernels."""
    choose, results = prepared(device, case), []
    for wgmma in (False, True):
        launch, out = choose(wgmma)
        launch()
        raw = download(device, out, np.uint16)
        wide = bf16_to_f32(raw) if case.dtype == "bf16" else raw.view(np.float16)
        results.append(wide.astype(np.float64))
    return float(np.abs(results[1] - results[0]).max())


def milliseconds(device: Device, launch: Callable[[], None], times: int) -> float:
    launch()
    device.synchronize()
    begin = device.event()
    for _ in range(times):
        launch()
    end = device.event()
    end.wait()
    return end.seconds_since(begin) * 1e3 / times


def report(device: Device, checked: Sequence[Case], timed: Sequence[Case], times: int) -> bool:
    """Prints; whether all is right."""
    right = True
    device.prepare(
        [kernel(case, which)[0] for case in (*checked, *timed) for which in (True, False)]
    )
    for dtype in ("bf16", "f16"):
        off = wrappers_off(device, dtype)
        right &= off < 1e-3
        print(f"wrappers, {dtype}: off by {off:.2g}: {'right' if off < 1e-3 else 'WRONG'}")
    for case in checked:
        off = difference(device, case)
        is_right = off < TOLERANCE[case.dtype]
        right &= is_right
        print(f"{case}: off by {off:.2g}: {'right' if is_right else 'WRONG'}", flush=True)
    for case in timed if right else ():
        choose = prepared(device, case)
        mma, wgmma = (milliseconds(device, choose(which)[0], times) for which in (False, True))
        rates = [case.flop / ms / 1e9 for ms in (mma, wgmma)]
        print(
            f"{case.rows} heads {case.heads} of {case.size}: mma {mma:.3f} ms,"
            f" {rates[0]:.0f} TFLOP/s; wgmma {wgmma:.3f} ms, {rates[1]:.0f} TFLOP/s",
            flush=True,
        )
    print(f"paged_prefill_wgmma: {'right' if right else 'WRONG'}")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="a small case, without a GPU")
    parser.add_argument("--untimed", action="store_true", help="for compute-sanitizer")
    chosen = parser.parse_args()
    from devices import opener

    device = opener(chosen.rehearse)()
    if chosen.rehearse:
        small = Case(((40, 20),), heads=2, kv_heads=1, size=64)
        return 0 if report(device, [small], [] if chosen.untimed else [small], 1) else 1
    if device.info.arch != ARCH:
        print(f"paged_prefill_wgmma: {device.info.name} is {device.info.arch}, it needs {ARCH}")
        return 0
    return 0 if report(device, CHECKED, [] if chosen.untimed else TIMED, 20) else 1


if __name__ == "__main__":
    sys.exit(main())
