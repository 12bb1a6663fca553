"""The emulator's twins of the PTX wrappers, against what PTX's documentation says they do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import assert_near, on_device, options, wide

E4M3 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_wrappers(emulator: Emulator, dtype: str) -> None:
    random = np.random.default_rng(4)
    kind = {"bf16": "bfloat16", "f16": "float16"}[dtype]
    a, b = (on_device(random.standard_normal((n, 16)), kind) for n in (16, 8))
    words = on_device(random.integers(0, 1 << 32, (96, 4), np.uint64), np.uint32)
    products, fragments = empty((2, 16, 8), np.float32), empty((2, 32, 4), np.uint32)
    copied, loaded = empty((2, 32, 4), np.uint32), empty((32, 4), np.uint32)
    dots, fused = empty(32, np.int32), empty(32, np.uint32)
    permuted, coded = empty((4, 32), np.uint32), empty((16, 8), np.float32)
    emulator.launch(
        KERNELS["wrappers"].variant(**options(dtype)),
        {},
        [a, b, words, products, fused, coded, permuted, fragments, copied, loaded, dots],
    )
    once = wide(a) @ wide(b).T
    np.testing.assert_allclose(products, np.stack([once, 2 * once]), rtol=1e-5, atol=1e-5)
    pairs, row, pair = wide(a).reshape(16, 8, 2), np.arange(32) // 4, np.arange(32) % 4
    sums = pairs[row, pair] * pairs[row + 8, pair] + pairs[row, pair + 4]  # (32, 2)
    assert_near(fused.view(a.dtype).reshape(32, 2), sums, dtype)
    codes = (words[:48].view(np.uint8) & 0x8F | 0x30).view(E4M3).reshape(24, 32)
    np.testing.assert_array_equal(coded, wide(codes[:16]) @ wide(codes[16:]).T)

    pairs8 = np.ascontiguousarray(words[:32, :2]).view(np.uint8)  # (32, 8)
    for index, order in enumerate((0x0123, 0x7654, 0x1804, 0xDAF9)):
        nibbles = [order >> 4 * i & 15 for i in range(4)]
        chosen = pairs8[:, [nibble & 7 for nibble in nibbles]]
        spread = np.where(chosen & 128, 255, 0).astype(np.uint8)
        want = np.ascontiguousarray(np.where([n & 8 for n in nibbles], spread, chosen))
        np.testing.assert_array_equal(permuted[index], want.view(np.uint32)[:, 0])

    tile = words[:32].view(np.uint16).reshape(4, 8, 8)  # four matrices of 8 rows
    lanes = np.arange(32)
    for turned, matrices in enumerate((tile, tile.transpose(0, 2, 1))):
        low = matrices[:, lanes // 4, lanes % 4 * 2].T.astype(np.uint32)  # (32, 4)
        high = matrices[:, lanes // 4, lanes % 4 * 2 + 1].T.astype(np.uint32)
        np.testing.assert_array_equal(fragments[turned], low | high << 16)

    rows = words[32:64].view(np.uint8).reshape(32, 16)
    kept = np.where(np.arange(16) < lanes[:, None] % 17, rows, 0).astype(np.uint8)
    np.testing.assert_array_equal(copied[0], kept.view(np.uint32))
    np.testing.assert_array_equal(copied[1], words[32:64])
    np.testing.assert_array_equal(loaded, words[64:])
    bytes_of = words[64:].view(np.int8).reshape(32, 4, 4).astype(np.int64)
    sums = (bytes_of[:, 0] * bytes_of[:, 1]).sum(-1) + words[64:, 2].view(np.int32)
    np.testing.assert_array_equal(dots, sums.astype(np.int32))
