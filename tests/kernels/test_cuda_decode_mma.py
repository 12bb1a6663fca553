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
)
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import NUMPY_TYPES, RELATIVE, normal, on_device, options, wide
from .cuda_attention import KV_NUMPY, Case, run_decode

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
    if dtype == "f32":
        variant = KERNELS["paged_decode"].variant(**head, VX_VEC=decode_vector(64))
    else:
        variant = KERNELS["paged_decode_mma"].variant(**head)
    emulator.launch(
        variant,
        {"items": 1, "heads": 4, "kv_heads": 4},
        [q, pages, pages, scales, scales, on_device([[0, 0, 0, 1]], np.int32),
         on_device([0, 1], np.int32), on_device([0], np.int32), on_device([[0]], np.int32), None,
         out, empty((1, 4, 64), np.float32), empty((1, 4, 2), np.float32), 4, 4, 1, 0, 0, 0.125,
         0.0],
    )  # fmt: skip
    np.testing.assert_array_equal(wide(out), wide(codes).reshape(q.shape))


def test_groups_that_registers_have_room_for() -> None:
    assert [decode_group(n, 128) for n in (1, 5, 12, 16, 24, 32, 71)] == [1, 5, 12, 16, 12, 16, 1]
    assert [decode_group(n, 256) for n in (1, 8, 10, 12, 16)] == [1, 8, 5, 6, 8]
    variant = KERNELS["paged_decode_mma"].variant(
        **options("bf16", VX_HEAD=256, VX_KV=0, VX_GROUP=16)
    )
    with pytest.raises(ConfigError, match="at most 8"):
        variant.launch({"items": 1, "heads": 16, "kv_heads": 1})


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_shared_memory_that_every_gpu_has(size: int) -> None:
    """Turing has 64 KB an SM: two blocks of the greatest, of which registers allow no more."""
    kernel = KERNELS["paged_decode_mma"]
    group = decode_group(16, size)
    variant = kernel.variant(**options("f16", VX_HEAD=size, VX_KV=0, VX_GROUP=group))
    launch = variant.launch({"items": 1, "heads": 16, "kv_heads": 1})
    assert launch.shared_bytes <= 32 << 10
