"""`resize`: runs of features cut or filled up, for heads with values smaller than keys."""

from __future__ import annotations

from typing import Any, ClassVar

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_features
from vllmx_core.ops.values import ArrayFrame, Value


class Resize(ArrayOp):
    """x (T, kept + N * size) -> (T, kept + N * resized): the first `kept` features stay, and each
    run of `size` features behind them is cut to `resized` or filled up with zeros."""

    name: ClassVar[str] = "resize"
    x: Value
    kept: int
    size: int
    resized: int
    out: Value

    @classmethod
    def of(cls, x: Value, size: int, resized: int, kept: int = 0) -> Resize:
        expect_features(x=x)
        expect(size > 0 and resized > 0, f"size {size} and resized {resized} must be above 0")
        runs = (x.width - kept) // size
        return cls(x, kept, size, resized, Value(kept + runs * resized))

    def check(self) -> None:
        runs = f"{self.x.width} features are not {self.kept} and runs of {self.size}"
        behind = self.x.width - self.kept
        expect(self.kept >= 0 and behind > 0 and behind % self.size == 0, runs)

    def compute(self, frame: ArrayFrame[Any]) -> None:
        frame[self.out] = resize(frame[self.x], self.kept, self.size, self.resized, frame.xp)


def resize(x: Array, kept: int, size: int, resized: int, xp: Arrays = NUMPY) -> Array:
    """See `Resize`."""
    runs = x[:, kept:].reshape(len(x), -1, size)
    zeros = [xp.zeros_like(runs)] * ((resized - 1) // size)
    runs = xp.concatenate([runs, *zeros], axis=-1)[:, :, :resized]
    return xp.concatenate([x[:, :kept], runs.reshape(len(x), -1)], axis=-1)
