"""The vision tower of Qwen2.5-VL (arXiv:2502.13923): a transformer over patches with 2D RoPE; most
layers attend within windows of the image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from vllmx_core.model import Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.plan import I32
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.layer import part, vector
from vllmx_models.blocks.tower import (
    PatchTower,
    gated_layer,
    gated_layer_weights,
    linear,
    merge_order,
    prefixed,
)

_EPS = 1e-6


class WindowTower(PatchTower):
    """A `vllmx_core.model.Encoder`."""

    window: int
    """Side of a window in tokens."""
    whole: frozenset[int]
    """Layers that attend to the whole image."""
    deepstack: tuple[int, ...] = ()

    # --- weights ----------------------------------------------------------------------------------
    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        return tuple(prefixed(spec, "visual.", ("model.visual.",)) for spec in self._weights())

    def _weights(self) -> Iterator[WeightSpec]:
        size, inner = self.hidden_size, self.mlp_size
        shape = (size, 3, self.frames, self.patch, self.patch)
        patch = part("visual.patch_embed.proj", size, bias=False)
        yield WeightSpec("visual.patch", "linear", (patch,), self.patch_width, shape=shape)
        for index in range(self.depth):
            ours, theirs = f"visual.{index}", f"visual.blocks.{index}"
            yield from gated_layer_weights(ours, theirs, size, inner)
        joined = size * self.patches_per_token
        yield vector("visual.norm", "visual.merger.ln_q.weight", size)
        yield linear("visual.merger.up", "visual.merger.mlp.0", joined, joined)
        yield linear("visual.merger.down", "visual.merger.mlp.2", self.out_size, joined)

    # --- the pass ---------------------------------------------------------------------------------
    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        for index in range(self.depth):
            ours = f"visual.{index}"
            seen = replace(self.attention, windowed=index not in self.whole)
            x = gated_layer(ops, x, w, step, ours, seen, self.activation, _EPS)
        x = ops.merge(ops.rms_norm(x, w["visual.norm"], _EPS), self.patches_per_token)
        up = ops.activation(ops.linear(x, w["visual.merger.up"]), "gelu")
        return (ops.linear(up, w["visual.merger.down"]),)

    # --- places -----------------------------------------------------------------------------------
    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`: time is constant within an image, rows and columns
        count from its first token, and text continues after the maximum."""
        tall, wide = self.sides(grid)
        merge = self.merge
        order, windows = _windows(tall // merge, wide // merge, self.window)
        axes = np.stack(merge_order(tall, wide, merge)).reshape(2, -1, self.patches_per_token)
        count = tall * wide
        return ImagePlaces(
            axes[:, order].reshape(2, -1),
            np.zeros((count, 0), np.int32),
            np.zeros((count, 0), np.float32),
            self.positions(tall, wide),
            max(tall, wide) // merge,
            order,
            windows * np.int32(self.patches_per_token),
        )


def _windows(tall: int, wide: int, side: int) -> tuple[I32, I32]:
    """The tokens in window order, and the size of each window; the last ones are smaller."""
    row, column = np.divmod(np.arange(tall * wide, dtype=np.int32), np.int32(wide))
    window = row // side * -(-wide // side) + column // side
    order = np.argsort(window, kind="stable").astype(np.int32)
    return order, np.bincount(window).astype(np.int32)
