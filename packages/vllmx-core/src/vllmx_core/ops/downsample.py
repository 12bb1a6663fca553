"""`downsample`: three convolutions over time and frequency make a row of each eight frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np

from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.linear import linear
from vllmx_core.ops.op import Op, expect, expect_features, expect_weight
from vllmx_core.ops.values import ArrayFrame, StepInputs, Value, WeightRef

FRAMES = 8
"""Frames of a row: each convolution halves their number."""


class Product(Protocol):
    """A backend's `linear`."""

    def __call__(self, x: Any, /, w: WeightRef) -> Any: ...


class Downsample(Op):
    """x (T, 8 * M) holds eight frames of M bins in each row -> (T, B * C): what three convolutions
    with GELU behind them leave, C channels of each of B bins.

    A convolution reads 3 x 3 values and steps by 2 in time and frequency, zeros around a chunk. A
    chunk has `frames` frames; the last rows of a chunk may hold more, which count for nothing. The
    chunks of a sequence begin at its first row, and where the last one ends early, zeros follow. A
    matrix's columns are times, then bins, then channels.
    """

    name: ClassVar[str] = "downsample"
    x: Value
    first: WeightRef
    second: WeightRef
    third: WeightRef
    frames: int
    out: Value

    @classmethod
    def of(
        cls,
        x: Value,
        matrices: tuple[WeightRef, WeightRef, WeightRef],
        frames: int,
        step: StepInputs,
    ) -> Downsample:
        expect_features(x=x)
        expect(isinstance(step, StepInputs), "pass on the step itself")
        for w in matrices:
            expect_weight(w, "linear")
        bins = x.width // FRAMES
        for _ in matrices:
            bins = -(-bins // 2)
        return cls(x, *matrices, frames, Value(bins * matrices[-1].rows))

    @property
    def matrices(self) -> tuple[WeightRef, WeightRef, WeightRef]:
        return self.first, self.second, self.third

    @property
    def rows(self) -> int:
        """Rows of a chunk."""
        return -(-self.frames // FRAMES)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Times and bins of a whole chunk: of x, and behind each convolution."""
        found = [(self.frames, self.x.width // FRAMES)]
        for _ in self.matrices:
            times, bins = found[-1]
            found.append((-(-times // 2), -(-bins // 2)))
        return found

    def check(self) -> None:
        expect(self.frames > 0, f"a chunk of {self.frames} frames is none")
        expect(self.x.width % FRAMES == 0, f"{self.x.width} features are no {FRAMES} frames")
        channels = 1
        for w in self.matrices:
            expect_weight(w, "linear")
            expect(w.cols == 9 * channels, f"{w.name!r} has {w.cols} columns, not {9 * channels}")
            channels = w.rows

    def compute(self, frame: NumpyFrame) -> None:
        downsample(self, frame, lambda x, w: linear(x, frame.weight(w), frame.bias(w)))


def downsample(op: Downsample, frame: ArrayFrame[Any], product: Product) -> None:
    """The formula over `frame.xp`, chunk by chunk."""
    xp, starts, found = frame.xp, frame.plan.query_start.tolist(), []
    bins = op.x.width // FRAMES
    for begin, end in pairwise(starts):
        for first in range(begin, end, op.rows):
            count = min(op.rows, end - first)
            y = frame[op.x][first : first + count].reshape(-1, bins, 1)[: op.frames]
            y = _filled(xp, y, op.frames)
            for w in op.matrices:
                y = _convolved(xp, y, partial(product, w=w))
            found.append(y[:count].reshape(count, -1))
    frame[op.out] = xp.like(frame[op.x], xp.concatenate(found, axis=0))


def _filled(xp: Any, y: Any, frames: int) -> Any:
    """Frames with zeros behind them."""
    while len(y) < frames:
        y = xp.concatenate([y, xp.zeros_like(y[: frames - len(y)])], axis=0)
    return y


def _convolved(xp: Any, y: Any, product: Callable[[Any], Any]) -> Any:
    """(times, bins, C) -> half as many times and bins, rounded up."""
    times, bins, _ = y.shape
    wanted = (-(-times // 2), -(-bins // 2))
    for axis in (0, 1):
        edge = xp.zeros_like(y[:1] if axis == 0 else y[:, :1])
        y = xp.concatenate([edge, y, edge], axis=axis)
    last = (2 * wanted[0] - 1, 2 * wanted[1] - 1)
    taps = [
        y[time : time + last[0] : 2, bin_ : bin_ + last[1] : 2] for time, bin_ in np.ndindex(3, 3)
    ]
    rows = xp.concatenate(taps, axis=-1).reshape(wanted[0] * wanted[1], -1)
    made = product(rows)
    return xp.like(made, xp.gelu(xp.wide(made))).reshape(*wanted, -1)
