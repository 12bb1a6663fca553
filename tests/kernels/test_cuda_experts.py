"""Routing and products with experts on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_cuda.kernel_specs.experts import SCORES, max_tiles
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import Array, assert_near, normal, on_device, options, wide

# score, dtype, tokens, experts, chosen, groups, kept, best_two, renormalise, bias, factor
ROUTES: list[tuple[str, str, int, int, int, int, int, int, int, bool, bool]] = [
    ("softmax", "f32", 5, 7, 3, 1, 1, 0, 1, False, False),
    ("softmax", "bf16", 4, 128, 8, 1, 1, 0, 0, False, True),
    ("softmax", "f16", 1, 1, 1, 1, 1, 0, 0, False, False),
    ("softmax", "f32", 3, 60, 60, 1, 1, 0, 1, True, False),
    ("sigmoid", "f32", 6, 64, 6, 8, 3, 1, 1, True, False),
    ("softmax", "bf16", 9, 96, 4, 32, 2, 0, 0, False, False),
    ("sigmoid", "f16", 2, 33, 2, 3, 1, 1, 1, True, True),
    ("sigmoid", "bf16", 1, 6, 1, 1, 1, 0, 0, False, False),
    ("softmax", "f16", 3, 5, 2, 1, 1, 0, 1, True, False),
    ("softmax", "f32", 1, 3, 1, 1, 1, 0, 0, False, False),
]


@pytest.mark.parametrize("case", ROUTES, ids=lambda case: "-".join(map(str, case)))
def test_route(emulator: Emulator, case: tuple[str, str, *tuple[int, ...]]) -> None:
    (score, dtype, tokens, experts), given = case[:4], case[9:]
    rng = np.random.default_rng(experts)
    logits = normal(rng, (tokens, experts), dtype, 2.0)
    bias, factor = (normal(rng, (experts,), "f32", 0.3) if is_given else None for is_given in given)
    ids, weights = route(emulator, score, logits, bias, factor, case[4:9])
    for t in range(tokens):
        want, weigh = choose(score, wide(logits[t]), bias, factor, case[4:9])
        np.testing.assert_array_equal(ids[t], want)
        np.testing.assert_allclose(weights[t], weigh, rtol=3e-6, atol=1e-9)


def test_equal_scores_go_to_the_lower_expert(emulator: Emulator) -> None:
    logits = on_device([[1, 5, 1, 5, 1, 5] * 11, [0] * 66], np.float32)
    ids, _ = route(emulator, "softmax", logits, None, None, (5, 1, 1, 0, 1))
    assert ids.tolist() == [[1, 3, 5, 7, 9], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("score", SCORES)
def test_a_token_without_numbers_disturbs_nobody(emulator: Emulator, score: str) -> None:
    logits = np.random.default_rng(2).standard_normal((3, 40)).astype(np.float32)
    fine, _ = route(emulator, score, on_device(logits, np.float32), None, None, (4, 1, 1, 0, 1))
    logits[1, 7] = np.nan
    ids, weights = route(
        emulator, score, on_device(logits, np.float32), None, None, (4, 1, 1, 0, 1)
    )
    assert np.isnan(weights[1]).all()
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert np.isfinite(weights[[0, 2]]).all()
    np.testing.assert_array_equal(ids[[0, 2]], fine[[0, 2]])


def route(
    emulator: Emulator,
    score: str,
    logits: Array,
    bias: Array | None,
    factor: Array | None,
    spec: tuple[Any, ...],
) -> tuple[Array, Array]:
    (tokens, experts), (chosen, groups, kept, best_two, renormalise) = logits.shape, spec
    ids, weights = empty((tokens, chosen), np.int32), empty((tokens, chosen), np.float32)
    dtype = {4: "f32", 2: "f16" if logits.dtype == np.float16 else "bf16"}[logits.itemsize]
    variant = KERNELS["route"].variant(**options(dtype, VX_SCORE=SCORES[score]))
    sizes = {"tokens": tokens, "experts": experts, "groups": groups}
    shape = (tokens, experts, chosen, groups, kept, best_two, renormalise, 1e-20, 2.5)
    emulator.launch(variant, sizes, [logits, bias, factor, ids, weights, *shape])
    return ids, weights


def choose(
    score: str, logits: Array, bias: Array | None, factor: Array | None, spec: tuple[Any, ...]
) -> tuple[Array, Array]:
    """One token, in float64."""
    chosen, groups, kept, best_two, renormalise = spec
    if score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    by = scores + (0 if bias is None else bias)
    best = np.sort(by.reshape(groups, -1))[:, ::-1][:, : 1 + best_two].sum(axis=1)
    out = np.argsort(-best, kind="stable")[kept:]
    by.reshape(groups, -1)[out] = -np.inf
    ids = np.argsort(-by, kind="stable")[:chosen]
    weights = scores[ids] / (scores[ids].sum() + 1e-20 if renormalise else 1.0) * 2.5
    return ids, weights * (1 if factor is None else factor[ids])


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "width"), [(5, 2, 7, 4), (1, 1, 1, 8), (300, 8, 1024, 16)]
)
def test_slots_are_ordered_by_expert(
    emulator: Emulator, tokens: int, chosen: int, experts: int, width: int
) -> None:
    rng, slots = np.random.default_rng(tokens), tokens * chosen
    ids = on_device(rng.integers(experts, size=slots), np.int32)
    order, place, tiles = ordered(emulator, ids, experts, width)
    np.testing.assert_array_equal(ids[order], np.sort(ids))
    np.testing.assert_array_equal(order[place], np.arange(slots))
    assert (tiles[:, 2] >= 0).all()
    used = tiles[tiles[:, 2] > 0]
    assert (used[:, 2] <= width).all()
    covered = np.concatenate([np.arange(first, first + count) for _, first, count in used])
    np.testing.assert_array_equal(np.sort(covered), np.arange(slots))
    for expert, first, count in used:
        assert (ids[order[first : first + count]] == expert).all()


def test_slots_of_experts_that_are_elsewhere_have_no_place(emulator: Emulator) -> None:
    ids = on_device(np.array([4, 0, 2, 7, 3, 2, 5, 9, 4]), np.int32)
    order, place, tiles = ordered(emulator, ids, 3, 2, first=2)
    here = np.array([0, 2, 4, 5, 8])
    np.testing.assert_array_equal(np.flatnonzero(place >= 0), here)
    np.testing.assert_array_equal(order[place[here]], here)
    assert tiles[tiles[:, 2] > 0].tolist() == [[0, 0, 2], [1, 2, 1], [2, 3, 2]]


def ordered(
    emulator: Emulator, ids: Array, experts: int, width: int, first: int = 0
) -> tuple[Array, Array, Array]:
    slots = len(ids)
    order, place = empty((slots,), np.int32), empty((slots,), np.int32)
    tiles = empty((max_tiles(slots, experts, width), 3), np.int32)
    variant = KERNELS["experts_order"].variant(**options("f32", VX_VEC=1))
    arguments = [ids, order, place, tiles, slots, len(tiles), width, first, experts]
    emulator.launch(variant, {"experts": experts}, arguments)
    return order, place, tiles


# entry, dtype, tokens, chosen, experts, outputs, inputs, width of a tile, with bias, f32 answers
PRODUCTS = [
    ("experts_gemv", "f32", 5, 2, 3, 7, 33, 4, True, 1),
    ("experts_gemv", "f32", 2, 1, 2, 3, 1, 4, True, 1),
    ("experts_gemv", "f16", 2, 1, 2, 3, 1, 1, False, 1),
    ("experts_gemv", "bf16", 2, 1, 2, 3, 1, 1, False, 1),
    ("experts_gemv", "f32", 3, 1, 2, 1, 36, 8, False, 0),
    ("experts_gemv", "bf16", 1, 2, 4, 5, 64, 1, False, 1),
    ("experts_gemv", "bf16", 4, 1, 2, 1, 33, 2, True, 0),
    ("experts_gemv", "f16", 4, 2, 2, 1, 34, 4, True, 1),
    ("experts_gemv", "f16", 2, 2, 2, 5, 33, 4, False, 0),
    ("experts_mma", "bf16", 9, 3, 4, 21, 96, 8, True, 1),
    ("experts_mma", "bf16", 3, 2, 2, 1, 32, 16, False, 0),
    ("experts_mma", "f16", 20, 2, 2, 17, 96, 16, False, 1),
    ("experts_mma", "f16", 1, 1, 2, 1, 32, 8, True, 0),
]


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: "-".join(map(str, case)))
def test_products_with_experts(emulator: Emulator, case: tuple[str, str, *tuple[int, ...]]) -> None:
    """Products go up from the rows of tokens, and down from those of positions; then come sums of
    slots."""
    entry, dtype, tokens, chosen, experts, outputs, inputs, width, biased, out = case
    rng = np.random.default_rng(inputs)
    x, w = normal(rng, (tokens, inputs), dtype), normal(rng, (experts, outputs, inputs), dtype)
    bias = normal(rng, (experts, outputs), "f32") if biased else None
    ids = on_device(rng.integers(experts, size=(tokens * chosen)), np.int32)
    order, _, tiles = ordered(emulator, ids, experts, width)
    y = empty((tokens * chosen, outputs), np.float32 if out else x.dtype)
    multiply(emulator, entry, dtype, width, (x, w, bias, order, tiles, y, chosen))
    want = np.einsum("soi,si->so", wide(w)[ids[order]], wide(x)[order // chosen])
    want += 0 if bias is None else bias[ids[order]]
    assert_near(y, want, "f32" if out else dtype, scale=10)
    straight = empty(y.shape, y.dtype)
    rows = on_device(x[order // chosen], x.dtype)
    multiply(emulator, entry, dtype, width, (rows, w, bias, None, tiles, straight, chosen))
    np.testing.assert_array_equal(straight, y)


WIDTHS = [
    ("f32", 1, 1),
    ("f32", 3, 257),
    ("f32", 2, 130),
    ("f32", 1, 1028),
    ("f32", 1, 2056),
    ("f16", 1, 1),
    ("f16", 3, 33),
    ("bf16", 1, 1),
    ("bf16", 3, 257),
    ("bf16", 2, 2056),
]


@pytest.mark.parametrize(("dtype", "tokens", "width"), WIDTHS)
def test_sum_of_slots(emulator: Emulator, dtype: str, tokens: int, width: int) -> None:
    rng, chosen = np.random.default_rng(width), 3
    out, weights = (
        normal(rng, (tokens * chosen, width), "f32"),
        normal(rng, (tokens, chosen), "f32"),
    )
    place = on_device(rng.permutation(tokens * chosen), np.int32)
    y = empty((tokens, width), normal(rng, (1,), dtype).dtype)
    variant = KERNELS["experts_sum"].variant(**options(dtype, VX_VEC=vector_width(width)))
    sizes = {"rows": tokens, "width": width}
    emulator.launch(variant, sizes, [out, place, weights, y, width, chosen])
    slots = wide(out)[place].reshape(tokens, chosen, width)
    assert_near(y, np.einsum("tk,tko->to", wide(weights), slots), dtype, scale=2)
    place = on_device(np.where(np.arange(tokens * chosen) == 1, -1, place), np.int32)
    slots[0, 1] = 0  # whose expert is elsewhere
    emulator.launch(variant, sizes, [out, place, weights, y, width, chosen])
    assert_near(y, np.einsum("tk,tko->to", wide(weights), slots), dtype, scale=2)


def multiply(
    emulator: Emulator, entry: str, dtype: str, width: int, operands: tuple[Any, ...]
) -> None:
    x, w, bias, order, tiles, y, share = operands
    out = int(y.dtype == np.float32)
    (_, outputs, inputs), sizes = w.shape, {"outputs": w.shape[1], "tiles": len(tiles)}
    if entry == "experts_mma":
        sizes["width"] = inputs
        chosen = options(dtype, VX_TILES=width // 8, VX_ROWS=1 + (outputs > 1), VX_OUT=out)
    else:
        chosen = options(dtype, VX_VEC=vector_width(inputs), VX_TOKENS=width, VX_OUT=out)
    arguments = [x, w, bias, order, tiles, y, share, outputs, inputs]
    emulator.launch(KERNELS[entry].variant(**chosen), sizes, arguments)


@pytest.mark.parametrize(("dtype", "rows", "width"), WIDTHS)
def test_clamped_swiglu(emulator: Emulator, dtype: str, rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x = normal(rng, (rows, 2 * width), dtype, 6.0)
    y = empty((rows, width), x.dtype)
    variant = KERNELS["clamped_swiglu"].variant(**options(dtype, VX_VEC=vector_width(width)))
    emulator.launch(variant, {"rows": rows, "width": width}, [x, y, width, 1.702, 7.0])
    gate, up = np.minimum(wide(x)[:, :width], 7), np.clip(wide(x)[:, width:], -7, 7)
    assert_near(y, gate / (1 + np.exp(-1.702 * gate)) * (up + 1), dtype, scale=2)
