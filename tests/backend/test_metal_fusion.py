"""What is compiled for a GPU gives the same when it is compiled here, for shapes that it was not
compiled for. MLX's CPU device compiles by a C++ compiler, and does not compile without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from vllmx_core.kv_dtypes import _at_limit
from vllmx_core.ops.activation import activation, gated
from vllmx_core.ops.attention import _rotated
from vllmx_core.ops.experts import _clamped
from vllmx_core.ops.gate import KINDS
from vllmx_core.sampling import _noise

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal import attention  # noqa: E402
from vllmx_metal.arrays import METAL  # noqa: E402

RNG = np.random.default_rng(2)


def normal(*shape: int) -> Any:
    return mx.array(RNG.standard_normal(shape).astype(np.float32))


def words(count: int) -> Any:
    return mx.array(RNG.integers(0, 1 << 32, (count, 1)).astype(np.uint32))


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], list[Any]]]] = {
    "rotation": (
        METAL.fused(_rotated),
        lambda n: [normal(n, 3, 8), normal(n, 3, 8), normal(n, 1, 8), normal(n, 1, 8)],
    ),
    "clamped SwiGLU": (
        METAL.fused(_clamped, 1.5, 1.7),
        lambda n: [normal(n, 6), normal(n, 6)],
    ),
    "soft-cap": (attention._cap, lambda n: [normal(n, 5), mx.array(1.5)]),
    "noise": (
        METAL.fused(_noise),
        lambda n: [mx.arange(4, dtype=mx.uint32)[None], words(n), words(n), words(n)],
    ),
    "KV scale": (
        METAL.fused(_at_limit, 127.0),
        lambda n: [normal(n, 2, 4), mx.abs(normal(n, 2, 1))],
    ),
    **{
        kind: (partial(activation, kind=kind, xp=METAL), lambda n: [normal(n, 6)]) for kind in KINDS
    },
    **{
        f"gate {kind}": (
            partial(gated, kind=kind, xp=METAL),
            lambda n: [normal(n, 6), normal(n, 6)],
        )
        for kind in KINDS
    },
}


@pytest.mark.parametrize(("function", "arguments"), CASES.values(), ids=CASES.keys())
def test_compiled_is_the_same(
    function: Callable[..., Any], arguments: Callable[[int], list[Any]]
) -> None:
    compiled = mx.compile(function, shapeless=True)
    for size in (3, 1, 8):
        given = arguments(size)
        found, expected = compiled(*given), function(*given)
        pairs = (
            zip(found, expected, strict=True)
            if isinstance(found, list | tuple)
            else [(found, expected)]
        )
        for one, other in pairs:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_allclose(np.array(one), np.array(other), rtol=2e-6, atol=2e-6)
