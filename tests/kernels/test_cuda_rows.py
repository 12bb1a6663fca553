"""Activations, sums, gathers and small matrix products on the emulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from vllmx_core.ops.clip import clip
from vllmx_core.ops.gate import GateKind, gate
from vllmx_core.ops.resize import resize
from vllmx_core.ops.scale_at import scale_at
from vllmx_core.ops.scale_by import scale_by
from vllmx_core.ops.sparsify import sparsify
from vllmx_core.reference import formulas as reference
from vllmx_cuda.kernel_specs import KERNELS, vector_width
from vllmx_cuda.kernel_specs.linear import SPLIT_BLOCKS, row_tiles, splits
from vllmx_cuda.kernel_specs.rows import ACTIVATIONS, GATES
from vllmx_cuda.kernel_specs.rows import GATED as GATED_KINDS
from vllmx_cuda.kernel_specs.types import PLAIN
from vllmx_testing.cuda.emulator import Emulator, empty

from .cuda_arrays import (
    NOTHING_FUSED,
    NUMPY_TYPES,
    Array,
    assert_near,
    inout,
    normal,
    on_device,
    options,
    wide,
)

# Vectors of all widths, one value, and a little more than a block takes
WIDTHS = [
    ("f32", 1), ("f32", 257), ("f32", 130), ("f32", 1028), ("f32", 2056),
    ("f16", 1), ("f16", 33), ("f16", 514), ("f16", 2056),
    ("bf16", 1), ("bf16", 257), ("bf16", 1028), ("bf16", 2056),
]  # fmt: skip
ACTIVATED = [
    *(("silu", *case) for case in WIDTHS),
    *(
        (kind, *case)
        for kind in ACTIVATIONS
        if kind != "silu"
        for case in (("bf16", 2056), ("f16", 33), ("f32", 130))
    ),
]


@pytest.mark.parametrize(("kind", "dtype", "width"), ACTIVATED)
def test_activations(emulator: Emulator, kind: GateKind, dtype: str, width: int) -> None:
    rng, rows = np.random.default_rng(width), 1 if width > 1000 else 3
    x = normal(rng, (rows, 2 * width), dtype, 4.0)
    y = empty((rows, width), x.dtype)
    chosen = options(dtype, VX_VEC=vector_width(width), VX_ACT=ACTIVATIONS[kind])
    sizes = {"rows": rows, "width": width}
    if kind in GATED_KINDS:
        emulator.launch(KERNELS["gated_act"].variant(**chosen), sizes, [x, y, width])
        assert_near(y, reference.gated_act(wide(x), kind), dtype)

    one = on_device(x[:, :width], x.dtype)
    emulator.launch(KERNELS["activation"].variant(**chosen), sizes, [one, y, width])
    assert_near(y, reference.activation(wide(one), kind), dtype)


# (type, features, features that share a factor)
SPANS = [
    *((dtype, width, 1) for dtype, width in WIDTHS),
    ("f32", 96, 32),
    ("f32", 33, 33),
    ("f32", 260, 130),
    ("bf16", 2056, 257),
    ("bf16", 512, 128),
    ("bf16", 60, 20),
    ("f16", 514, 514),
    ("f16", 84, 12),
    ("f16", 10, 2),
]
GATED = [
    *(("sigmoid", *case) for case in SPANS),
    *(
        (kind, *case)
        for kind in GATES
        if kind != "sigmoid"
        for case in (("bf16", 2056, 1), ("f16", 33, 1), ("f32", 260, 130))
    ),
]


@pytest.mark.parametrize(("kind", "dtype", "width", "span"), GATED)
def test_gate(emulator: Emulator, kind: GateKind, dtype: str, width: int, span: int) -> None:
    rng, rows = np.random.default_rng(width), 1 if width > 1000 else 3
    x, g = (normal(rng, (rows, size), dtype, 2.0) for size in (width, width // span))
    y = empty((rows, width), x.dtype)
    vec = vector_width(width if span == 1 else span)
    variant = KERNELS["gate"].variant(**options(dtype, VX_VEC=vec, VX_ACT=GATES[kind], VX_WIDE=0))
    emulator.launch(variant, {"rows": rows, "width": width}, [x, g, y, width, span])
    assert_near(y, gate(wide(x), wide(g), kind), dtype)


def test_gate_by_the_weight_of_a_route(emulator: Emulator) -> None:
    rng = np.random.default_rng(2)
    x, g = normal(rng, (3, 40), "bf16", 2.0), normal(rng, (3, 1), "f32")
    y, chosen = empty((3, 40), x.dtype), {"VX_ACT": GATES["identity"], "VX_WIDE": 1}
    variant = KERNELS["gate"].variant(**options("bf16", VX_VEC=8, **chosen))
    emulator.launch(variant, {"rows": 3, "width": 40}, [x, g, y, 40, 40])
    assert_near(y, gate(wide(x), wide(g), "identity"), "bf16")


@pytest.mark.parametrize(("dtype", "width", "span"), SPANS)
def test_scale_by(emulator: Emulator, dtype: str, width: int, span: int) -> None:
    rng, rows = np.random.default_rng(width), 1 if width > 1000 else 3
    x, w = normal(rng, (rows, width), dtype), normal(rng, (width // span,), "f32")
    y = empty((rows, width), x.dtype)
    variant = KERNELS["scale_by"].variant(
        **options(dtype, VX_VEC=vector_width(width if span == 1 else span))
    )
    emulator.launch(variant, {"rows": rows, "width": width}, [x, w, y, width, span])
    assert_near(y, scale_by(wide(x), wide(w)), dtype)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize(
    ("size", "resized", "kept"),
    [(8, 16, 24), (8, 5, 0), (6, 10, 2), (128, 192, 384), (1, 1, 0), (4, 12, 8)],
)
def test_resize(emulator: Emulator, dtype: str, size: int, resized: int, kept: int) -> None:
    rows = 1 if size == 1 else 3
    x = normal(np.random.default_rng(size), (rows, kept + rows * size), dtype)
    y = empty((rows, kept + rows * resized), x.dtype)
    variant = KERNELS["resize"].variant(**options(dtype, VX_VEC=vector_width(kept, size, resized)))
    width, sizes = y.shape[1], (kept, size, resized)
    emulator.launch(variant, {"rows": rows, "width": width}, [x, y, width, x.shape[1], *sizes])
    assert_near(y, resize(wide(x), *sizes), dtype)


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_magnitudes(emulator: Emulator, dtype: str, width: int) -> None:
    rng, rows = np.random.default_rng(width), 1 if width > 1000 else 3
    x, other = normal(rng, (rows, width), dtype), normal(rng, (rows, width), dtype)
    y, sizes = empty((rows, width), x.dtype), {"rows": rows, "width": width}
    chosen = options(dtype, VX_VEC=vector_width(width))
    emulator.launch(KERNELS["match_rms"].variant(**chosen), sizes, [x, other, y, width, 0.5])
    given, wanted = (np.square(wide(one)).mean(1, keepdims=True) for one in (x, other))
    assert_near(y, wide(x) * np.sqrt(wanted / np.maximum(given, 0.5)), dtype)
    emulator.launch(KERNELS["sparsify"].variant(**chosen), sizes, [x, y, width, 0.3])
    assert_near(y, sparsify(wide(x), 0.3), dtype)


@pytest.mark.parametrize(
    ("dtype", "width", "some"),
    [*((*one, one[1]) for one in WIDTHS), ("f32", 2056, 1032), ("f16", 130, 20), ("bf16", 37, 5)],
)
def test_scale_at(emulator: Emulator, dtype: str, width: int, some: int) -> None:
    rng, rows = np.random.default_rng(width), 1 if width > 1000 else 3
    x, table = normal(rng, (rows, width), dtype), normal(rng, (40,), "f32")
    y, positions = empty((rows, width), x.dtype), on_device([39, 0, 7][:rows], np.int32)
    variant = KERNELS["scale_at"].variant(**options(dtype, VX_VEC=vector_width(width, some)))
    sizes = {"rows": rows, "width": width}
    emulator.launch(variant, sizes, [x, table, positions, y, width, some])
    assert_near(y, scale_at(wide(x), wide(table)[positions], some), dtype)


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_clip(emulator: Emulator, dtype: str, width: int) -> None:
    """The features around its own are left alone, and NaN is no number to hold."""
    rng, rows = np.random.default_rng(width), 1 if width > 1000 else 3
    x = inout(normal(rng, (rows, width), dtype), NUMPY_TYPES[dtype])
    bounds = on_device([-0.4, 0.9], np.float32)
    x[0, 0] = np.nan
    first, pitch = 8, width + 16 - width % 8
    y = inout(np.full((rows, pitch), 7), x.dtype)
    variant = KERNELS["clip"].variant(**options(dtype, VX_VEC=vector_width(width, pitch, first)))
    place = y.reshape(-1)[first:]
    emulator.launch(variant, {"rows": rows, "width": width}, [x, bounds, place, width, pitch])
    assert_near(y[:, first : first + width], clip(wide(x), wide(bounds)), dtype)
    assert (y[:, :first] == 7).all()
    assert (y[:, first + width :] == 7).all()


@pytest.mark.parametrize(("dtype", "count"), WIDTHS)
def test_add_scale_softcap(emulator: Emulator, dtype: str, count: int) -> None:
    rng = np.random.default_rng(count)
    x, y = normal(rng, (count,), dtype), normal(rng, (count,), dtype)
    z, chosen = empty((count,), x.dtype), options(dtype, VX_VEC=vector_width(count))
    sizes = {"count": count}
    emulator.launch(KERNELS["add"].variant(**chosen), sizes, [x, y, z, count])
    np.testing.assert_array_equal(z, (x.astype(np.float32) + y.astype(np.float32)).astype(x.dtype))
    emulator.launch(KERNELS["scale"].variant(**chosen), sizes, [z, z, count, 0.37])
    assert_near(z, (wide(x) + wide(y)) * 0.37, dtype, scale=2)
    logits = inout(rng.standard_normal(count) * 40, np.float32)
    want = reference.softcap(wide(logits), 30.0)
    emulator.launch(KERNELS["softcap"].variant(**chosen), sizes, [logits, count, 30.0])
    assert_near(logits, want, "f32")


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_gather_rows(emulator: Emulator, dtype: str, width: int) -> None:
    rng, picked = np.random.default_rng(width), [6] if width > 1000 else [6, 0, 3, 3, 1]
    table, ids = normal(rng, (7, width), dtype), on_device(picked, np.int32)
    y = empty((len(ids), width), table.dtype)
    variant = KERNELS["gather_rows"].variant(**options(dtype, VX_VEC=vector_width(width)))
    emulator.launch(variant, {"rows": len(ids), "width": width}, [ids, table, y, width])
    np.testing.assert_array_equal(y, table[ids])


@pytest.mark.parametrize(("dtype", "width"), WIDTHS)
def test_means(emulator: Emulator, dtype: str, width: int) -> None:
    """Means are of one row, of fewer and of more than are read at once, of rows that two texts
    share."""
    ends = [(2, 2)] if width > 1000 else [(0, 0), (1, 6), (2, 4)]
    rng = np.random.default_rng(width)
    x = normal(rng, (7, width), dtype)
    first, last = (on_device(side, np.int32) for side in zip(*ends, strict=True))
    y = empty((len(ends), width), x.dtype)
    variant = KERNELS["pool_mean"].variant(**options(dtype, VX_VEC=vector_width(width)))
    shape = {"rows": len(ends), "width": width}
    emulator.launch(variant, shape, [x, first, last, y, width])
    want = [wide(x[begin : end + 1]).mean(axis=0) for begin, end in ends]
    assert_near(y, np.stack(want), dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("rows", "width", "pitch"), [(1, 1, 1), (2, 257, 257), (3, 300, 190)])
def test_gather_columns(emulator: Emulator, dtype: str, rows: int, width: int, pitch: int) -> None:
    """Each feature once, in any order, and 0 between them."""
    rng = np.random.default_rng(3)
    order = np.where(np.arange(width) < pitch, np.arange(width), -1 - np.arange(width) % pitch)
    columns = on_device(rng.permutation(order), np.int32)
    x, y = normal(rng, (rows, pitch), dtype), empty((rows, width), dtype=NUMPY_TYPES[dtype])
    variant = KERNELS["gather_columns"].variant(**options(dtype, VX_VEC=1))
    emulator.launch(variant, {"rows": rows, "width": width}, [x, columns, y, width, pitch])
    np.testing.assert_array_equal(y, np.where(columns < 0, 0, x[:, columns]))


def test_a_step_begins_with_its_tokens_and_table(emulator: Emulator) -> None:
    """Tokens still on the device are resolved; changed entries of the block table arrive."""
    sampled = on_device([31, -1, 7], np.int32)
    tokens, table = inout([5, -1, -3, 0, -2], np.int32), inout(range(600), np.int32)
    patches = np.full((300, 2), -1, np.int32)
    patches[:270, 0] = np.random.default_rng(5).permutation(600)[:270]
    patches[:270, 1] = 1000 + np.arange(270)
    want = np.arange(600)
    want[patches[:270, 0]] = patches[:270, 1]
    variant = KERNELS["begin_step"].variant(**options("f32", VX_VEC=1))
    sent = on_device(patches, np.int32)
    emulator.launch(variant, {"count": 5, "patches": 300}, [tokens, sampled, table, sent, 5, 300])
    assert tokens.tolist() == [5, 31, 7, 0, 0]
    np.testing.assert_array_equal(table, want)


@pytest.mark.parametrize(("count", "patches"), [(1, 0), (2, 1), (257, 3)])
def test_steps_of_other_sizes(emulator: Emulator, count: int, patches: int) -> None:
    tokens, table = inout(-1 - np.arange(count), np.int32), inout([3, 4], np.int32)
    sampled = on_device(np.arange(count) + 5, np.int32)
    sent = on_device([[1, 9], [-1, 0], [-1, 0]][:patches], np.int32)
    variant = KERNELS["begin_step"].variant(**options("f32", VX_VEC=1))
    sizes = {"count": count, "patches": patches}
    emulator.launch(variant, sizes, [tokens, sampled, table, sent, count, patches])
    np.testing.assert_array_equal(tokens, sampled)
    assert table.tolist() == [3, 9 if patches else 4]


GEMV = [
    ("bf16", 1, 4, 1, 1, 0),
    ("bf16", 3, 4, 1, 7, 0),
    ("f16", 1, 4, 1, 1, 0),
    ("bf16", 2, 2, 5, 36, 1),
    ("f16", 1, 4, 1, 33, 0),
    ("f16", 9, 4, 3, 1032, 0),
    ("f32", 1, 8, 5, 2056, 0),
    ("bf16", 1, 1, 9, 1024, 0),
    ("bf16", 3, 2, 6, 2056, 1),
    ("f16", 4, 4, 5, 72, 0),
    ("f32", 5, 8, 17, 33, 0),
    ("f32", 2, 1, 3, 514, 1),
    ("f32", 1, 1, 1, 1, 0),
]


@pytest.mark.parametrize(("dtype", "tokens", "tile", "outputs", "inputs", "out"), GEMV)
def test_linear_gemv(
    emulator: Emulator, dtype: str, tokens: int, tile: int, outputs: int, inputs: int, out: int
) -> None:
    chosen = options(dtype, VX_VEC=vector_width(inputs), VX_TOKENS=tile, VX_OUT=out)

    def run(x: Array, w: Array, bias: Array | None, y: Array) -> None:
        variant, shape = KERNELS["linear_gemv"].variant(**chosen), (len(x), outputs, inputs)
        sizes = {"tokens": len(x), "outputs": outputs}
        emulator.launch(variant, sizes, [x, w, bias, y, *shape, y.shape[1]])

    check_linear(run, dtype, (tokens, outputs, inputs), out)


MMA = [  # dtype, tokens, tiles, rows, splits, outputs, inputs, out
    ("bf16", 1, 1, 1, 1, 40, 1024, 0),
    ("f16", 16, 2, 2, 1, 16, 96, 1),
    ("bf16", 17, 2, 2, 1, 33, 2080, 1),
    ("bf16", 5, 1, 2, 1, 40, 32, 0),
    ("bf16", 9, 2, 1, 2, 13, 4128, 1),
    ("f16", 7, 1, 1, 4, 24, 544, 0),
    ("bf16", 20, 2, 1, 8, 5, 96, 0),  # pieces without columns
    ("bf16", 1, 1, 1, 1, 1, 32, 0),
    ("f16", 1, 1, 1, 1, 1, 32, 0),
    ("f16", 9, 1, 1, 1, 17, 64, 0),
]


@pytest.mark.parametrize("case", MMA, ids=lambda case: "-".join(map(str, case)))
def test_linear_mma(emulator: Emulator, case: tuple[str, *tuple[int, ...]]) -> None:
    dtype, tokens, tiles, rows, parts, outputs, inputs, out = case

    def run(x: Array, w: Array, bias: Array | None, y: Array) -> None:
        multiply_by_mma(emulator, x, w, bias, y, dtype, tiles, rows, parts)

    check_linear(run, dtype, (tokens, outputs, inputs), out)


@pytest.mark.parametrize("parts", [1, 2])
def test_bits_do_not_depend_on_the_batch(emulator: Emulator, parts: int) -> None:
    """Nor on how many tokens and outputs share a block."""
    rng, dtype, shape = np.random.default_rng(parts), "bf16", (16, 21, 832)
    x, w = normal(rng, (16, shape[2]), dtype), normal(rng, shape[1:], dtype)
    want = empty(shape[:2], np.float32)
    multiply_by_mma(emulator, x, w, None, want, dtype, 2, 2, parts)
    for tokens, rows in ((1, 1), (3, 2), (8, 1)):
        y = empty((tokens, shape[1]), np.float32)
        some = on_device(x[:tokens], x.dtype)
        multiply_by_mma(emulator, some, w, None, y, dtype, 1, rows, parts)
        np.testing.assert_array_equal(y, want[:tokens])


def test_splits_are_added_in_their_order(emulator: Emulator) -> None:
    """Sums are equal to the bit, whichever block comes last; each as if it were a product of its
    own columns."""
    rng, dtype, parts, (tokens, outputs, inputs) = np.random.default_rng(4), "bf16", 4, (3, 9, 1024)
    x, w = normal(rng, (tokens, inputs), dtype), normal(rng, (outputs, inputs), dtype)
    bias, y = normal(rng, (outputs,), "f32"), empty((tokens, outputs), np.float32)
    multiply_by_mma(emulator, x, w, bias, y, dtype, 1, 1, parts)
    want = np.zeros((tokens, outputs), np.float32)
    for part in range(parts):
        columns = slice(part * inputs // parts, (part + 1) * inputs // parts)
        own = empty((tokens, outputs), np.float32)
        of_x, of_w = on_device(x[:, columns], x.dtype), on_device(w[:, columns], w.dtype)
        multiply_by_mma(emulator, of_x, of_w, None, own, dtype, 1, 1, 1)
        want += own
    np.testing.assert_array_equal(y, want + bias)


def test_splits_of_few_outputs() -> None:
    """Blocks of 8 outputs, a ring of columns for each warp; never by the number of tokens."""
    shapes = [(1024, 1024), (1024, 12288), (528, 12288), (520, 4096), (256, 4096), (256, 12288)]
    assert [splits(n, k, 132) for n, k in shapes] == [1, 1, 2, 2, 2, 4]
    assert splits(8, 1 << 20, 132) == 128
    assert splits(8, 1 << 24, 1 << 20) == SPLIT_BLOCKS, "the scratch has no more"
    assert [row_tiles(n, 132) for n in (1024, 2112, 2120, 4096)] == [1, 1, 2, 2]


def multiply_by_mma(
    emulator: Emulator,
    x: Array,
    w: Array,
    bias: Array | None,
    y: Array,
    dtype: str,
    tiles: int,
    rows: int,
    parts: int,
) -> None:
    (tokens, inputs), outputs = x.shape, len(w)
    partial = empty((parts, tokens, outputs), np.float32) if parts > 1 else None
    arrivals = inout(np.zeros(-(-outputs // 8) * tokens), np.uint32) if parts > 1 else None
    out = int(y.dtype == np.float32)
    chosen = options(dtype, VX_TILES=tiles, VX_ROWS=rows, VX_OUT=out, **PLAIN)
    sizes = {"tokens": tokens, "outputs": outputs, "width": inputs, "splits": parts}
    shape = (tokens, outputs, inputs, y.shape[1])
    emulator.launch(
        KERNELS["linear_mma"].variant(**chosen),
        sizes,
        [x, w, bias, y, partial, arrivals, *shape, *NOTHING_FUSED],
    )
    if arrivals is not None:
        assert not arrivals.any()  # ready for the next product


def check_linear(
    run: Callable[[Array, Array, Array | None, Array], None],
    dtype: str,
    shape: tuple[int, int, int],
    out: int,
) -> None:
    """run(x, w, bias, y), whose rows of y are further apart than they are long."""
    tokens, outputs, inputs = shape
    rng = np.random.default_rng(inputs)
    x, w = normal(rng, (tokens, inputs), dtype), normal(rng, (outputs, inputs), dtype)
    for bias in (None, normal(rng, (outputs,), "f32")):
        y = inout(np.full((tokens, outputs + 3), 7), np.float32 if out else x.dtype)
        run(x, w, bias, y)
        np.testing.assert_array_equal(y[:, outputs:], 7)
        want = reference.linear(wide(x), wide(w), None if bias is None else wide(bias))
        # sums in f32 of products that are exact: an error of the sum's terms, not of the result
        limit = 1e-6 * inputs**0.5 * np.abs(want).max()
        if out or dtype == "f32":
            np.testing.assert_allclose(y[:, :outputs], want, rtol=1e-5, atol=limit)
        else:
            assert_near(y[:, :outputs], want, dtype)


@pytest.mark.parametrize(("reduced", "whole"), [(1, 1), (3, 40), (300, 300), (90, 601)])
def test_spread(emulator: Emulator, reduced: int, whole: int) -> None:
    rng, rows = np.random.default_rng(whole), 1 if reduced == 3 else 3
    places = np.sort(rng.permutation(whole)[:reduced])
    chosen = np.full(whole, -1, np.float32)
    chosen[places] = rng.permutation(reduced)
    x, y = normal(rng, (rows, reduced), "f32"), empty((rows, whole), np.float32)
    sources = on_device(chosen, np.float32)
    variant = KERNELS["spread"].variant(**options("f32", VX_VEC=1))
    emulator.launch(variant, {"rows": rows, "width": whole}, [x, sources, y, whole, reduced])
    wanted = np.full((rows, whole), -np.inf, np.float32)
    wanted[:, places] = x[:, chosen[places].astype(int)]
    np.testing.assert_array_equal(y, wanted)
