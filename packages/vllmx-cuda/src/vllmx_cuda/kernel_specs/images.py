"""Kernels for images: patches, interpolated positions, features and rotations with axes."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_cuda.kernel_specs.rows import flat, flat_kernel, row_kernel
from vllmx_cuda.kernel_specs.types import (
    ROW_OPTIONS,
    Launch,
    Options,
    Sizes,
    kernel,
)

MAX_AXES, MAX_FREQUENCIES = 4, 128
"""The limits of the four words of `axis_words`."""


def axis_words(axes: Sequence[int]) -> list[int]:
    """The last arguments of turn: two bits for the axis of each frequency."""
    words = [0, 0, 0, 0]
    for place, axis in enumerate(axes):
        words[place // 32] |= axis << place % 32 * 2
    return words


def _turn(sizes: Sizes, options: Options) -> Launch:
    return flat(sizes, {"VX_VEC": 1})


KERNELS = (
    kernel(
        "images.cu",
        "turn(in f32* rope, in i32* positions, out f32* y, i32 count, i32 half, i32 lines,"
        " u64 axes0, u64 axes1, u64 axes2, u64 axes3)",
        "count",
        _turn,
        ROW_OPTIONS,
    ),
    flat_kernel("images.cu", "patches(in f32* x, out elem* y, u64 count)"),
    row_kernel(
        "images.cu",
        "mix(in elem* table, in i32* rows, in f32* weights, out elem* y, i32 width, i32 taps)",
    ),
    row_kernel("images.cu", "keep(in elem* x, in i32* to, inout f32* kept, i32 width)"),
    row_kernel(
        "images.cu",
        "place(in elem* x, in i32* rows, in f32* kept, out elem* y, i32 width, i32 adds)",
    ),
)
