"""Recurrent layers: convolutions and recurrences over the states of each row."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    VECTORS,
    Launch,
    Options,
    Sizes,
    at_least,
    at_most,
    ceil_div,
    kernel,
)

_PARTS, _THREADS = 8, 128
KEYS = (8, 16)
"""Values of VX_KEYS: rows of a state that each of the eight threads of a column has. For 32 not all
architectures have the registers."""
MAX_KEYS = _PARTS * KEYS[-1]
_CONV_OPTIONS = {"VX_DTYPE": ANY_DTYPE}


def keys_of(size: int) -> int:
    """VX_KEYS for keys of this size."""
    return next(keys for keys in KEYS if _PARTS * keys >= size)


def _conv(sizes: Sizes, options: Options) -> Launch:
    at_least("count", sizes["count"], 1)
    return Launch((sizes["count"], ceil_div(sizes["width"], 256), 1), 256)


def _recurrence(sizes: Sizes, options: Options) -> Launch:
    at_least("rows", sizes["rows"], 1)
    at_most("keys", sizes["keys"], _PARTS * options["VX_KEYS"], "eight threads hold a column")
    columns = ceil_div(sizes["values"], _THREADS // _PARTS)
    return Launch((sizes["rows"], sizes["heads"], columns), _THREADS)


KERNELS = (
    kernel(
        "short_conv.cu",
        "short_conv(in elem* x, in f32* w, in f32* bias?, in i32* token_rows, in i32* query_start,"
        " in i32* state_from, in f32* states, inout elem* y, i32 channels, i32 kernel,"
        " i32 activates, i64 slot_floats)",
        "count width",
        _conv,
        _CONV_OPTIONS,
    ),
    kernel(
        "short_conv.cu",
        "short_conv_keep(in elem* x, in i32* token_rows, in i32* query_start, in i32* state_from,"
        " in i32* state_to, in i32* state_after, inout f32* states, i32 channels, i32 kernel,"
        " i64 slot_floats)",
        "count width",
        _conv,
        _CONV_OPTIONS,
    ),
    kernel(
        "recurrence.cu",
        "recurrence(in elem* qkv, in elem* a, in elem* b?, in f32* a_log, in f32* dt_bias,"
        " in f32* d?, in i32* query_start, in i32* state_from, in i32* state_to,"
        " in i32* state_after, inout f32* states, inout elem* out, i32 heads, i32 key_heads,"
        " i32 keys, i32 values, i32 channels, i32 tiled, i64 slot_floats,"
        " f32 scale, f32 beta, f32 norm_eps, f32 dt_min, f32 dt_max)",
        "rows heads keys values",
        _recurrence,
        _CONV_OPTIONS | {"VX_KEYS": KEYS, "VX_VEC": VECTORS, "VX_KEEPS": (0, 1)},
    ),
)
