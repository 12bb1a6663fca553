"""The vision tower of Qwen2-VL (arXiv 2409.12191): a transformer over patches with 2D RoPE, whose
layers all see the whole image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from vllmx_core.model import Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.layer import part
from vllmx_models.blocks.tower import (
    PatchTower,
    layer,
    layer_weights,
    linear,
    merge_order,
    norm,
    normed,
    prefixed,
)

_EPS = 1e-6


class Qwen2Tower(PatchTower):
    """A `vllmx_core.model.Encoder`."""

    deepstack: tuple[int, ...] = ()

    # --- weights ----------------------------------------------------------------------------------
    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        return tuple(prefixed(spec, "visual.", ("model.visual.",)) for spec in self._weights())

    def _weights(self) -> Iterator[WeightSpec]:
        size, joined = self.hidden_size, self.hidden_size * self.patches_per_token
        shape = (size, 3, self.frames, self.patch, self.patch)
        patch = part("visual.patch_embed.proj", size, bias=False)
        yield WeightSpec("visual.patch", "linear", (patch,), self.patch_width, shape=shape)
        for index in range(self.depth):
            ours, theirs = f"visual.{index}", f"visual.blocks.{index}"
            mlp = ("fc1", "fc2")
            yield from layer_weights(ours, theirs, size, self.mlp_size, mlp)
        yield from norm("visual.norm", "visual.merger.ln_q", size)
        yield linear("visual.merger.up", "visual.merger.mlp.0", joined, joined)
        yield linear("visual.merger.down", "visual.merger.mlp.2", self.out_size, joined)

    # --- the pass ---------------------------------------------------------------------------------
    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        for index in range(self.depth):
            ours = f"visual.{index}"
            x = layer(ops, x, w, step, ours, self.attention, self.activation, _EPS)
        x = ops.merge(normed(ops, x, w, "visual.norm", _EPS), self.patches_per_token)
        up = ops.activation(ops.linear(x, w["visual.merger.up"]), "gelu")
        return (ops.linear(up, w["visual.merger.down"]),)

    # --- places -----------------------------------------------------------------------------------
    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder` and `PatchTower.positions`."""
        tall, wide = self.sides(grid)
        count = tall * wide
        return ImagePlaces(
            np.stack(merge_order(tall, wide, self.merge)),
            np.zeros((count, 0), np.int32),
            np.zeros((count, 0), np.float32),
            self.positions(tall, wide),
            max(tall, wide) // self.merge,
        )
