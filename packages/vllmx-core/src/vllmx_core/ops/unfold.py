"""`unfold`: the frames that a convolution over time reads, side by side."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from vllmx_core.ops.op import ArrayOp, expect, expect_features
from vllmx_core.ops.values import ArrayFrame, StepInputs, Value
from vllmx_core.plan import I32, StepPlan

WIDTH = 3
"""Frames that a convolution reads."""


class Unfold(ArrayOp):
    """x (T, n * C) and y (T, m * C), which may be absent, hold the n + m frames of each row in
    order; the rows of a sequence follow each other in time. -> (T, 3 * C): the three frames from
    `first` on, counted from the row's first one, zeros outside the sequence. The three values of a
    channel lie together, as in the flattened weight of a `Conv1d`."""

    name: ClassVar[str] = "unfold"
    x: Value
    y: Value | None
    first: int
    out: Value

    @classmethod
    def of(
        cls, x: Value, channels: int, first: int, step: StepInputs, y: Value | None = None
    ) -> Unfold:
        expect_features(x=x)
        expect(isinstance(step, StepInputs), "pass on the step itself")
        return cls(x, y, first, Value(WIDTH * channels))

    @property
    def channels(self) -> int:
        """C."""
        return self.out.width // WIDTH

    @property
    def frames(self) -> int:
        """n + m."""
        return (self.x.width + (0 if self.y is None else self.y.width)) // self.channels

    def check(self) -> None:
        for value in (self.x, self.y):
            if value is not None:
                whole = self.channels > 0 and value.width % self.channels == 0
                expect(whole, f"{value.width} features are no frames of {self.channels} channels")
        near = -self.frames <= self.first <= 2 * self.frames - WIDTH
        expect(near, f"frame {self.first} is further away than the next row")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        xp, channels = frame.xp, self.channels
        parts = [frame[value] for value in (self.x, self.y) if value is not None]
        rows = parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=-1)
        at = frames_read(frame.plan, self.frames, self.first)  # (T, 3)
        found = rows.reshape(-1, channels)[frame.upload(np.maximum(at, 0).reshape(-1))]
        found = found.reshape(*at.shape, channels)
        found = xp.where(frame.upload(at >= 0)[:, :, None], found, 0)
        frame[self.out] = xp.like(rows, found).swapaxes(1, 2).reshape(-1, WIDTH * channels)


def frames_read(plan: StepPlan, frames: int, first: int) -> I32:
    """(T, 3) numbers of the frames that each row reads, among those of all rows; -1: zeros."""
    lengths = np.diff(plan.query_start)
    begin = np.repeat(plan.query_start[:-1], lengths)[:, None] * frames
    end = np.repeat(plan.query_start[1:], lengths)[:, None] * frames
    at = np.arange(plan.num_tokens)[:, None] * frames + first + np.arange(WIDTH)
    return np.where((at >= begin) & (at < end), at, -1).astype(np.int32)
