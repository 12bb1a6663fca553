"""What the tests of the attention kernels share: shapes, pages, and decoding against numpy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.model import AttentionSpec
from vllmx_core.ops.attention import first_seen
from vllmx_core.reference import formulas as reference
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_cuda.kernel_specs.attention import (
    KV_E4M3,
    KV_ELEM,
    KV_INT8,
    decode_group,
    decode_vector,
    group_tile,
)
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import NUMPY_TYPES, Array, inout, normal, on_device, options, wide


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    page_shift: int = 4
    dtype: str = "bf16"
    kv: int = KV_ELEM
    rotary_dim: int = 0
    interleaved: bool = False
    norms: bool = False
    eps: float = 1e-6
    """Below 0: norms follow the rotation."""


GONE = 1 << 22
"""In a block table: a page that was given back. Far from all others, and no kernel's 32-bit offsets
come round to a page that is there."""
FAR = 1 << 21
"""Pages before the first one of a case with `far`: more elements than 32 bits count."""
KV_NUMPY: dict[int, Any] = {KV_E4M3: ml_dtypes.float8_e4m3fn, KV_INT8: np.int8}


def kv_type(shape: Shape) -> Any:
    return KV_NUMPY.get(shape.kv, NUMPY_TYPES[shape.dtype])


@dataclass(frozen=True)
class Case(Shape):
    contexts: tuple[int, ...] = (1, 77, 160, 33)
    window: int = 0
    """As `AttentionSpec.reach`."""
    softcap: float = 0.0
    sinks: bool = False
    partition: int = 64
    far: bool = False
    """Whether pages lie as far from the first one as on a GPU with much memory; for the emulator
    without its checker, which would keep books of all between."""


def run_decode(
    emulator: Emulator, case: Case, rng: np.random.Generator, entry: str = "paged_decode"
) -> tuple[Array, Array]:
    """(got, want), both (T, H, D); one padding token at the end must become zeros."""
    rows, page = len(case.contexts), 1 << case.page_shift
    width = -(-max(case.contexts) // page)
    blocks = rows * width + 2
    table = rng.permutation(blocks)[: rows * width].reshape(rows, width)
    for row, context in enumerate(case.contexts if case.window else ()):
        table[row, : max(0, first_seen(context - 1, case.window)) // page] = GONE
    on_table = on_device(table + (FAR if case.far else 0), np.int32)
    q = normal(rng, (rows + 1, case.heads, case.size), case.dtype)
    pages = (blocks, case.kv_heads, page, case.size)
    keys, values = (random_pages(rng, pages, case) for _ in range(2))
    given = [as_far(array, case) for array in (keys[0], values[0], keys[1], values[1])]
    sinks = normal(rng, (case.heads,), "f32") if case.sinks else None
    items, first = plan_items(case)
    capacity = len(items)
    partial = empty((capacity, case.heads, case.size), np.float32)
    by_mma = entry == "paged_decode_mma"
    weights, out = empty((capacity, case.heads, 2), np.float32), empty(q.shape, q.dtype)
    scale = case.size**-0.5
    head = options(case.dtype, VX_HEAD=case.size, VX_KV=case.kv)
    group = case.heads // case.kv_heads
    variant_options = {
        **head,
        "VX_VEC": decode_vector(case.size),
        "VX_GROUP": group_tile(group, case.size),
    }
    if by_mma:
        tile = decode_group(group, case.size)
        variant = KERNELS[entry].variant(**head, VX_GROUP=tile, VX_STORE=0)
    else:
        variant = KERNELS[entry].variant(**variant_options)
    arrivals = inout(np.zeros((rows + 1) * case.heads), np.uint32)
    joins = [arrivals, None, None, None, None, rows + 1] if by_mma else []
    first_item = on_device(first, np.int32)
    positions = on_device([*(n - 1 for n in case.contexts), 0], np.int32)
    emulator.launch(
        variant,
        {"items": capacity, "heads": case.heads, "kv_heads": case.kv_heads},
        [q, *given, on_device(items, np.int32), first_item,
         positions, on_table, sinks, out, partial, weights, *joins, case.heads, case.kv_heads,
         width, case.page_shift, case.window, scale, case.softcap,
         *([0, 0, 0.0] if by_mma else [])],
    )  # fmt: skip
    assert not arrivals.any(), "ready for the next step"
    if not by_mma:
        emulator.launch(
            KERNELS["paged_combine"].variant(**variant_options),
            {"tokens": rows + 1, "heads": case.heads},
            [partial, weights, first_item, sinks, out, case.heads],
        )
    spec = AttentionSpec(
        0,
        case.heads,
        case.kv_heads,
        case.size,
        scale,
        window=abs(case.window) or None,
        chunked=case.window < 0,
        softcap=case.softcap or None,
    )
    want = np.zeros(q.shape)
    wide_keys, wide_values = (
        wide(pages) * (1 if scales is None else wide(scales)[..., None])
        for pages, scales in (keys, values)
    )
    for row, context in enumerate(case.contexts):
        at = np.arange(context, dtype=np.int32)
        k, v = (p[table[row, at // page] % blocks, :, at % page] for p in (wide_keys, wide_values))
        mask = reference.attention_mask(spec, at[-1:], at)
        extra = None if sinks is None else wide(sinks)
        want[row] = reference.attend(wide(q)[row : row + 1], k, v, mask, spec, extra)[0]
    return wide(out), want


def random_pages(
    rng: np.random.Generator, shape: tuple[int, ...], case: Case
) -> tuple[Array, Array | None]:
    """(pages, scales); what no row has written is NaN where the type has one."""
    if case.kv != KV_ELEM:
        dtype = "int8" if case.kv == KV_INT8 else "fp8"
        codes, scales = kv_quant.quantise(rng.standard_normal(shape), dtype)
        return on_device(codes.view(kv_type(case)), kv_type(case)), on_device(scales, np.float32)
    return on_device(rng.standard_normal(shape), kv_type(case)), None


def as_far(pages: Array | None, case: Case) -> Array | None:
    """What a kernel is given of pages: of far ones the address of the page that is FAR before the
    first, where nothing lies."""
    if pages is None or not case.far:
        return pages
    address = pages.ctypes.data - FAR * pages[0].nbytes
    nothing = np.frombuffer((ctypes.c_uint8 * 1).from_address(address), np.uint8)[:0]
    assert nothing.ctypes.data == address
    return nothing


def plan_items(case: Case) -> tuple[Array, list[int]]:
    """Partitions of each row, two unused items at the end, and one token without any."""
    items, first = [], [0]
    for row, context in enumerate(case.contexts):
        for begin in range(0, context, case.partition):
            items.append((row, row, begin, min(begin + case.partition, context)))
        first.append(len(items))
    return np.array([*items, (-1, 0, 0, 0), (-1, 0, 0, 0)]), [*first, len(items)]
