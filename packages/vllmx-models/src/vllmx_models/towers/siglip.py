"""SigLIP's tower (arXiv 2303.15343) in front of Gemma 3 and Idefics3: a transformer over the
patches of a square image, whose answers are averaged or joined over smaller squares and projected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import Activation, Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part
from vllmx_models.blocks.tower import linear, merge_order, norm, normed, prefixed
from vllmx_models.config import ConfigReader

_TOWER = "vision_tower.vision_model."
_OTHER_TOWERS = ("vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
_PROJECTOR = "multi_modal_projector."
_IDEFICS_TOWER = "model.vision_model."


class SiglipTower(Record):
    """The transformer. Subclasses of this `vllmx_core.model.Encoder` make features of it."""

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
    def tower_weights(self, module: str) -> Iterator[WeightSpec]:
        """The weights by the module's names in the checkpoint."""
        size, shape = self.hidden_size, (self.hidden_size, 3, self.patch, self.patch)
        patch = part(f"{module}embeddings.patch_embedding", size, bias=True)
        yield WeightSpec("visual.patch", "linear", (patch,), self.patch_width, shape=shape)
        table = PartSpec(f"{module}embeddings.position_embedding.weight", self.side**2)
        yield WeightSpec("visual.positions", "embedding", (table,), size)
        for index in range(self.depth):
            ours, theirs = f"visual.{index}", f"{module}encoder.layers.{index}"
            yield from norm(f"{ours}.norm1", f"{theirs}.layer_norm1", size)
            heads = tuple(part(f"{theirs}.self_attn.{one}_proj", size, bias=True) for one in "qkv")
            yield WeightSpec(f"{ours}.qkv", "linear", heads, size)
            yield linear(f"{ours}.o", f"{theirs}.self_attn.out_proj", size, size)
            yield from norm(f"{ours}.norm2", f"{theirs}.layer_norm2", size)
            yield linear(f"{ours}.up", f"{theirs}.mlp.fc1", self.mlp_size, size)
            yield linear(f"{ours}.down", f"{theirs}.mlp.fc2", size, self.mlp_size)
        yield from norm("visual.norm", f"{module}post_layernorm", size)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """No RoPE, so no tables."""
        return {}

    # --- the pass ---------------------------------------------------------------------------------
    def encoded(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """(T, E) behind the last norm."""
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
        return normed(ops, x, w, "visual.norm", self.eps)

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


def siglip_sizes(read: ConfigReader, size: int, heads: int, patch: int) -> dict[str, Any]:
    """The fields of a `SiglipTower` that `vision_config` has; the others are its defaults."""
    size, patch = read.integer("hidden_size", size), read.integer("patch_size", patch, high=256)
    heads = read.integer("num_attention_heads", heads)
    if size % heads:
        raise read.error("num_attention_heads", f"must divide hidden_size = {size}")
    if read.integer("num_channels", 3) != 3:
        raise read.error("num_channels", "must be 3")
    return {
        "depth": read.integer("num_hidden_layers", 12, high=1024),
        "hidden_size": size,
        "num_heads": heads,
        "mlp_size": read.integer("intermediate_size", 3072),
        "activation": read.activation(default="gelu_pytorch_tanh"),
        "patch": patch,
        "side": read.integer("image_size", 224, high=1 << 14) // patch,
        "eps": read.number("layer_norm_eps", 1e-6),
    }


class GemmaTower(SiglipTower):
    """The tower of Gemma 3: a token is the mean of its patches, normed and projected."""

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        tower = (prefixed(spec, _TOWER, _OTHER_TOWERS) for spec in self.tower_weights(_TOWER))
        projector = (
            prefixed(spec, _PROJECTOR, (f"model.{_PROJECTOR}",)) for spec in self._projector()
        )
        return (*tower, *projector)

    def _projector(self) -> Iterator[WeightSpec]:
        size = self.hidden_size
        scale = PartSpec(f"{_PROJECTOR}mm_soft_emb_norm.weight", size)
        yield WeightSpec("visual.out_norm", "vector", (scale,), offset=1.0)
        name = f"{_PROJECTOR}mm_input_projection_weight"
        out = PartSpec(name, self.out_size, transposed=True)
        yield WeightSpec("visual.out", "linear", (out,), size)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.merge(self.encoded(ops, w, step), self.patches_per_token, "mean")
        return (ops.linear(ops.rms_norm(x, w["visual.out_norm"], self.eps), w["visual.out"]),)


class IdeficsTower(SiglipTower):
    """The tower of Idefics3 and SmolVLM: a token is its patches side by side, projected."""

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        width = self.hidden_size * self.patches_per_token
        out = "model.connector.modality_projection.proj"
        projection = linear("visual.out", out, self.out_size, width, bias=False)
        return (*self.tower_weights(_IDEFICS_TOWER), projection)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.merge(self.encoded(ops, w, step), self.patches_per_token)
        return (ops.linear(x, w["visual.out"]),)
