"""Packed integers of compressed-tensors: each row a string of bits, input feature i at bit
i * bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import AnyArray
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import Index, Span, StoredPart
from vllmx_core.weights.tensor import RawTensor

from vllmx_models.quantization.affine import (
    PackedLayout,
    group_map,
    groups_between,
    packed_words,
    unpack,
)


class PackInt(PackedLayout):
    """Buffers weight, scale and perhaps zero_point and g_idx."""

    kind: ClassVar[str] = "pack_int"
    gathers_codes: ClassVar[bool] = True

    def codes(self, part: StoredPart, rows: slice | Index) -> CodedRows:
        (count, cols), bits, buffers = part.shape, int(self.bits), part.buffers
        offset = 1 << (bits - 1)
        zeros: AnyArray = np.array([[offset]])
        if "zero_point" in buffers:
            stored = np.asarray(buffers["zero_point"].in_memory().view())
            if buffers["zero_point"].dtype == "i32":
                zeros = unpack(stored.T, bits, count).T
            else:
                zeros = matrix(stored).astype(np.int32) + offset
        weight = buffers["weight"]
        if isinstance(rows, slice):
            words = np.asarray(weight.rows(rows.start, rows.stop).view())
        else:
            words = np.asarray(weight.in_memory().view())[rows]
        return coded_of(part, unpack(words, bits, cols), zeros, rows)

    def cut(self, part: StoredPart, rows: Span, cols: Span) -> StoredPart | None:
        """See `Layout.cut`. All groups stay where features are not in the order of groups."""
        buffers, bits, (count, width) = dict(part.buffers), int(self.bits), part.shape
        groups = groups_between(cols, width, self.group_size or width)
        if "g_idx" in buffers:
            groups = (0, _groups_of(buffers["scale"]))
            buffers["g_idx"] = buffers["g_idx"].rows(*cols)
        starts = [place for place, most in zip(cols, (0, width), strict=True) if place != most]
        packed_zeros = "zero_point" in buffers and buffers["zero_point"].dtype == "i32"
        if packed_zeros:
            starts += [place for place in rows if place != count]
        if groups is None or any(place * bits % 32 for place in starts):
            return None
        words = (cols[0] * bits // 32, packed_words(cols[1], bits))
        buffers["weight"] = buffers["weight"].rows(*rows).cols(*words)
        for key in ("scale", "zero_point"):
            if key not in buffers:
                continue
            raw, span = buffers[key], rows
            if key == "zero_point" and packed_zeros:
                span = (rows[0] * bits // 32, packed_words(rows[1], bits))
            if raw.shape[:1] != (1,) or count == 1:
                raw = raw.rows(*span) if raw.shape else raw
            buffers[key] = raw.cols(*groups) if _groups_of(raw) > 1 else raw
        return replace(part, shape=(rows[1] - rows[0], cols[1] - cols[0]), buffers=buffers)


def _groups_of(raw: RawTensor) -> int:
    return raw.shape[1] if len(raw.shape) > 1 else 1


def coded_of(
    part: StoredPart, codes: npt.NDArray[np.uint8], zeros: AnyArray, picked: slice | Index
) -> CodedRows:
    """Returns codes with the buffers scale and g_idx; `zeros` and scales are those of the whole
    part, perhaps one for all rows or groups, and are cut to the picked rows."""
    rows, cols = part.shape
    scales = matrix(part.buffers["scale"].in_memory().to_f32())
    grid = (rows, scales.shape[1])
    g_idx = part.buffers["g_idx"].in_memory().view() if "g_idx" in part.buffers else None
    return CodedRows(
        codes,
        np.broadcast_to(scales, grid)[picked],
        np.broadcast_to(zeros, grid)[picked],
        group_map(cols, part.layout.group_size or cols, g_idx),
    )


def matrix(values: npt.NDArray[np.generic]) -> AnyArray:
    """Returns (), (1,), (rows,) or a matrix as (rows or 1, groups)."""
    if values.ndim == 2:
        return values
    return values.reshape(math.prod(values.shape), 1)
