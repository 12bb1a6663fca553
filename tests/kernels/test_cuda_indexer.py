"""The indexer of sparse attention on the emulator: keys and queries, scores, picks, and latent
attention to what was picked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from vllmx_core.arrays import NUMPY
from vllmx_core.ops.attention import rotate
from vllmx_core.ops.indexer import index_scores, pick
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_cuda.kernel_specs.indexer import MAX_SHARED, shared_floats
from vllmx_testing.cuda.emulator import Emulator

from .cuda_arrays import assert_near, inout, normal, on_device, options, wide

PAGE_SHIFT = 2
# dtype, heads, size, rotary, interleaved
STORES = [("f32", 2, 9, 4, 1), ("bf16", 1, 140, 140, 0), ("f16", 3, 8, 2, 0)]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("case", STORES, ids=lambda case: "-".join(map(str, case)))
def test_store(emulator: Emulator, case: tuple[str, *tuple[int, ...]], tokens: int) -> None:
    """Padding is not stored."""
    dtype, heads, size, rotary, interleaved = case
    rng = np.random.default_rng(size)
    q, key = normal(rng, (tokens, heads, size), dtype), normal(rng, (tokens, size), dtype)
    positions = on_device([3, 0, 7][:tokens], np.int32)
    slots = on_device([5, -1, 1][:tokens], np.int32)
    rope = normal(rng, (9, rotary), "f32")
    queries, pages = inout(np.zeros(q.shape), q.dtype), inout(np.zeros((8, size)), q.dtype)
    variant = KERNELS["index_store"].variant(**options(dtype))
    shape = (heads, size, rotary, interleaved)
    arguments = [q, key, positions, slots, rope, queries, pages, *shape]
    emulator.launch(variant, {"tokens": tokens, "heads": heads}, arguments)
    table, turn = wide(rope)[positions], {"interleaved": bool(interleaved)}
    kept = rotate(wide(key)[:, None], table, **turn)[:, 0]
    want, turned = np.zeros((8, size)), rotate(wide(q), table, **turn)
    want[5] = kept[0]
    if tokens > 1:
        want[1], turned[1] = kept[2], 0
    assert_near(pages, want, dtype, scale=2)
    assert_near(queries, turned, dtype, scale=2)


# dtype, heads, size, picked, positions of the tokens
SCORES = [
    ("f32", 5, 9, 3, [40, 2, 300, 8]),
    ("f32", 1, 2, 3, [1, 4]),
    ("bf16", 1, 64, 1, [1, 0, 33, 2]),
    ("bf16", 3, 1, 1, [1, 0]),
    ("f16", 9, 8, 30, [255, 256, 29, 7]),
    ("f16", 1, 1, 1, [2, 2]),
    ("bf16", 64, 128, 3, [1, 40]),  # as DeepSeek-V3.2
]


@pytest.mark.parametrize("case", SCORES, ids=lambda case: "-".join(map(str, case[:4])))
def test_scores(emulator: Emulator, case: tuple[str, int, int, int, list[int]]) -> None:
    """Of the tokens from the second on; one that picks all has none."""
    dtype, heads, size, picked, last = case
    rng, tokens, stride = np.random.default_rng(size), len(last), max(last) + 4
    blocks = -(-stride // (1 << PAGE_SHIFT))
    table = rng.permutation(tokens * blocks).reshape(tokens, blocks)
    pages = normal(rng, ((tokens * blocks) << PAGE_SHIFT, size), dtype)
    queries = normal(rng, (tokens, heads, size), dtype)
    weights = normal(rng, (tokens, heads), dtype)
    items = on_device([[t, t, 0, last[t] + 1] for t in range(tokens)], np.int32)
    starts = on_device(range(tokens + 1), np.int32)
    scores = inout(np.full((tokens - 1, stride), 7), np.float32)
    operands = [queries, weights, pages, on_device(last, np.int32), items, starts]
    limits = (1, heads, size, picked, stride, blocks, PAGE_SHIFT)
    sizes = {"tokens": tokens - 1, "heads": heads, "size": size, "stride": stride}
    variant = KERNELS["index_score"].variant(**options(dtype))
    emulator.launch(variant, sizes, [*operands, on_device(table, np.int32), scores, *limits])
    for index, token in enumerate(range(1, tokens)):
        seen = last[token] + 1
        want = np.full((1, stride), 7.0)
        if seen > picked:
            at = np.arange(seen)
            slots = (table[token][at >> PAGE_SHIFT] << PAGE_SHIFT) + at % (1 << PAGE_SHIFT)
            some = slice(token, token + 1)
            want[:, :seen] = index_scores(
                wide(queries)[some], wide(pages)[slots], wide(weights)[some], NUMPY
            )
        assert_near(scores[index], want[0], "f32", scale=8 * size)


@pytest.mark.parametrize(("count", "last"), [(3, [2, 600, 9]), (300, [700, 299, 900]), (1, [0])])
def test_picks(emulator: Emulator, count: int, last: list[int]) -> None:
    """Few different scores, so that ties decide, zeros of both signs and what is no number."""
    rng, tokens = np.random.default_rng(count), len(last)
    stride = max(last) + 1
    values = rng.choice([-np.inf, -1.5, -0.0, 0.0, 1e-30, 2.0, np.nan, np.inf], (tokens, stride))
    values[-1] = rng.standard_normal(stride)
    scores = on_device(values, np.float32)
    positions, starts = on_device(last, np.int32), on_device(range(tokens + 1), np.int32)
    picked = inout(np.full((tokens, count), 7), np.int32)
    variant = KERNELS["index_pick"].variant(**options("f32"))
    arguments = [scores, positions, starts, picked, 0, count, stride]
    emulator.launch(variant, {"tokens": tokens}, arguments)
    padded = np.pad(scores, ((0, 0), (0, max(0, count - stride))))
    np.testing.assert_array_equal(picked, pick(padded, positions, count, NUMPY))


def test_attention_to_picks(emulator: Emulator) -> None:
    """Items are shares of the positions; some hold no pick."""
    rng, heads, rank, rotary, count = np.random.default_rng(0), 9, 20, 4, 5
    last, row = [130, 2], rank + rotary
    blocks = 131 // (1 << PAGE_SHIFT) + 1
    table = rng.permutation(2 * blocks).reshape(2, blocks)
    pages = normal(rng, ((2 * blocks) << PAGE_SHIFT, row), "f32")
    queries = normal(rng, (2, heads, row), "f32")
    picked = np.array([[1, 30, 31, 77, 130], [0, 1, 2, -1, -1]])
    cuts = [0, 20, 40, 60, 64, 100, 131]
    items = [[0, 0, a, b] for a, b in itertools.pairwise(cuts)] + [[1, 1, 0, 3]]
    out = inout(np.zeros((2, heads, rank)), np.float32)
    partial = inout(np.zeros((7, heads, rank)), np.float32)
    weights = inout(np.zeros((7, heads, 2)), np.float32)
    starts, tables = on_device([0, 6, 7], np.int32), on_device(table, np.int32)
    operands = [queries, pages, on_device(items, np.int32), starts, tables, out, partial, weights]
    shape = (heads, rank, rotary, blocks, PAGE_SHIFT, 0.3)
    picks = (on_device(last, np.int32), on_device(picked, np.int32), count)
    sizes = {"items": 7, "heads": heads, "rank": rank, "rotary": rotary}
    decode = KERNELS["latent_decode"].variant(**options("f32"))
    emulator.launch(decode, sizes, [*operands, *shape, *picks])
    combine = KERNELS["latent_combine"].variant(**options("f32"))
    joined = [partial, weights, starts, out, heads, rank]
    emulator.launch(combine, {"tokens": 2, "heads": heads}, joined)
    for token in range(2):
        at = picked[token][picked[token] >= 0]
        slots = (table[token][at >> PAGE_SHIFT] << PAGE_SHIFT) + at % (1 << PAGE_SHIFT)
        rows = wide(pages)[slots]
        raised = np.exp(wide(queries)[token] @ rows.T * 0.3)
        want = raised @ rows[:, :rank] / raised.sum(axis=1, keepdims=True)
        assert_near(out[token], want, "f32", scale=4)


def test_the_indexers_of_published_models_fit() -> None:
    for heads in (64, 32):  # DeepSeek-V3.2, GLM-5
        assert shared_floats(heads, 128) <= MAX_SHARED
