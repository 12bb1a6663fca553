"""The tower of Qwen3-VL: a transformer over patches whose positions are interpolated from a square
table and rotated by row and column, and mergers that make a token of 2 x 2 patches: one at its end,
others behind layers in between (DeepStack, arXiv 2406.04334)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from vllmx_core.model import Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.plan import F32, I32
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part
from vllmx_models.blocks.tower import (
    PatchTower,
    layer,
    layer_weights,
    linear,
    merge_order,
    norm,
    normed,
)

_EPS = 1e-6


class QwenTower(PatchTower):
    """A `vllmx_core.model.Encoder`."""

    table_side: int
    """Side of the square position table."""
    deepstack: tuple[int, ...]
    """Layers whose output is merged into features for the decoder's first layers."""
    module: str = "model.visual"

    # --- weights ----------------------------------------------------------------------------------
    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        return tuple(self._weights())

    def _weights(self) -> Iterator[WeightSpec]:
        module, size = self.module, self.hidden_size
        shape = (size, 3, self.frames, self.patch, self.patch)
        patch = part(f"{module}.patch_embed.proj", size, bias=True)
        yield WeightSpec("visual.patch", "linear", (patch,), self.patch_width, shape=shape)
        table = PartSpec(f"{module}.pos_embed.weight", self.table_side**2)
        yield WeightSpec("visual.positions", "embedding", (table,), size)
        for index in range(self.depth):
            ours, theirs = f"visual.{index}", f"{module}.blocks.{index}"
            mlp = ("linear_fc1", "linear_fc2")
            yield from layer_weights(ours, theirs, size, self.mlp_size, mlp)
        joined = size * self.patches_per_token
        mergers = [("visual.merger", f"{module}.merger", size)]
        for number in range(len(self.deepstack)):
            theirs = f"{module}.deepstack_merger_list.{number}"
            mergers.append((f"visual.deepstack.{number}", theirs, joined))
        for ours, theirs, width in mergers:
            yield from norm(f"{ours}.norm", f"{theirs}.norm", width)
            yield linear(f"{ours}.up", f"{theirs}.linear_fc1", joined, joined)
            yield linear(f"{ours}.down", f"{theirs}.linear_fc2", self.out_size, joined)

    # --- the pass ---------------------------------------------------------------------------------
    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`: first what replaces tokens, then what is added."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        x = ops.add(x, ops.mix(step, w["visual.positions"]))
        added = []
        for index in range(self.depth):
            ours = f"visual.{index}"
            x = layer(ops, x, w, step, ours, self.attention, self.activation, _EPS)
            if index in self.deepstack:
                ours = f"visual.deepstack.{self.deepstack.index(index)}"
                joined = normed(ops, ops.merge(x, self.patches_per_token), w, f"{ours}.norm", _EPS)
                added.append(self._merged(ops, joined, w, ours))
        joined = ops.merge(normed(ops, x, w, "visual.merger.norm", _EPS), self.patches_per_token)
        return (self._merged(ops, joined, w, "visual.merger"), *added)

    def _merged(self, ops: Ops, x: Array, w: Mapping[str, Weight], ours: str) -> Array:
        up = ops.activation(ops.linear(x, w[f"{ours}.up"]), "gelu")
        return ops.linear(up, w[f"{ours}.down"])

    # --- places -----------------------------------------------------------------------------------
    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`: time is constant within an image, rows and columns
        count from its first token, and text continues after the maximum."""
        tall, wide = self.sides(grid)
        row, column = merge_order(tall, wide, self.merge)
        rows, row_weights = _taps(row, tall, self.table_side)
        columns, column_weights = _taps(column, wide, self.table_side)
        table_rows = rows[:, :, None] * self.table_side + columns[:, None, :]  # (N, 2, 2)
        weights = row_weights[:, :, None] * column_weights[:, None, :]
        return ImagePlaces(
            np.stack([row, column]),
            table_rows.reshape(-1, 4),
            weights.reshape(-1, 4),
            self.positions(tall, wide),
            max(tall, wide) // self.merge,
        )


def _taps(index: I32, size: int, side: int) -> tuple[I32, F32]:
    """(N, 2) neighbours in a line of `side` values stretched over `size` places, end to end, and
    their weights."""
    at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    below = np.floor(at)
    taps = np.clip(below.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), 0, side - 1)
    above = (at - below)[:, None]
    return taps, np.concatenate([1 - above, above], axis=1)
