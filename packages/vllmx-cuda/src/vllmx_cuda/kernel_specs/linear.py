"""Products of few tokens with a weight matrix (N, K); cuBLASLt does the larger ones."""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    DTYPES,
    Kernel,
    Launch,
    Options,
    Sizes,
    arguments,
    by_outputs,
)

GEMV_TOKENS = (1, 2, 4, 8)
"""Values of VX_TOKENS: tokens that share one pass over the weights."""
MMA_TILES = (1, 2)
"""Values of VX_TILES: tiles of 8 tokens that share one pass over the weights."""
MMA_K = 32
"""linear_mma needs K to be a multiple of it."""
_GEMV_ROWS = 4
_MMA_ROWS = 16


def _gemv(sizes: Sizes, options: Options) -> Launch:
    return by_outputs(sizes, _GEMV_ROWS, options["VX_TOKENS"])


def _mma(sizes: Sizes, options: Options) -> Launch:
    return by_outputs(sizes, _MMA_ROWS, 8 * options["VX_TILES"], threads=256)


_ARGUMENTS = "in elem* x, in elem* w, in f32* bias?, out out* y, i32 m, i32 n, i32 k"

LINEAR_GEMV = Kernel(
    entry="linear_gemv",
    source="linear_gemv.cu",
    options={
        "VX_DTYPE": tuple(DTYPES.values()),
        "VX_VEC": (8, 4, 2, 1),
        "VX_TOKENS": GEMV_TOKENS,
        "VX_OUT": (0, 1),
    },
    arguments=arguments(_ARGUMENTS),
    sizes=("tokens", "outputs"),
    rule=_gemv,
)
LINEAR_MMA = Kernel(
    entry="linear_mma",
    source="linear_mma.cu",
    options={
        "VX_DTYPE": (DTYPES["f16"], DTYPES["bf16"]),
        "VX_TILES": MMA_TILES,
        "VX_OUT": (0, 1),
    },
    arguments=arguments(_ARGUMENTS),
    sizes=("tokens", "outputs"),
    rule=_mma,
    tensor_cores=True,
)

KERNELS = (LINEAR_GEMV, LINEAR_MMA)
