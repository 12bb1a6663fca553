"""SigLIP's tower (arXiv 2303.15343) in front of Gemma 3: a transformer over the patches of a square
image, whose answers are averaged over smaller squares, normed and projected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import Activation, Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part
from vllmx_models.blocks.tower import linear, merge_order, norm, normed, prefixed

_TOWER = "vision_tower.vision_model."
_OTHER_TOWERS = ("vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
_PROJECTOR = "multi_modal_projector."


class SiglipTower(Record):
    """A `vllmx_core.model.Encoder`."""

    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    activation: Activation
    patch: int
    side: int
    """Patches in a row and in a column of every image."""
    merge: int
    """Side of the square of patches that form one token."""
    out_size: int
    eps: float
    colours_last: bool = False

    @property
    def patch_width(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return 3 * self.patch**2

    @property
    def patches_per_token(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return self.merge**2

    # --- weights ----------------------------------------------------------------------------------
    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        tower = (prefixed(spec, _TOWER, _OTHER_TOWERS) for spec in self._tower_weights())
        projector = (
            prefixed(spec, _PROJECTOR, (f"model.{_PROJECTOR}",)) for spec in self._projector()
        )
        return (*tower, *projector)

    def _tower_weights(self) -> Iterator[WeightSpec]:
        size, shape = self.hidden_size, (self.hidden_size, 3, self.patch, self.patch)
        patch = part(f"{_TOWER}embeddings.patch_embedding", size, bias=True)
        yield WeightSpec("visual.patch", "linear", (patch,), self.patch_width, shape=shape)
        table = PartSpec(f"{_TOWER}embeddings.position_embedding.weight", self.side**2)
        yield WeightSpec("visual.positions", "embedding", (table,), size)
        for index in range(self.depth):
            ours, theirs = f"visual.{index}", f"{_TOWER}encoder.layers.{index}"
            yield from norm(f"{ours}.norm1", f"{theirs}.layer_norm1", size)
            heads = tuple(part(f"{theirs}.self_attn.{one}_proj", size, bias=True) for one in "qkv")
            yield WeightSpec(f"{ours}.qkv", "linear", heads, size)
            yield linear(f"{ours}.o", f"{theirs}.self_attn.out_proj", size, size)
            yield from norm(f"{ours}.norm2", f"{theirs}.layer_norm2", size)
            yield linear(f"{ours}.up", f"{theirs}.mlp.fc1", self.mlp_size, size)
            yield linear(f"{ours}.down", f"{theirs}.mlp.fc2", size, self.mlp_size)
        yield from norm("visual.norm", f"{_TOWER}post_layernorm", size)

    def _projector(self) -> Iterator[WeightSpec]:
        size = self.hidden_size
        scale = PartSpec(f"{_PROJECTOR}mm_soft_emb_norm.weight", size)
        yield WeightSpec("visual.out_norm", "vector", (scale,), offset=1.0)
        name = f"{_PROJECTOR}mm_input_projection_weight"
        out = PartSpec(name, self.out_size, transposed=True)
        yield WeightSpec("visual.out", "linear", (out,), size)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """No RoPE, so no tables."""
        return {}

    # --- the pass ---------------------------------------------------------------------------------
    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        x = ops.add(x, ops.mix(step, w["visual.positions"]))
        head = self.hidden_size // self.num_heads
        spec = SegmentSpec(self.num_heads, self.num_heads, head, head**-0.5)
        for index in range(self.depth):
            ours = f"visual.{index}"
            qkv = ops.linear(normed(ops, x, w, f"{ours}.norm1", self.eps), w[f"{ours}.qkv"])
            x = ops.add(x, ops.linear(ops.segment_attention(qkv, spec, step), w[f"{ours}.o"]))
            up = ops.linear(normed(ops, x, w, f"{ours}.norm2", self.eps), w[f"{ours}.up"])
            x = ops.add(x, ops.linear(ops.activation(up, self.activation), w[f"{ours}.down"]))
        x = ops.merge(normed(ops, x, w, "visual.norm", self.eps), self.patches_per_token, "mean")
        return (ops.linear(ops.rms_norm(x, w["visual.out_norm"], self.eps), w["visual.out"]),)

    # --- places -----------------------------------------------------------------------------------
    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`: positions of image tokens continue those of text."""
        if grid != (1, self.side, self.side):
            raise InvalidRequestError(f"the model cannot see an image of {grid} patches")
        row, column = merge_order(self.side, self.side, self.merge)
        count = self.side**2
        return ImagePlaces(
            np.stack([row, column]),
            (row * self.side + column)[:, None],
            np.ones((count, 1), np.float32),
            None,
            count // self.patches_per_token,
        )
