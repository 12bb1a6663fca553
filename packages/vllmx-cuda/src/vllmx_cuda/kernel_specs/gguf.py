"""GGUF blocks as they lie in the file: dequantised, or multiplied by 8-bit activations."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    Launch,
    Options,
    Sizes,
    along_rows,
    by_outputs,
    ceil_div,
    kernel,
)

BLOCKS = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 12,
    "q5_k": 13,
    "q6_k": 14,
    "iq4_nl": 20,
    "iq4_xs": 23,
    "mxfp4": 39,
}
"""Values of VX_BLOCK: ggml's numbers of the types."""
_SHAPES = {
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    20: (32, 18),
    23: (256, 136),
    39: (32, 17),
}
"""Values and bytes of a block."""
GEMV_TOKENS = (1, 2, 4, 8)
RUN = 32
"""Values that one thread unpacks, and that share a scale in 8-bit activations."""
_GEMV_ROWS = 2


def block_values(block: int) -> int:
    return _SHAPES[block][0]


def block_bytes(block: int) -> int:
    return _SHAPES[block][1]


def _dequantize(sizes: Sizes, options: Options) -> Launch:
    return along_rows(sizes, block_values(options["VX_BLOCK"]), RUN * 256)


def _quantize(sizes: Sizes, options: Options) -> Launch:
    return along_rows(sizes, RUN, RUN * 8)


def _gemv(sizes: Sizes, options: Options) -> Launch:
    return by_outputs(sizes, _GEMV_ROWS, options["VX_TOKENS"])


def _experts(sizes: Sizes, options: Options) -> Launch:
    return Launch((ceil_div(sizes["outputs"], _GEMV_ROWS), sizes["tiles"], 1), 128)


_DEQUANTIZE_OPTIONS = {"VX_DTYPE": ANY_DTYPE, "VX_BLOCK": tuple(BLOCKS.values())}
_GEMV_OPTIONS = {**_DEQUANTIZE_OPTIONS, "VX_TOKENS": GEMV_TOKENS, "VX_OUT": (0, 1)}


KERNELS = (
    kernel(
        "gguf_dequantize.cu",
        "gguf_dequantize(in u8* blocks, in i32* ids?, out elem* y, i32 k)",
        "rows width",
        _dequantize,
        _DEQUANTIZE_OPTIONS,
    ),
    kernel(
        "quantize_q8.cu",
        "quantize_q8(in elem* x, out i8* codes, out f32* scales, i32 k)",
        "rows width",
        _quantize,
        {"VX_DTYPE": ANY_DTYPE},
    ),
    kernel(
        "gguf_linear.cu",
        "gguf_gemv(in i8* codes, in f32* scales, in u8* w, in f32* bias?, out out* y, i32 m, i32 n,"
        " i32 k, i32 pitch)",
        "tokens outputs",
        _gemv,
        _GEMV_OPTIONS,
    ),
    kernel(
        "gguf_linear.cu",
        "experts_gguf(in i8* codes, in f32* scales, in u8* w, in f32* bias?, in i32* order?,"
        " in i32* tiles, out out* y, i32 share, i32 n, i32 k)",
        "outputs tiles",
        _experts,
        _GEMV_OPTIONS,
    ),
)
