"""Hyper-connections: a residual of N streams, which each block reads and writes by weights of its
own (arXiv 2409.19606), here with a mix of streams that Sinkhorn's iterations make doubly stochastic
(manifold-constrained, arXiv 2512.24880).

A row x (T, N * E) has the streams one after the other. A matrix maps it to `mixes` (T, 2N + N * N):
the weights of reading, of writing and of mixing, before their norm, scale and bias.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_features, expect_vector
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef
from vllmx_core.records import Record


class HyperSpec(Record):
    """The options of hyper-connections."""

    streams: int  # N
    iterations: int
    """Sinkhorn's iterations, each over rows and columns."""
    eps: float
    """Added to weights of reading, and to what the iterations divide by."""
    norm_eps: float

    @property
    def num_mixes(self) -> int:
        """Features of `mixes` where a block reads and writes."""
        return (2 + self.streams) * self.streams


class HyperStreams(ArrayOp):
    """x (T, E) -> (T, N * E): each stream begins as x."""

    name: ClassVar[str] = "hyper_streams"
    x: Value
    streams: int
    out: Value

    @classmethod
    def of(cls, x: Value, streams: int) -> HyperStreams:
        expect_features(x=x)
        return cls(x, streams, Value(streams * x.width))

    def check(self) -> None:
        expect(self.streams >= 2, f"{self.streams} streams: there are two or more")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = frame.xp.concatenate([frame[self.x]] * self.streams, axis=-1)


class HyperRead(ArrayOp):
    """x (T, N * E) -> (T, E), a block's input: the sum over the streams of sigmoid(r * scale[0] *
    mixes + bias) + eps times the stream, r being 1 / sqrt(mean(x^2) + norm_eps). Of `mixes`,
    `scale` and `bias` the first N, 1 and N count; before the last norm there are no others."""

    name: ClassVar[str] = "hyper_read"
    x: Value
    mixes: Value
    spec: HyperSpec
    scale: WeightRef
    bias: WeightRef
    out: Value

    @classmethod
    def of(
        cls, x: Value, mixes: Value, spec: HyperSpec, scale: WeightRef, bias: WeightRef
    ) -> HyperRead:
        expect_features(x=x, mixes=mixes)
        return cls(x, mixes, spec, scale, bias, Value(x.width // spec.streams))

    def check(self) -> None:
        _expect_streams(self.x, self.spec)
        known = (self.spec.streams, self.spec.num_mixes)
        given = f"mixes has {self.mixes.width} features, not {known[0]} or {known[1]}"
        expect(self.mixes.width in known, given)
        expect_vector(self.scale, 1 if self.mixes.width == known[0] else 3)
        expect_vector(self.bias, self.mixes.width)

    def compute(self, frame: ArrayFrame[Any]) -> None:
        scale, bias = frame.vector(self.scale), frame.vector(self.bias)
        x, mixes = frame[self.x], frame[self.mixes]
        frame[self.out] = hyper_read(x, mixes, self.spec, scale, bias, frame.xp)


class HyperWrite(ArrayOp):
    """x (T, N * E) and a block's output y (T, E) -> (T, N * E): stream k becomes the sum over j of
    comb[j, k] * stream j, plus 2 * sigmoid(r * scale[1] * mixes + bias) * y. comb (N, N) is a
    softmax over k of r * scale[2] * mixes + bias, plus eps; then columns are divided by their sum +
    eps, and in turn rows and columns again."""

    name: ClassVar[str] = "hyper_write"
    x: Value
    y: Value
    mixes: Value
    spec: HyperSpec
    scale: WeightRef
    bias: WeightRef
    out: Value

    @classmethod
    def of(
        cls, x: Value, y: Value, mixes: Value, spec: HyperSpec, scale: WeightRef, bias: WeightRef
    ) -> HyperWrite:
        expect_features(x=x, y=y, mixes=mixes)
        return cls(x, y, mixes, spec, scale, bias, Value(x.width))

    def check(self) -> None:
        spec = self.spec
        _expect_streams(self.x, spec)
        given = f"y has {self.y.width} features, {spec.streams} streams of x {self.x.width}"
        expect(self.y.width * spec.streams == self.x.width, given)
        given = f"mixes has {self.mixes.width} features, not {spec.num_mixes}"
        expect(self.mixes.width == spec.num_mixes, given)
        expect_vector(self.scale, 3)
        expect_vector(self.bias, spec.num_mixes)

    def compute(self, frame: ArrayFrame[Any]) -> None:
        scale, bias = frame.vector(self.scale), frame.vector(self.bias)
        x, y, mixes = frame[self.x], frame[self.y], frame[self.mixes]
        frame[self.out] = hyper_write(x, y, mixes, self.spec, scale, bias, frame.xp)


def _expect_streams(x: Value, spec: HyperSpec) -> None:
    counts = f"{spec.streams} streams, {spec.iterations} iterations: two or more, one or more"
    expect(spec.streams >= 2 and spec.iterations >= 1, counts)
    expect(x.width % spec.streams == 0, f"x has {x.width} features, in {spec.streams} streams")


def hyper_read(
    x: Array, mixes: Array, spec: HyperSpec, scale: Array, bias: Array, xp: Arrays = NUMPY
) -> Array:
    """(T, N * E), (T, N or more) -> (T, E)."""
    count = spec.streams
    mixes = xp.wide(mixes)[:, :count] * _inverse_norm(x, spec, xp)
    weights = xp.sigmoid(mixes * scale[0] + bias[:count]) + spec.eps  # (T, N)
    streams = xp.wide(x).reshape(len(x), count, -1)
    return xp.like(x, (weights[:, :, None] * streams).sum(axis=1))


def hyper_write(
    x: Array, y: Array, mixes: Array, spec: HyperSpec, scale: Array, bias: Array, xp: Arrays = NUMPY
) -> Array:
    """(T, N * E), (T, E), (T, 2N + N * N) -> (T, N * E)."""
    count, eps = spec.streams, spec.eps
    mixes = xp.wide(mixes) * _inverse_norm(x, spec, xp)
    write, comb = mixes[:, count : 2 * count], mixes[:, 2 * count :]
    write = 2 * xp.sigmoid(write * scale[1] + bias[count : 2 * count])  # (T, N)
    comb = comb * scale[2] + bias[2 * count :]
    comb = xp.softmax(comb.reshape(len(x), count, count)) + eps
    comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
    for _ in range(spec.iterations - 1):
        comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
    streams = xp.wide(x).reshape(len(x), count, -1)
    written = write[:, :, None] * xp.wide(y)[:, None]
    for j in range(count):
        written = written + comb[:, j, :, None] * streams[:, j, None]
    return xp.like(x, written.reshape(x.shape))


def _inverse_norm(x: Array, spec: HyperSpec, xp: Arrays) -> Array:
    """(T, 1) what a norm over all streams multiplies a row by."""
    squares = xp.square(xp.wide(x)).mean(axis=1, keepdims=True)
    return 1 / xp.sqrt(squares + spec.norm_eps)
