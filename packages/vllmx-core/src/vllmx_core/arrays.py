"""NumPy's language as several array libraries speak it, so that an op has one formula for all.

An `ArrayOp` (`vllmx_core.ops.op`) computes over `frame.xp`: NumPy's functions by NumPy's names. A
method of `Arrays` is needed only where libraries differ, or where one has a kernel for the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np

from vllmx_core.plan import F32, AnyArray

Array = Any
"""An array of any library that an `Arrays` is for."""
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid", "identity", "relu2")
_erf = np.vectorize(math.erf, otypes=[np.float64])


class Arrays:
    """A library of arrays. Names without a method here are functions of the library. Formulas call
    `reshape`, `sum`, `mean` and `any` as methods of the arrays, which all libraries have."""

    module: ClassVar[Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def wide(self, x: Array) -> Array:
        """x in the type that formulas compute in, float32 or more."""
        return x

    def widest(self, x: Array) -> Array:
        """x in the widest float, float64 where the library has it on all devices."""
        return self.cast(x, self.float64)

    def cast(self, x: Array, dtype: Any) -> Array:
        """x in a dtype of the library."""
        return x.astype(dtype)

    def like(self, x: Array, values: Array) -> Array:
        """The values in the dtype of x."""
        return self.cast(values, x.dtype)

    def upload(self, x: Array, values: AnyArray) -> Array:
        """A copy of a host's array on the device of x: floats float32, integers of a dtype that
        indexes, unsigned ones of a dtype for `word_product`."""
        raise NotImplementedError

    def arange_like(self, x: Array, count: int) -> Array:
        """0 to count - 1 in the dtype and on the device of x."""
        return self.arange(count, dtype=x.dtype)

    def copy(self, x: Array) -> Array:
        return self.array(x)

    def fused(self, function: Callable[..., Array], *options: object) -> Callable[..., Array]:
        """`function(self, *options, *arrays)` as a function of the arrays, in one kernel where the
        library can compile one. It is elementwise but for broadcasts, and looks at no value and no
        shape."""
        return partial(function, self, *options)

    def split(self, x: Array, widths: Sequence[int]) -> list[Array]:
        """Neighbouring features, `widths` of them."""
        ends = np.cumsum(widths).tolist()
        return [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]

    def activation(self, kind: str) -> Callable[[Array], Array]:
        """The method or function of this name. Raises ValueError where it is not an activation."""
        if kind not in _ACTIVATIONS:
            raise ValueError(f"unknown activation {kind!r}")
        return cast(Callable[[Array], Array], getattr(self, kind))

    def identity(self, x: Array) -> Array:
        return x

    def silu(self, x: Array) -> Array:
        return x * self.sigmoid(x)

    def gelu(self, x: Array) -> Array:
        """GELU exactly, by erf."""
        return 0.5 * x * (1 + self.erf(x / math.sqrt(2)))

    def gelu_tanh(self, x: Array) -> Array:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + self.tanh(inner))

    def relu(self, x: Array) -> Array:
        return self.maximum(x, 0)

    def relu2(self, x: Array) -> Array:
        """The square of relu."""
        return self.square(self.relu(x))

    def softplus(self, x: Array) -> Array:
        """log(1 + exp(x))."""
        return self.logaddexp(x, 0.0)

    def softmax(self, x: Array) -> Array:
        """Softmax over the last axis."""
        return self.module.softmax(x, -1)

    def falling(self, x: Array) -> Array:
        """The indices of the last axis by falling value, ties to the lower one."""
        return self.argsort(-x, axis=-1)

    def descending(self, x: Array) -> Array:
        """The values of the last axis, greatest first."""
        return -self.sort(-x, axis=-1)

    def greatest(self, x: Array, count: int) -> Array:
        """The first `count` of `descending`."""
        return self.descending(x)[..., :count]

    def mass(self, order: Array, share: F32) -> tuple[Array, Array]:
        """Cumulative sums of exp(order), (N, V), and the share (N,) of each total, (N, 1). Float64,
        or as exact: the order in which a library adds must not matter."""
        mass = self.cumsum(self.exp(self.widest(order)), axis=-1)
        return mass, self.widest(self.upload(order, share))[:, None] * mass[:, -1:]

    def word_product(self, factor: int, word: Array) -> tuple[Array, Array]:
        """High and low word of a product of two 32-bit words. int64 wraps, so its 64 bits are right
        and only the sign that the shift drags in has to go."""
        product = word * factor
        return (product >> 32) & 0xFFFFFFFF, product & 0xFFFFFFFF

    def hadamard(self, x: Array) -> Array:
        """The Walsh-Hadamard transform of the last axis, a power of two, divided by the root of its
        length."""
        length, step = x.shape[-1], 1
        while step < length:
            pairs = x.reshape(*x.shape[:-1], length // (2 * step), 2, step)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            x = self.stack([first + second, first - second], axis=-2).reshape(x.shape)
            step *= 2
        return x * length**-0.5

    def rms_norm(self, x: Array, w: Array | None, eps: float) -> Array:
        """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * w over the last axis. w has the
        shape of its last axes."""
        mean_square = self.square(x).mean(axis=-1, keepdims=True)
        normed = x / self.sqrt(mean_square + eps)
        return normed if w is None else normed * w

    def layer_norm(self, x: Array, w: Array | None, bias: Array | None, eps: float) -> Array:
        """(x - mean) / sqrt(var + eps) * w + bias over the last axis."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = self.square(centred).mean(axis=-1, keepdims=True)
        normed = centred / self.sqrt(variance + eps)
        normed = normed if w is None else normed * w
        return normed if bias is None else normed + bias


class NumpyArrays(Arrays):
    """NumPy itself."""

    module: ClassVar[Any] = np

    def cast(self, x: Array, dtype: Any) -> Array:
        return x.astype(dtype, copy=False)

    def upload(self, x: Array, values: AnyArray) -> Array:
        return values.astype({"f": np.float32, "b": np.bool_}.get(values.dtype.kind, np.int64))

    def sigmoid(self, x: Array) -> Array:
        with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
            return 1 / (1 + np.exp(-x))

    def softplus(self, x: Array) -> Array:
        with np.errstate(invalid="ignore"):  # NaN gives NaN
            return np.logaddexp(0, x)

    def softmax(self, x: Array) -> Array:
        with np.errstate(invalid="ignore"):  # an infinite logit gives NaN
            raised = np.exp(x - x.max(axis=-1, keepdims=True))
            return raised / raised.sum(axis=-1, keepdims=True)

    def logsumexp(self, x: Array, axis: int, keepdims: bool) -> Array:
        top = x.max(axis=axis, keepdims=True)
        return top + np.log(np.exp(x - top).sum(axis=axis, keepdims=True))

    def falling(self, x: Array) -> Array:
        return np.argsort(-x, axis=-1, kind="stable").astype(np.int32)

    def erf(self, x: Array) -> Array:
        """float64."""
        return _erf(x)


NUMPY = NumpyArrays()
