"""Pixtral's vision tower (arXiv 2410.07073): a transformer over patches with 2D RoPE and no biases.
In Mistral 3 squares of patches are joined before the projector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from vllmx_core.model import Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.plan import AnyArray
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part, vector
from vllmx_models.blocks.rope import Rope
from vllmx_models.blocks.tower import (
    PatchTower,
    activated,
    gated_layer,
    linear,
    merge_order,
    prefixed,
)

_EPS = 1e-5


class PixtralTower(PatchTower):
    """A `vllmx_core.model.Encoder`."""

    joins: bool
    """True if what the transformer gives is normed and joined (Mistral 3)."""
    join_eps: float
    projector_activation: str = "gelu"
    projector_bias: bool = False
    modules: tuple[str, str] = ("vision_tower.", "multi_modal_projector.")
    """Prefixes of the transformer and of the projector in the checkpoint."""
    breaks: bool = True
    """True if the prompt has a token of text behind each line of tokens but the last."""

    # --- weights ----------------------------------------------------------------------------------
    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        tower, projector = self.modules
        return (
            *(prefixed(spec, tower, (f"model.{tower}",)) for spec in self._tower_weights()),
            *(prefixed(spec, projector, (f"model.{projector}",)) for spec in self._projector()),
        )

    def _tower_weights(self) -> Iterator[WeightSpec]:
        tower, size = self.modules[0], self.hidden_size
        shape = (size, 3, self.patch, self.patch)
        patch = (part(f"{tower}patch_conv", size, bias=False),)
        yield WeightSpec("visual.patch", "linear", patch, self.patch_width, shape=shape)
        yield vector("visual.first_norm", f"{tower}ln_pre.weight", size)
        for index in range(self.depth):
            ours, theirs = f"visual.{index}", f"{tower}transformer.layers.{index}"
            attention, mlp = f"{theirs}.attention", f"{theirs}.feed_forward"
            heads = tuple(part(f"{attention}.{one}_proj", size, bias=False) for one in "qkv")
            both = tuple(
                part(f"{mlp}.{one}_proj", self.mlp_size, bias=False) for one in ("gate", "up")
            )
            yield vector(f"{ours}.norm1", f"{theirs}.attention_norm.weight", size)
            yield WeightSpec(f"{ours}.qkv", "linear", heads, size)
            yield linear(f"{ours}.o", f"{attention}.o_proj", size, size, bias=False)
            yield vector(f"{ours}.norm2", f"{theirs}.ffn_norm.weight", size)
            yield WeightSpec(f"{ours}.gate_up", "linear", both, size)
            yield linear(f"{ours}.down", f"{mlp}.down_proj", size, self.mlp_size, bias=False)

    def _projector(self) -> Iterator[WeightSpec]:
        size, out, bias = self.hidden_size, self.out_size, self.projector_bias
        projector = self.modules[1]
        if self.joins:
            yield vector("visual.norm", f"{projector}norm.weight", size)
            joined = (PartSpec(f"{projector}patch_merger.merging_layer.weight", size),)
            width, shape = size * self.patches_per_token, (size, size, self.merge, self.merge)
            yield WeightSpec(
                "visual.joined", "linear", joined, width, shape=shape, axes=(0, 2, 3, 1)
            )
        yield linear("visual.out1", f"{projector}linear_1", out, size, bias=bias)
        yield linear("visual.out2", f"{projector}linear_2", out, out, bias=bias)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """RoPE tables: rows have the even frequencies, columns the odd ones."""
        longest, head = self.longest(max_model_len), self.hidden_size // self.num_heads
        cos, sin = np.split(Rope("default", self.theta, head, longest).table(longest), 2, axis=1)
        order = np.arange(head // 2).reshape(-1, 2).T.reshape(-1)
        return {"visual.rope": np.concatenate([cos[:, order], sin[:, order]], axis=1)}

    # --- the pass ---------------------------------------------------------------------------------
    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        x = ops.rms_norm(x, w["visual.first_norm"], _EPS)
        for index in range(self.depth):
            ours = f"visual.{index}"
            x = gated_layer(ops, x, w, step, ours, self.attention, self.activation, _EPS)
        if self.joins:
            x = ops.rms_norm(x, w["visual.norm"], self.join_eps)
        x = ops.merge(x, self.patches_per_token)
        if self.joins:
            x = ops.linear(x, w["visual.joined"])
        up = activated(ops, ops.linear(x, w["visual.out1"]), self.projector_activation)
        return (ops.linear(up, w["visual.out2"]),)

    # --- places -----------------------------------------------------------------------------------
    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`: positions of image tokens continue those of text."""
        tall, wide = self.sides(grid)
        count, lines, line = tall * wide, tall // self.merge, wide // self.merge
        starts = np.arange(lines, dtype=np.int32)[:, None] * np.int32(line + self.breaks)
        featured = (starts + np.arange(line)).reshape(-1).astype(np.int32)
        return ImagePlaces(
            np.stack(merge_order(tall, wide, self.merge)),
            np.zeros((count, 0), np.int32),
            np.zeros((count, 0), np.float32),
            None,
            int(featured[-1]) + 1,
            featured=featured if self.breaks else None,
        )
