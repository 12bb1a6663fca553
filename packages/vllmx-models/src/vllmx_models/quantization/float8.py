"""Float8 matrices with a scale for the tensor, a row or a block, alike in all schemes that have
them, and as `--isq fp8` makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32
from vllmx_core.weights.part import Layout, Span, StoredPart, WeightPart
from vllmx_core.weights.spec import RankShare
from vllmx_core.weights.tensor import DType, float8_to_f32
from vllmx_core.weights.views import View

from vllmx_models.quantization.int8 import TOKEN_ACTIVATIONS, row_buffers
from vllmx_models.quantization.options import FLOATS
from vllmx_models.quantization.scaled import (
    Options,
    apply_scales,
    input_scale,
    over,
    row_scale,
    scales_to_f32,
)
from vllmx_models.quantization.source import ModuleTensors

SCALES: tuple[DType, ...] = (*FLOATS, "f8e8m0", "u8")
E4M3_MAX = np.float32(448)


class Fp8(Layout):
    """Buffers weight and scale. Options: dtype, strategy (tensor, channel or block), block_rows and
    block_cols."""

    kind: ClassVar[str] = "fp8"

    @property
    def row_wise(self) -> bool:
        return self.options["strategy"] != "block"

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return int(self.options["block_rows"]), int(self.options["block_cols"])

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        """See `Layout.decode`; one rounding."""
        weight = part.buffers["weight"]
        scales = scales_to_f32(part.buffers["scale"].in_memory())
        if self.row_wise:
            scales = np.broadcast_to(scales.reshape(-1, 1), (part.shape[0], 1))
            values = float8_to_f32(np.asarray(weight.rows(begin, end).view()), weight.dtype)
            return apply_scales(values, scales[begin:end], (1, max(part.shape[1], 1)))
        rows, _ = self.block
        start = begin // rows * rows  # blocks are decoded whole
        stop = min(-(-end // rows) * rows, part.shape[0])
        values = float8_to_f32(np.asarray(weight.rows(start, stop).view()), weight.dtype)
        found = apply_scales(values, scales[start // rows : -(-stop // rows)], self.block)
        return found[begin - start : end - start]

    def share(self, part: StoredPart, share: RankShare) -> WeightPart | None:
        """See `Layout.share`: blocks that a rank's rows cut in two become less high."""
        if self.row_wise:
            return None
        runs, cols = share.rows or ((0, part.shape[0]),), share.cols or (0, part.shape[1])
        shape = (sum(end - begin for begin, end in runs), cols[1] - cols[0])
        layout = self._of_height(_height(self.block[0], runs))
        return BlockShare(part.name, shape, layout, (part,), runs=runs, columns=cols)

    def _of_height(self, block_rows: int) -> Fp8:
        return replace(self, options={**self.options, "block_rows": block_rows})

    def of_width(self, cols: int) -> Layout:
        return replace(self, options={**self.options, "block_cols": cols})

    def col_unit(self, cols: int, *, shuffled: bool) -> int:
        return 1 if self.row_wise else self.block[1]


