"""paged_decode_mma on the emulator, against numpy: every head size, type of pages and elem."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import ConfigError
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_cuda.kernel_specs.attention import (
    KV_E4M3,
    KV_INT8,
    KV_TYPES,
    decode_group,
    decode_vector,
    store_vector,
)
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import NUMPY_TYPES, RELATIVE, inout, normal, on_device, options, wide
from .cuda_attention import KV_NUMPY, Case, plan_items, random_pages, run_decode

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
GROUPS = (4, 5, 6, 7, 8, 12, 16)


def matrix() -> list[Any]:
    """Each head size with each type of pages and elem, and with groups in turn; half of them slow.
    The lengths end within a tile of 8 keys, of 16, and of 64, and items begin within one."""
    cases = []
    for i, (size, kv, dtype) in enumerate(product(HEAD_SIZES, KV_TYPES, ("bf16", "f16"))):
        group = GROUPS[(i // 2 + i) % len(GROUPS)]
        case = Case(dtype=dtype, size=size, kv=kv, heads=2 * group, contexts=(1, 77, 131))
        cases.append(pytest.param(case, marks=[pytest.mark.slow] if (i + i // 2) % 2 else []))
    return cases


SPECIAL = [
    Case(dtype="f16", size=64, heads=3, kv_heads=1, window=30, softcap=20.0, contexts=(1, 65)),
    Case(dtype="f16", size=64, heads=16, kv_heads=1, sinks=True, partition=100),
    Case(size=64, heads=3, kv_heads=3, window=30, softcap=20.0, page_shift=3),
    Case(size=80, heads=10, window=70, sinks=True, softcap=20.0, page_shift=3),
    Case(size=192, heads=12, kv_heads=1, partition=512),
    Case(size=256, heads=20, kv_heads=2, sinks=True, partition=512),
    Case(size=256, heads=2, kv_heads=1, kv=KV_INT8, window=50, page_shift=7),
    Case(size=16, heads=4, kv_heads=4, contexts=(1, 77)),
    Case(size=48, heads=8, kv_heads=1, kv=KV_E4M3, contexts=(1, 77)),
    Case(size=160, heads=11, kv_heads=1, contexts=(1, 77)),
    Case(size=224, heads=8, kv_heads=1, contexts=(1, 77)),
]


def name(case: Case) -> str:
    return f"head{case.size}_pages{case.kv}_{case.dtype}_group{case.heads // case.kv_heads}"


@pytest.mark.parametrize("case", [*matrix(), *SPECIAL], ids=name)
def test_paged_decode_mma(emulator: Emulator, case: Case) -> None:
    rng = np.random.default_rng(case.size)
    got, want = run_decode(emulator, case, rng, "paged_decode_mma")
    # the weights are rounded to elem before they meet the values
    np.testing.assert_allclose(got, want, rtol=0, atol=6 * RELATIVE[case.dtype])


STORING = [
    Case(size=128, heads=4, kv_heads=1, rotary_dim=128, norms=True, contexts=(1, 77, 128)),
    Case(dtype="f16", size=64, heads=6, kv_heads=2, rotary_dim=32, interleaved=True, sinks=True),
    Case(size=80, heads=3, kv_heads=3, rotary_dim=80, kv=KV_E4M3, window=30, page_shift=3),
    Case(dtype="f16", size=256, heads=8, kv_heads=1, rotary_dim=64, norms=True, kv=KV_INT8),
    Case(size=112, heads=32, kv_heads=2, norms=True, eps=-0.3, rotary_dim=112, softcap=20.0),
    Case(size=16, heads=2, kv_heads=1, contexts=(1, 33), partition=32),
]


@pytest.mark.parametrize("case", STORING, ids=name)
def test_a_token_stores_its_own_key(emulator: Emulator, case: Case) -> None:
    """One launch does what kv_store and attention do, to the bit: rows of a token each, in pages
    that hold nothing at their positions before."""
    rng, rows, page = np.random.default_rng(case.size), len(case.contexts), 1 << case.page_shift
    total, width = case.heads + 2 * case.kv_heads, -(-max(case.contexts) // page)
    table = rng.permutation(rows * width).reshape(rows, width)
    positions = np.array([n - 1 for n in case.contexts])
    slots = table[np.arange(rows), positions // page] * page + positions % page
    qkv = normal(rng, (rows + 1, total * case.size), case.dtype)
    rope = normal(rng, (max(case.contexts), case.rotary_dim), "f32") if case.rotary_dim else None
    norms = [normal(rng, (case.size,), "f32") for _ in range(2)] if case.norms else [None, None]
    sinks = normal(rng, (case.heads,), "f32") if case.sinks else None
    shape = (rows * width, case.kv_heads, page, case.size)
    before = [random_pages(rng, shape, case) for _ in range(2)]
    items, first = plan_items(case)
    given = [on_device(items, np.int32), on_device(first, np.int32),
             on_device([*positions, 0], np.int32), on_device(table, np.int32), sinks]  # fmt: skip
    head = options(case.dtype, VX_HEAD=case.size, VX_KV=case.kv)
    heads, turn = (case.heads, case.kv_heads), (case.rotary_dim, int(case.interleaved), case.eps)
    group, sizes = case.heads // case.kv_heads, {"heads": case.heads, "kv_heads": case.kv_heads}
    found = []
    for store in (0, 1):
        pages = [None if a is None else inout(a, a.dtype)
                 for a in (before[0][0], before[1][0], before[0][1], before[1][1])]  # fmt: skip
        q, out = (empty((rows + 1, case.heads, case.size), qkv.dtype) for _ in range(2))
        if not store:
            emulator.launch(
                KERNELS["kv_store"].variant(**head, VX_VEC=store_vector(case.size)),
                {"tokens": rows + 1, **sizes},
                [qkv, given[2], on_device([*slots, -1], np.int32), *norms, rope, q, *pages, *heads,
                 *turn[:2], case.page_shift, case.eps],
            )  # fmt: skip
        arrivals = inout(np.zeros((rows + 1) * case.heads), np.uint32)
        scratch = [empty((len(items), case.heads, n), np.float32) for n in (case.size, 2)]
        vectors = [given[2], *norms, rope] if store else [None] * 4
        emulator.launch(
            KERNELS["paged_decode_mma"].variant(**head, VX_GROUP=group, VX_STORE=store),
            {"items": len(items), **sizes},
            [qkv if store else q, *pages, *given, out, *scratch, arrivals, *vectors, rows + 1,
             *heads, width, case.page_shift, case.window, case.size**-0.5, case.softcap, *turn],
        )  # fmt: skip
        assert not arrivals.any()
        found.append([out, *(a for a in pages if a is not None)])
    for want, got in zip(*found, strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    assert not wide(found[1][0])[-1].any(), "a token without items"


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("kv", [KV_E4M3, KV_INT8])
def test_every_code_has_its_value(emulator: Emulator, kv: int, dtype: str) -> None:
    """A token that sees itself alone answers with its value: all codes are exact in all types."""
    codes = np.arange(256, dtype=np.uint8).view(KV_NUMPY[kv])
    codes[~np.isfinite(wide(codes))] = 0  # kv_store writes none
    pages = on_device(codes.reshape(1, 4, 1, 64), KV_NUMPY[kv])
    scales = on_device(np.ones((1, 4, 1)), np.float32)
    q = normal(np.random.default_rng(0), (1, 4, 64), dtype)
    out = empty(q.shape, NUMPY_TYPES[dtype])
    head = options(dtype, VX_HEAD=64, VX_KV=kv, VX_GROUP=1)
    joins, more = [], []
    if dtype == "f32":
        variant = KERNELS["paged_decode"].variant(**head, VX_VEC=decode_vector(64))
    else:
        variant = KERNELS["paged_decode_mma"].variant(**head, VX_STORE=0)
        joins, more = [inout(np.zeros(4), np.uint32), None, None, None, None, 1], [0, 0, 0.0]
    emulator.launch(
        variant,
        {"items": 1, "heads": 4, "kv_heads": 4},
        [q, pages, pages, scales, scales, on_device([[0, 0, 0, 1]], np.int32),
         on_device([0, 1], np.int32), on_device([0], np.int32), on_device([[0]], np.int32), None,
         out, empty((1, 4, 64), np.float32), empty((1, 4, 2), np.float32), *joins, 4, 4, 1, 0, 0,
         0.125, 0.0, *more],
    )  # fmt: skip
    np.testing.assert_array_equal(wide(out), wide(codes).reshape(q.shape))


def test_groups_that_registers_have_room_for() -> None:
    assert [decode_group(n, 128) for n in (1, 5, 12, 16, 24, 32, 71)] == [1, 5, 12, 16, 12, 16, 1]
    assert [decode_group(n, 256) for n in (1, 8, 10, 12, 16)] == [1, 8, 5, 6, 8]
    variant = KERNELS["paged_decode_mma"].variant(
        **options("bf16", VX_HEAD=256, VX_KV=0, VX_GROUP=16, VX_STORE=0)
    )
    with pytest.raises(ConfigError, match="at most 8"):
        variant.launch({"items": 1, "heads": 16, "kv_heads": 1})


@pytest.mark.parametrize("store", [0, 1])
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_shared_memory_that_every_gpu_has(size: int, store: int) -> None:
    """Turing has 64 KB an SM: two blocks of the greatest, of which registers allow no more."""
    kernel = KERNELS["paged_decode_mma"]
    group = decode_group(16, size)
    variant = kernel.variant(
        **options("f16", VX_HEAD=size, VX_KV=0, VX_GROUP=group, VX_STORE=store)
    )
    launch = variant.launch({"items": 1, "heads": group, "kv_heads": 1})
    assert launch.shared_bytes <= 32 << 10
