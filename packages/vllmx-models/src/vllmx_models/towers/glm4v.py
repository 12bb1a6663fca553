"""The vision tower of GLM-4.1V and GLM-4.5V (arXiv 2507.01006): a transformer over patches with 2D
RoPE and positions that are interpolated bicubically, which GLM-OCR's has not. A convolution makes a
token of 2 x 2 patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from vllmx_core.model import Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.plan import F32, I32
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part, vector
from vllmx_models.blocks.tower import (
    PatchTower,
    gated_layer,
    gated_layer_weights,
    linear,
    merge_order,
    norm,
    normed,
    prefixed,
)

_MERGER_EPS = 1e-5
_SHARPNESS = -0.75
"""PyTorch's parameter of bicubic interpolation."""


class GlmTower(PatchTower):
    """A `vllmx_core.model.Encoder`."""

    table_side: int
    """Side of the square position table; 0: there is none, and no norm behind the patches."""
    merger_size: int
    """The intermediate size of the merger's MLP."""
    qkv_bias: bool
    eps: float
    bias: bool = False
    """True if the other matrices of a layer have biases."""
    qk_norm: bool = False
    """True if heads of queries and keys are normed."""
    deepstack: tuple[int, ...] = ()

    # --- weights ----------------------------------------------------------------------------------
    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        return tuple(prefixed(spec, "model.visual.", ("visual.",)) for spec in self._weights())

    def _weights(self) -> Iterator[WeightSpec]:
        module, size, out, inner = "model.visual", self.hidden_size, self.out_size, self.merger_size
        shape: tuple[int, ...] = (size, 3, self.frames, self.patch, self.patch)
        patch = part(f"{module}.patch_embed.proj", size, bias=True)
        yield WeightSpec("visual.patch", "linear", (patch,), self.patch_width, shape=shape)
        if self.table_side:
            yield vector("visual.first_norm", f"{module}.post_conv_layernorm.weight", size)
            table = PartSpec(f"{module}.embeddings.position_embedding.weight", self.table_side**2)
            yield WeightSpec("visual.positions", "embedding", (table,), size)
        for index in range(self.depth):
            ours, theirs = f"visual.{index}", f"{module}.blocks.{index}"
            yield from gated_layer_weights(
                ours, theirs, size, self.mlp_size, qkv_bias=self.qkv_bias, bias=self.bias
            )
            for name in ("q_norm", "k_norm") if self.qk_norm else ():
                head = PartSpec(f"{theirs}.attn.{name}.weight", size // self.num_heads)
                yield WeightSpec(f"{ours}.{name}", "vector", (head,) * self.num_heads)
        yield vector("visual.norm", f"{module}.post_layernorm.weight", size)
        joined, shape = (part(f"{module}.downsample", out, bias=True),), (out, size)
        width, shape = size * self.patches_per_token, (*shape, self.merge, self.merge)
        yield WeightSpec("visual.joined", "linear", joined, width, shape=shape, axes=(0, 2, 3, 1))
        merger = f"{module}.merger"
        yield linear("visual.merger.proj", f"{merger}.proj", out, out, bias=False)
        yield from norm("visual.merger.norm", f"{merger}.post_projection_norm", out)
        both = tuple(part(f"{merger}.{one}_proj", inner, bias=False) for one in ("gate", "up"))
        yield WeightSpec("visual.merger.gate_up", "linear", both, out)
        yield linear("visual.merger.down", f"{merger}.down_proj", out, inner, bias=False)

    # --- the pass ---------------------------------------------------------------------------------
    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        kind, eps = self.activation, self.eps
        if self.table_side:
            x = ops.rms_norm(x, w["visual.first_norm"], eps)
            x = ops.add(x, ops.mix(step, w["visual.positions"]))
        for index in range(self.depth):
            ours, spec = f"visual.{index}", self.attention
            x = gated_layer(ops, x, w, step, ours, spec, kind, eps, qk_norm=self.qk_norm)
        x = ops.merge(ops.rms_norm(x, w["visual.norm"], eps), self.patches_per_token)
        x = ops.linear(ops.linear(x, w["visual.joined"]), w["visual.merger.proj"])
        x = ops.activation(normed(ops, x, w, "visual.merger.norm", _MERGER_EPS), "gelu")
        gated = ops.gated_act(ops.linear(x, w["visual.merger.gate_up"]), kind)
        return (ops.linear(gated, w["visual.merger.down"]),)

    # --- places -----------------------------------------------------------------------------------
    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder` and `PatchTower.positions`."""
        tall, wide = self.sides(grid)
        row, column = merge_order(tall, wide, self.merge)
        axes, advance = np.stack([row, column]), max(tall, wide) // self.merge
        if not self.table_side:
            none = np.zeros((tall * wide, 0), np.int32)
            weights = none.astype(np.float32)
            return ImagePlaces(axes, none, weights, self.positions(tall, wide), advance)
        rows, row_weights = _taps(row, tall, self.table_side)
        columns, column_weights = _taps(column, wide, self.table_side)
        table_rows = rows[:, :, None] * self.table_side + columns[:, None, :]  # (N, 4, 4)
        weights = row_weights[:, :, None] * column_weights[:, None, :]
        return ImagePlaces(
            axes,
            table_rows.reshape(-1, 16),
            weights.reshape(-1, 16),
            self.positions(tall, wide),
            advance,
        )


def _taps(index: I32, size: int, side: int) -> tuple[I32, F32]:
    """(N, 4) neighbours in a line of `side` values stretched over `size` places, and their weights
    by cubic convolution. Beyond the ends the first and the last value go on."""
    at = (index.astype(np.float64) + 0.5) / size * side - 0.5
    below = np.floor(at)
    taps = below.astype(np.int32)[:, None] + np.arange(-1, 3, dtype=np.int32)
    away = np.abs(at[:, None] - taps)  # the outer two are 1 to 2 away
    near = ((_SHARPNESS + 2) * away - (_SHARPNESS + 3)) * away**2 + 1
    far = _SHARPNESS * (((away - 5) * away + 8) * away - 4)
    weights = np.where(away <= 1, near, far)
    return np.clip(taps, 0, side - 1), weights.astype(np.float32)
