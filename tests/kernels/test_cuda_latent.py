"""Latent attention on the emulator: what is kept, what is attended to, products of each head."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from vllmx_core.arrays import NUMPY
from vllmx_core.ops.attention import rotate
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_testing.cuda.emulator import Emulator

from .cuda_arrays import Array, assert_near, inout, normal, on_device, options, wide

PAGE_SHIFT = 2
# dtype, tokens, heads, rank, nope, rotary, interleaved
STORES = [
    ("f32", 3, 2, 20, 6, 2, 1),
    ("bf16", 1, 1, 300, 8, 16, 0),
    ("f16", 3, 3, 33, 5, 4, 1),
    ("f32", 1, 1, 1, 1, 2, 0),
    ("bf16", 3, 1, 32, 4, 4, 1),
    ("f16", 1, 2, 8, 4, 2, 0),
]


@pytest.mark.parametrize("case", STORES, ids=lambda case: "-".join(map(str, case)))
def test_store(emulator: Emulator, case: tuple[str, *tuple[int, ...]]) -> None:
    """Padding is not stored; the absorbed part of the queries stays as it is."""
    dtype, tokens, heads, rank, nope, rotary, interleaved = case
    rng, row = np.random.default_rng(rank), rank + rotary
    latent = normal(rng, (tokens, row), dtype, 2.0)
    q = normal(rng, (tokens, heads, nope + rotary), dtype)
    positions = on_device(rng.integers(0, 9, tokens), np.int32)
    slots = rng.permutation(12)[:tokens]
    slots[tokens - 1] = slots[tokens - 1] if tokens == 1 else -1
    norm, rope = normal(rng, (rank,), "f32"), normal(rng, (9, rotary), "f32")
    before = normal(rng, (tokens, heads, row), dtype)
    queries, pages = inout(before, before.dtype), inout(np.zeros((12, row)), before.dtype)
    arguments = [latent, q, positions, on_device(slots, np.int32), norm, rope, queries, pages]
    shape = (heads, rank, nope, rotary, interleaved, 1e-5)
    sizes = {"tokens": tokens, "heads": heads}
    emulator.launch(KERNELS["latent_store"].variant(**options(dtype)), sizes, [*arguments, *shape])

    table, turn = wide(rope)[positions], {"interleaved": bool(interleaved)}
    np.testing.assert_array_equal(queries[..., :rank], before[..., :rank])
    assert_near(queries[..., rank:], rotate(wide(q)[..., nope:], table, **turn), dtype, scale=2)
    key = rotate(wide(latent)[:, None, rank:], table, **turn)[:, 0]
    normed = NUMPY.rms_norm(wide(latent)[:, :rank], wide(norm), 1e-5)
    want = np.zeros((12, row))
    for token, slot in enumerate(slots):
        if slot >= 0:
            want[slot] = np.concatenate([normed[token], key[token]])
    assert_near(pages, want, dtype, scale=3)


# dtype, heads, rank, rotary, positions of each token's items
DECODES: list[tuple[str, int, int, int, list[list[int]]]] = [
    ("f32", 3, 20, 2, [[5], [1]]),
    ("f32", 9, 33, 8, [[40, 3], [], [1]]),
    ("bf16", 16, 300, 4, [[33], [2], [4]]),
    ("f16", 1, 8, 2, [[32, 32, 1], [7], [1]]),
    ("bf16", 1, 1, 2, [[2, 1]]),
    ("f32", 1, 1, 2, [[1]]),
    ("f16", 3, 257, 2, [[9]]),
    ("bf16", 2, 3, 2, [[1]] * 3),
]


@pytest.mark.parametrize("case", DECODES, ids=lambda case: "-".join(map(str, case)))
def test_decode(emulator: Emulator, case: tuple[str, int, int, int, list[list[int]]]) -> None:
    dtype, heads, rank, rotary, parts = case
    rng, row, tokens = np.random.default_rng(rank), rank + rotary, len(parts)
    longest = max(map(sum, parts))
    blocks = -(-longest // (1 << PAGE_SHIFT))
    table = rng.permutation(tokens * blocks + 2)[: tokens * blocks].reshape(tokens, blocks)
    pages = normal(rng, ((tokens * blocks + 2) << PAGE_SHIFT, row), dtype)
    queries = normal(rng, (tokens, heads, row), dtype)
    items, first = [], [0]
    for token, lengths in enumerate(parts):
        ends = np.cumsum([0, *lengths])
        items += [[token, token, a, b] for a, b in itertools.pairwise(ends)]
        first.append(len(items))
    items.append([-1, 0, 0, 0])
    out = inout(np.full((tokens, heads, rank), 7), pages.dtype)
    partial = inout(np.zeros((len(items), heads, rank)), np.float32)
    weights = inout(np.zeros((len(items), heads, 2)), np.float32)
    first_item = on_device(first, np.int32)
    sizes = {"items": len(items), "heads": heads, "rank": rank, "rotary": rotary}
    tables = on_device(table, np.int32)
    operands = [queries, pages, on_device(items, np.int32), first_item, tables, out]
    shape = (heads, rank, rotary, blocks, PAGE_SHIFT, 0.3)
    decode = KERNELS["latent_decode"].variant(**options(dtype))
    emulator.launch(decode, sizes, [*operands, partial, weights, *shape, None, None, 0])
    joined = [partial, weights, first_item, out, heads, rank]
    sizes = {"tokens": tokens, "heads": heads}
    emulator.launch(KERNELS["latent_combine"].variant(**options(dtype)), sizes, joined)
    for token, lengths in enumerate(parts):
        slots = table[token][np.arange(sum(lengths)) >> PAGE_SHIFT] << PAGE_SHIFT
        rows = wide(pages)[slots + np.arange(sum(lengths)) % (1 << PAGE_SHIFT)]
        scores = wide(queries[token]) @ rows.T * 0.3
        raised = np.exp(scores - scores.max(axis=1, initial=-1e30, keepdims=True))
        want = raised @ rows[:, :rank] / np.maximum(raised.sum(axis=1, keepdims=True), 1e-30)
        assert_near(out[token], want, dtype, scale=4)


# dtype, tokens, heads, outputs, inputs, tile, f32 answers
HEADS = [
    ("f32", 1, 1, 1, 1, 1, 1),
    ("f32", 5, 3, 7, 33, 4, 0),
    ("f16", 1, 2, 1, 1, 1, 0),
    ("f16", 3, 2, 5, 36, 2, 1),
    ("f16", 2, 1, 3, 33, 2, 0),
    ("bf16", 1, 2, 1, 1, 1, 0),
    ("bf16", 9, 2, 9, 33, 8, 1),
]


@pytest.mark.parametrize("case", HEADS, ids=lambda case: "-".join(map(str, case)))
def test_products_of_heads(emulator: Emulator, case: tuple[str, *tuple[int, ...]]) -> None:
    """Products read from the middle of a row and write into the middle of a row."""
    dtype, tokens, heads, outputs, inputs, tile, out = case
    rng = np.random.default_rng(inputs)
    x = normal(rng, (tokens, heads, inputs + 3), dtype)
    w = normal(rng, (heads, outputs, inputs), dtype)
    y: Array = inout(np.full((tokens, heads, outputs + 2), 5), np.float32 if out else x.dtype)
    vec = vector_width(inputs, inputs + 3)
    variant = KERNELS["heads_gemv"].variant(
        **options(dtype, VX_VEC=vec, VX_TOKENS=tile, VX_OUT=out)
    )
    strides = (x[0].size, x.shape[2], y[0].size, y.shape[2])
    sizes = {"tokens": tokens, "outputs": outputs, "heads": heads}
    emulator.launch(variant, sizes, [x, w, y, tokens, outputs, inputs, *strides])
    want = np.einsum("thi,hoi->tho", wide(x)[..., :inputs], wide(w))
    assert_near(y[..., :outputs], want, "f32" if out else dtype, scale=4)
    assert (y[..., outputs:] == 5).all()
