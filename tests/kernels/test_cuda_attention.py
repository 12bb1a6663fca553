"""kv_store, paged_decode and paged_combine on the emulator, against the numpy reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.model import AttentionSpec
from vllmx_core.ops.attention import attention_mask, first_seen
from vllmx_core.reference import formulas as reference
from vllmx_cuda.kernel_specs import KERNELS, Variant
from vllmx_cuda.kernel_specs.attention import (
    KV_E4M3,
    KV_ELEM,
    KV_INT8,
    mma_group,
    prefill_keys,
    prefill_tile_tokens,
    store_vector,
    wgmma_tile_tokens,
)
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import (
    RELATIVE,
    Array,
    assert_near,
    inout,
    normal,
    on_device,
    options,
    wide,
)
from .cuda_attention import FAR, GONE, Case, Shape, as_far, kv_type, random_pages, run_decode

STORES = [
    Shape(),
    Shape(dtype="f16", size=128, heads=2, kv_heads=1, rotary_dim=128, norms=True),
    Shape(dtype="f32", size=20, heads=3, kv_heads=3, rotary_dim=20),
    Shape(size=80, rotary_dim=32, interleaved=True),
    Shape(size=256, heads=1, kv_heads=1, rotary_dim=64, norms=True, page_shift=3),
    Shape(size=128, rotary_dim=128, kv=KV_E4M3),
    Shape(size=96, rotary_dim=96, kv=KV_INT8, norms=True),
    Shape(dtype="f16", size=112, rotary_dim=56, interleaved=True, kv=KV_E4M3, norms=True),
    Shape(size=192, heads=3, kv_heads=1, rotary_dim=96, interleaved=True, kv=KV_INT8, page_shift=7),
    Shape(dtype="f16", rotary_dim=64, kv=KV_INT8),
    Shape(dtype="f32", rotary_dim=64, heads=1, kv_heads=1, kv=KV_E4M3),
    Shape(dtype="f32", size=48, kv=KV_INT8, norms=True),
    Shape(size=512, rotary_dim=128, heads=2, kv_heads=1, norms=True),
    Shape(dtype="f16", size=80, rotary_dim=32, norms=True, eps=-0.3),
    Shape(size=128, rotary_dim=128, kv=KV_INT8, norms=True, eps=-0.3),
]
STORED = [
    *((shape, 5) for shape in STORES),
    *((STORES[i], 1) for i in (0, 9, 10)),
    (STORES[9], 33),
]


@pytest.mark.parametrize(("shape", "tokens"), STORED, ids=str)
def test_kv_store(emulator: Emulator, shape: Shape, tokens: int) -> None:
    rng = np.random.default_rng(shape.size)
    blocks, page = 4, 1 << shape.page_shift
    total = shape.heads + 2 * shape.kv_heads
    qkv = normal(rng, (tokens, total * shape.size), shape.dtype, 2.0)
    positions = on_device(rng.integers(0, 50, tokens), np.int32)
    slots = rng.permutation(blocks * page)[:tokens]
    slots[2:3] = -1  # padding
    table = normal(rng, (50, shape.rotary_dim), "f32") if shape.rotary_dim else None
    norms = [normal(rng, (shape.size,), "f32") for _ in range(2)] if shape.norms else [None, None]
    pages = (blocks, shape.kv_heads, page, shape.size)
    k_pages, v_pages = (inout(np.zeros(pages), kv_type(shape)) for _ in range(2))
    scales = [inout(np.zeros(pages[:3]), np.float32) for _ in range(2)]
    q = empty((tokens, shape.heads, shape.size), qkv.dtype)
    variant = KERNELS["kv_store"].variant(
        **options(shape.dtype, VX_HEAD=shape.size, VX_KV=shape.kv, VX_VEC=store_vector(shape.size))
    )
    emulator.launch(
        variant,
        {"tokens": tokens, "heads": shape.heads, "kv_heads": shape.kv_heads},
        [qkv, positions, on_device(slots, np.int32), *norms, table, q, k_pages, v_pages,
         *(scales if shape.kv != KV_ELEM else [None, None]), shape.heads, shape.kv_heads,
         shape.rotary_dim, int(shape.interleaved), shape.page_shift, shape.eps],
    )  # fmt: skip
    want_q, want_k, want_v = rotated_heads(shape, wide(qkv), positions, table, norms)
    assert_near(q, want_q, shape.dtype, scale=2)
    for got, scale, want in ((k_pages, scales[0], want_k), (v_pages, scales[1], want_v)):
        expected = np.zeros(pages)
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // page, :, slot % page] = want[token]
        if shape.kv == KV_ELEM:
            assert_near(got, expected, shape.dtype, scale=2)
        else:
            dtype = "int8" if shape.kv == KV_INT8 else "fp8"
            codes, want_scale = kv_quant.quantise(expected.astype(np.float32), dtype)
            if got is v_pages:  # values are neither normed nor rotated: to the bit
                np.testing.assert_array_equal(got.view(codes.dtype), codes)
                np.testing.assert_array_equal(scale, want_scale)
            np.testing.assert_allclose(scale, want_scale, rtol=1e-5)
            step = 0.502 if dtype == "int8" else 16.1  # half the distance of codes at the top
            error = abs(wide(got) * scale[..., None] - expected)
            assert (error <= scale[..., None] * step).all()


@pytest.mark.parametrize("kv", [KV_E4M3, KV_INT8])
def test_vectors_without_a_scale(emulator: Emulator, kv: int) -> None:
    """Zeros, and what is not finite, as vllmx_core.kv_dtypes defines them."""
    qkv = np.ones((4, 3 * 16), np.float32)
    qkv[0, 32:], qkv[1, 40], qkv[2, 32:] = 0, np.nan, 1e-31
    qkv[3, 47] = -np.inf
    pages = [inout(np.zeros((1, 1, 8, 16)), kv_type(Shape(dtype="f32", kv=kv))) for _ in range(2)]
    scales = [inout(np.zeros((1, 1, 8)), np.float32) for _ in range(2)]
    emulator.launch(
        KERNELS["kv_store"].variant(**options("f32", VX_HEAD=16, VX_KV=kv, VX_VEC=1)),
        {"tokens": 4, "heads": 1, "kv_heads": 1},
        [on_device(qkv, np.float32), on_device([0] * 4, np.int32), on_device(range(4), np.int32),
         None, None, None, empty((4, 1, 16), np.float32), *pages, *scales, 1, 1, 0, 0, 3, 1e-6],
    )  # fmt: skip
    codes, want = kv_quant.quantise(qkv[:, 32:], "int8" if kv == KV_INT8 else "fp8")
    np.testing.assert_array_equal(scales[1][0, 0, :4], want)
    np.testing.assert_array_equal(pages[1].view(codes.dtype)[0, 0, :4], codes)


def rotated_heads(
    shape: Shape, qkv: Array, positions: Array, table: Array | None, norms: list[Array | None]
) -> list[Array]:
    split = qkv.reshape(len(qkv), -1, shape.size)
    q, k, v = np.split(split, [shape.heads, shape.heads + shape.kv_heads], axis=1)
    weights = [None if norm is None else wide(norm) for norm in norms]

    def normed(*heads: Array) -> list[Array]:
        return [
            x if w is None else reference.rms_norm(x, w, abs(shape.eps))
            for x, w in zip(heads, weights, strict=True)
        ]

    if shape.eps > 0:
        q, k = normed(q, k)
    if table is not None:
        angles = wide(table)[positions]
        q, k = (reference.rotate(x, angles, interleaved=shape.interleaved) for x in (q, k))
    if shape.eps < 0:
        q, k = normed(q, k)
    return [q, k, v]


CASES = [
    Case(),
    Case(size=128, heads=8, kv_heads=1),
    Case(dtype="f16", size=80, heads=6, window=30),
    Case(dtype="f32", size=20, heads=3, kv_heads=3, sinks=True),
    Case(dtype="f32", size=256, heads=2, kv_heads=1, softcap=5.0),
    Case(size=112, heads=10, window=70, sinks=True, softcap=20.0, page_shift=3),
    Case(size=192, heads=2, kv_heads=2, page_shift=7),
    Case(dtype="f32", size=8, heads=7, kv_heads=1),
    Case(size=128, kv=KV_E4M3),
    Case(size=96, kv=KV_INT8, sinks=True),
    Case(dtype="f16", size=32, heads=12, kv=KV_INT8, window=30, sinks=True),
    Case(dtype="f16", size=48, heads=1, kv_heads=1, kv=KV_E4M3, contexts=(1,)),
    Case(dtype="f32", size=28, kv=KV_INT8, contexts=(65, 64, 2)),
    Case(size=64, window=33, contexts=(81, 97, 20)),
    Case(size=64, window=-33, contexts=(81, 99, 100, 20)),
    Case(size=512, heads=4, kv_heads=1, contexts=(1, 77), sinks=True),
    Case(dtype="f32", size=512, heads=3, kv_heads=1, window=30, contexts=(50,)),
    Case(dtype="f16", size=320, heads=2, kv_heads=1, kv=KV_INT8, contexts=(40,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_decode(emulator: Emulator, case: Case) -> None:
    rng = np.random.default_rng(case.size)
    got, want = run_decode(emulator, case, rng)
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * RELATIVE[case.dtype])


def test_one_item_or_many_give_the_same(emulator: Emulator) -> None:
    """Rows that are not split are written by the decode kernel itself."""
    case = Case(dtype="f32", size=64, contexts=(40, 200), sinks=True)
    whole, _ = run_decode(emulator, replace(case, partition=512), np.random.default_rng(1))
    split, _ = run_decode(emulator, replace(case, partition=32), np.random.default_rng(1))
    np.testing.assert_allclose(whole, split, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Prefill(Case):
    queries: tuple[int, ...] = (70, 1, 33)
    contexts: tuple[int, ...] = (70, 150, 133)
    causal: bool = True
    arch: int = 80
    span: tuple[int, int] | None = None
    """Positions, last not included, whose queries see each other both ways, in every row."""


PREFILLS = [
    Prefill(size=128, heads=8, kv_heads=2),
    Prefill(dtype="f16", size=64, heads=6, kv_heads=2, sinks=True),
    Prefill(size=80, heads=2, kv_heads=2, window=40, page_shift=3),
    Prefill(size=192, heads=2, kv_heads=1, softcap=10.0),
    Prefill(size=256, heads=1, kv_heads=1, queries=(5, 64), contexts=(40, 64)),
    Prefill(size=96, heads=10, kv_heads=2, causal=False, window=50),
    Prefill(size=112, heads=16, kv_heads=1, causal=False),
    Prefill(size=128, kv=KV_E4M3),
    Prefill(size=64, kv=KV_INT8),
    Prefill(size=80, kv=KV_INT8, heads=10),
    Prefill(dtype="f16", size=96, kv=KV_E4M3, softcap=20.0),
    Prefill(size=112, kv=KV_E4M3, heads=12, sinks=True, page_shift=3),
    Prefill(dtype="f16", size=192, kv=KV_E4M3, window=40, queries=(5, 64), contexts=(40, 64)),
    Prefill(size=256, kv=KV_INT8, heads=14, queries=(5, 64), contexts=(40, 64)),
    Prefill(dtype="f16", size=192, kv=KV_INT8, arch=75, queries=(5, 64), contexts=(40, 64)),
    Prefill(dtype="f16", size=256, heads=8, window=40, softcap=20.0, sinks=True, arch=75),
    Prefill(size=64, heads=8, kv_heads=1, queries=(1, 17), contexts=(1, 65)),
    Prefill(dtype="f16", size=96, heads=9, kv_heads=1, causal=False, window=50, page_shift=3),
    Prefill(size=512, heads=8, kv_heads=1, queries=(5, 33), contexts=(40, 33), sinks=True),
    Prefill(dtype="f16", size=512, heads=1, kv_heads=1, queries=(40,), contexts=(70,), arch=90),
    Prefill(size=288, heads=6, kv_heads=2, kv=KV_E4M3, window=20, queries=(19,), contexts=(60,)),
    # windows that begin with a page, of which the one before is gone
    Prefill(size=64, window=40, contexts=(70, 152, 136)),
    Prefill(size=64, window=-40, contexts=(70, 152, 136)),
    # spans over tiles and steps of keys, up to the last key and not, longer than a window
    Prefill(size=64, heads=6, kv_heads=2, queries=(133, 70), contexts=(150, 70), span=(40, 131)),
    Prefill(dtype="f16", size=128, queries=(66, 9), contexts=(66, 30), window=20, span=(21, 66)),
    Prefill(
        size=192, heads=1, kv_heads=1, queries=(40,), contexts=(80,), kv=KV_INT8, span=(50, 60)
    ),
]


@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_paged_prefill(emulator: Emulator, case: Prefill) -> None:
    run_prefill(emulator, case)


def run_prefill(emulator: Emulator, case: Prefill) -> None:
    group = mma_group(case.heads // case.kv_heads)
    variant = KERNELS["paged_prefill"].variant(
        **options(
            case.dtype,
            VX_HEAD=case.size,
            VX_KV=case.kv,
            VX_GROUP=group,
            VX_KEYS=prefill_keys(case.size, case.arch),
        )
    )
    check_prefill(emulator, case, variant, prefill_tile_tokens(group, case.size))


# Several steps of keys with a boundary in each, rows that end early, a group that leaves rows over
WGMMA_PREFILLS = [
    Prefill(size=128, heads=8, kv_heads=2, queries=(70, 1, 33), contexts=(70, 300, 133)),
    Prefill(dtype="f16", size=64, heads=6, kv_heads=2, sinks=True, contexts=(70, 250, 133)),
    Prefill(size=64, heads=5, kv_heads=1, window=40, page_shift=3),
    Prefill(size=192, heads=1, kv_heads=1, softcap=10.0, causal=False),
    Prefill(size=256, heads=2, kv_heads=2, queries=(150,), contexts=(190,)),
    Prefill(dtype="f16", size=128, heads=2, kv_heads=1, causal=False, window=50),
    Prefill(size=64, heads=8, kv_heads=1, queries=(1, 17), contexts=(1, 65)),
    Prefill(size=64, window=40, contexts=(70, 152, 136)),
    Prefill(size=64, window=-40, contexts=(70, 152, 136)),
]


@pytest.mark.parametrize("case", WGMMA_PREFILLS, ids=str)
def test_paged_prefill_wgmma(emulator: Emulator, case: Prefill) -> None:
    group = mma_group(case.heads // case.kv_heads)
    variant = KERNELS["paged_prefill_wgmma"].variant(
        **options(case.dtype, VX_HEAD=case.size, VX_GROUP=group)
    )
    check_prefill(emulator, case, variant, wgmma_tile_tokens(group))


def check_prefill(emulator: Emulator, case: Prefill, variant: Variant, tile_tokens: int) -> None:
    rng = np.random.default_rng(case.size)
    rows, page = len(case.contexts), 1 << case.page_shift
    width, tokens = -(-max(case.contexts) // page), sum(case.queries)
    blocks = rows * width + 2
    block_rows = rng.permutation(blocks)[: rows * width].reshape(rows, width)
    if case.window and case.causal:  # pages that no query of the row sees are gone
        for row, (context, count) in enumerate(zip(case.contexts, case.queries, strict=True)):
            block_rows[row, : max(0, first_seen(context - count, case.window)) // page] = GONE
    q = normal(rng, (tokens, case.heads, case.size), case.dtype)
    pages = (blocks, case.kv_heads, page, case.size)
    keys, values = (random_pages(rng, pages, case) for _ in range(2))
    given = [as_far(array, case) for array in (keys[0], values[0], keys[1], values[1])]
    block_table = on_device(block_rows + (FAR if case.far else 0), np.int32)
    sinks = normal(rng, (case.heads,), "f32") if case.sinks else None
    tiles, out, scale = plan_tiles(case, tile_tokens), empty(q.shape, q.dtype), case.size**-0.5
    last = [last_seen(case, c - n, c) for c, n in zip(case.contexts, case.queries, strict=True)]
    seen = on_device(np.concatenate(last), np.int32) if case.span else None
    emulator.launch(
        variant,
        {"tiles": len(tiles), "heads": case.heads, "kv_heads": case.kv_heads},
        [q, *given, on_device(tiles, np.int32),
         on_device(case.contexts, np.int32), block_table, sinks,
         *([seen] if variant.kernel.entry == "paged_prefill" else []), out,
         case.heads, case.kv_heads, width, case.page_shift, case.window, int(case.causal), scale,
         case.softcap],
    )  # fmt: skip
    spec = AttentionSpec(
        0,
        case.heads,
        case.kv_heads,
        case.size,
        scale,
        window=abs(case.window) or None,
        chunked=case.window < 0,
        softcap=case.softcap or None,
        causal=case.causal,
    )
    wide_keys, wide_values = (
        wide(pages) * (1 if scales is None else wide(scales)[..., None])
        for pages, scales in (keys, values)
    )
    first, want = 0, np.empty(q.shape)
    for row, (context, count) in enumerate(zip(case.contexts, case.queries, strict=True)):
        positions = np.arange(context - count, context, dtype=np.int32)
        at = np.arange(context, dtype=np.int32)
        found = block_rows[row, at // page] % blocks  # gone pages are masked below
        k, v = (p[found, :, at % page] for p in (wide_keys, wide_values))
        mask = attention_mask(spec, positions, at, last[row])
        chunk = slice(first, first + count)
        extra = None if sinks is None else wide(sinks)
        want[chunk] = reference.attend(wide(q)[chunk], k, v, mask, spec, extra)
        first += count
    # the weights are rounded to elem before they meet the values
    np.testing.assert_allclose(wide(out), want, rtol=0, atol=6 * RELATIVE[case.dtype])


@pytest.mark.parametrize("kv", [KV_ELEM, KV_INT8])
@pytest.mark.parametrize("entry", ["paged_decode", "paged_decode_mma", "paged_prefill"])
def test_pages_beyond_what_32_bits_count(
    emulators: dict[str, Emulator], entry: str, kv: int
) -> None:
    """As those of a GPU with 80 GB: 2^32 elements of keys are 8 GiB."""
    own = Emulator(folder=emulators["forward"].folder)
    if entry == "paged_prefill":
        run_prefill(own, Prefill(contexts=(40,), queries=(9,), far=True, kv=kv))
        return
    case = Case(contexts=(40, 7), far=True, kv=kv)
    got, want = run_decode(own, case, np.random.default_rng(1), entry)
    np.testing.assert_allclose(got, want, rtol=0, atol=6 * RELATIVE[case.dtype])


def last_seen(case: Prefill, begin: int, end: int) -> Array:
    """The last position that queries at these positions see."""
    found = np.arange(begin, end, dtype=np.int32)
    first, last = case.span or (0, 0)
    found[(found >= first) & (found < last)] = min(last, end) - 1
    return found


def plan_tiles(case: Prefill, step: int) -> Array:
    """(row, first token, tokens, position) of each tile, and one that is unused."""
    tiles, first = [], 0
    for row, (context, count) in enumerate(zip(case.contexts, case.queries, strict=True)):
        for begin in range(0, count, step):
            size = min(step, count - begin)
            tiles.append((row, first + begin, size, context - count + begin))
        first += count
    return np.array([*tiles, (0, 0, 0, 0)])