class BlockShare(View):
    """Runs of rows, and some columns, of a matrix with a scale for each block."""

    runs: tuple[Span, ...] = ()
    columns: Span = (0, 0)

    def rows(self, begin: int, end: int) -> StoredPart:
        part, layout, (left, right) = self.of.stored(), self.of.layout, self.columns
        assert isinstance(layout, Fp8)
        (high, wide), runs = layout.block, _between(self.runs, begin, end)
        height = math.gcd(_height(high, self.runs), _height(high, runs))
        weight, scale = part.buffers["weight"], part.buffers["scale"].in_memory()
        codes = [weight.rows(*run).cols(left, right).view() for run in runs]
        blocks = np.concatenate([np.arange(*run, height) // high for run in runs])
        groups = slice(left // wide, -(-right // wide))
        buffers = {
            **part.buffers,
            "weight": weight.with_values(np.concatenate(codes)),
            "scale": scale.with_values(scale.view()[blocks, groups]),
        }
        shape = (end - begin, right - left)
        return StoredPart(part.name, shape, layout._of_height(height), buffers)

    def dequantize(self, begin: int = 0, end: int | None = None) -> F32:
        return self.rows(begin, self.shape[0] if end is None else end).dequantize()


def _height(high: int, runs: Sequence[Span]) -> int:
    """Returns the greatest height of blocks at which blocks of `high` rows can be cut into runs."""
    return math.gcd(high, *(begin for begin, _ in runs), *(end for _, end in runs[:-1]))


def _between(runs: Sequence[Span], first: int, last: int) -> Sequence[Span]:
    """Returns the parts of runs, laid one behind the other, from `first` to before `last`."""
    found, at = [], 0
    for begin, end in runs:
        low, most = max(first, at), min(last, at + end - begin)
        if low < most:
            found.append((begin + low - at, begin + most - at))
        at += end - begin
    return found


def checkpoint_part(
    name: str,
    tensors: ModuleTensors,
    scale_suffix: str,
    block: tuple[int, int] | None,
    activations: Options,
) -> StoredPart:
    """Returns X.weight (rows, cols) in float8 with its scales: one for each block, smaller at the
    edges, or without `block` one for the tensor or for each row. A stack of matrices has one for
    each row."""
    weight = tensors.need(".weight", ("f8e4m3", "f8e5m2"))
    if block is None and len(weight.shape) == 3:
        return _stack(name, tensors, scale_suffix, activations)
    rows, cols = tensors.need(".weight", (weight.dtype,), rank=2).shape
    options = {**activations, "dtype": weight.dtype}
    if block is None:
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (rows,), (rows, 1), (1, 1))
        scale = tensors.shaped(scale_suffix, SCALES, *shapes)
        whole = math.prod(scale.shape) == 1
        options["strategy"] = "tensor" if whole else "channel"
        options["block_rows"], options["block_cols"] = rows if whole else 1, cols
    else:
        shape = (-(-rows // block[0]), -(-cols // block[1]))
        scale = tensors.shaped(scale_suffix, SCALES, shape)
        options["strategy"], options["block_rows"], options["block_cols"] = "block", *block
    buffers = {"weight": weight, "scale": scale, **input_scale(tensors)}
    return StoredPart(name, weight.shape, Fp8(8, None, options), buffers)


def _stack(
    name: str, tensors: ModuleTensors, scale_suffix: str, activations: Options
) -> StoredPart:
    """Returns X.weight (count, rows, cols) with scales (count, rows, 1)."""
    weight = tensors.need(".weight", ("f8e4m3", "f8e5m2"), rank=3)
    count, rows, cols = weight.shape
    scale = tensors.shaped(scale_suffix, SCALES, (count, rows, 1))
    options = {
        **activations,
        "dtype": weight.dtype,
        "strategy": "channel",
        "block_rows": 1,
        "block_cols": cols,
    }
    buffers = {"weight": weight, "scale": scale}
    return StoredPart(name, weight.shape, Fp8(8, None, options), buffers)


# --- made while loading ---------------------------------------------------------------------------
def fp8_layout(cols: int) -> Fp8:
    blocks: Options = {"block_rows": 1, "block_cols": cols, "dtype": "f8e4m3"}
    return Fp8(8, None, {**TOKEN_ACTIVATIONS, "activation_type": "float", **blocks})


def fp8_codes(values: F32) -> tuple[npt.NDArray[np.uint8], F32]:
    """Returns (rows, cols) finite values as e4m3 codes and (rows, 1) scales; the greatest magnitude
    of each row becomes 448."""
    scale = row_scale(values, E4M3_MAX)
    return e4m3_codes(over(values, scale)), scale


def fp8_part(
    name: str, shape: tuple[int, ...], codes: npt.NDArray[np.uint8], scales: F32
) -> StoredPart:
    """Returns a part of the codes and one scale for each row."""
    buffers = row_buffers(name, "f8e4m3", shape, codes, scales)
    return StoredPart(name, shape, fp8_layout(shape[1]), buffers)


def e4m3_codes(values: F32) -> npt.NDArray[np.uint8]:
    """Rounds magnitudes up to 448 to nearest, ties to even."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    kept = magnitude >> np.uint32(20)  # exponent and three bits of mantissa
    rounded = (magnitude + np.uint32(0x7FFFF) + (kept & np.uint32(1))) >> np.uint32(20)
    normal = rounded.astype(np.int32) - ((127 - 7) << 3)
    subnormal = np.rint(magnitude.view(np.float32) * np.float32(512)).astype(np.int32)
    code = np.where(magnitude < np.uint32(121 << 23), subnormal, normal)  # below 2 ** -6
    return (code.astype(np.uint32) | (bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
