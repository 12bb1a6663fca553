"""The vision transformer (arXiv 2010.11929) over a square image, as SigLIP, CLIP and InternViT have
it: learned positions, attention over the whole image, and perhaps a class token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.ops.head_norm import HeadNormSpec
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part, vector
from vllmx_models.blocks.tower import activated, linear, merge_order, norm, normed
from vllmx_models.config import ConfigReader


class ViTNames(Record):
    """Modules of a transformer in the checkpoint; those of a layer are within it."""

    patch: str = "embeddings.patch_embedding"
    positions: str = "embeddings.position_embedding.weight"
    class_token: str = "embeddings.class_embedding"  # noqa: S105 - a tensor
    layers: str = "encoder.layers"
    before: str = "layer_norm1"
    attention: str = "self_attn"
    out: str = "self_attn.out_proj"
    after: str = "layer_norm2"
    first_norm: str = "pre_layrnorm"
    last_norm: str = "post_layernorm"


class ViT(Record):
    """The transformer. Subclasses of this `vllmx_core.model.Encoder` make features of it."""

    depth: int
    """Layers that run; later ones of the checkpoint are not read."""
    hidden_size: int
    num_heads: int
    mlp_size: int
    activation: str
    patch: int
    side: int
    """Patches in a row and in a column of every image."""
    merge: int
    """Side of the square of patches that form one token."""
    out_size: int
    eps: float
    names: ViTNames = ViTNames()
    class_token: bool = False
    """True if a token that stands for the image is attended to. It has no feature."""
    patch_bias: bool = True
    qkv_bias: bool = True
    first_norm: bool = False
    last_norm: bool = True
    rms: bool = False
    """True if norms are RMS norms, without biases."""
    qk_norm: bool = False
    """True if queries and keys are normed over all heads together."""
    scaled: bool = False
    """True if what a layer adds is multiplied by learned factors, `lambda_1` and `lambda_2`."""
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
        size, names = self.hidden_size, self.names
        patch = f"{module}{names.patch}"
        parts = (part(patch, size, bias=self.patch_bias and not self.class_token),)
        shape: tuple[int, ...] = (size, 3, self.patch, self.patch)
        yield WeightSpec("visual.patch", "linear", parts, self.patch_width, shape=shape)
        table = [PartSpec(f"{module}{names.positions}", self.side**2 + self.class_token)]
        if self.class_token:  # see `places`
            table.insert(0, PartSpec(f"{module}{names.class_token}", 1))
        if self.class_token and self.patch_bias:
            table.append(PartSpec(f"{patch}.bias", 1))
        shape = (self.side**2, size)
        yield WeightSpec("visual.positions", "embedding", tuple(table), size, shape=shape)
        if self.first_norm:
            yield from self._norm("visual.first_norm", f"{module}{names.first_norm}")
        for index in range(self.depth):
            yield from self._layer(f"visual.{index}", f"{module}{names.layers}.{index}")
        if self.last_norm:
            yield from self._norm("visual.norm", f"{module}{names.last_norm}")

    def _layer(self, ours: str, theirs: str) -> Iterator[WeightSpec]:
        size, names = self.hidden_size, self.names
        attention = f"{theirs}.{names.attention}"
        yield from self._norm(f"{ours}.norm1", f"{theirs}.{names.before}")
        heads = tuple(part(f"{attention}.{one}_proj", size, bias=self.qkv_bias) for one in "qkv")
        yield WeightSpec(f"{ours}.qkv", "linear", heads, size)
        if self.qk_norm:
            for one in ("q_norm", "k_norm"):
                yield vector(f"{ours}.{one}", f"{attention}.{one}.weight", size)
        yield linear(f"{ours}.o", f"{theirs}.{names.out}", size, size)
        yield from self._norm(f"{ours}.norm2", f"{theirs}.{names.after}")
        yield linear(f"{ours}.up", f"{theirs}.mlp.fc1", self.mlp_size, size)
        yield linear(f"{ours}.down", f"{theirs}.mlp.fc2", size, self.mlp_size)
        if self.scaled:
            for number in (1, 2):
                yield vector(f"{ours}.scale{number}", f"{theirs}.lambda_{number}", size)

    def _norm(self, ours: str, theirs: str) -> tuple[WeightSpec, ...]:
        return norm(ours, theirs, self.hidden_size)[: 1 if self.rms else 2]

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """No RoPE, so no tables."""
        return {}

    # --- the pass ---------------------------------------------------------------------------------
    def encoded(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """(T, E) behind the last norm."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        x = ops.add(x, ops.mix(step, w["visual.positions"]))
        if self.first_norm:
            x = self._normed(ops, x, w, "visual.first_norm")
        heads, head = self.num_heads, self.hidden_size // self.num_heads
        windowed = self._added > 1
        spec = SegmentSpec(heads, heads, head, head**-0.5, windowed=windowed)
        across = HeadNormSpec(heads, heads, head, self.eps, across=True)
        for index in range(self.depth):
            ours = f"visual.{index}"
            qkv = ops.linear(self._normed(ops, x, w, f"{ours}.norm1"), w[f"{ours}.qkv"])
            if self.qk_norm:
                qkv = ops.head_norm(qkv, across, w[f"{ours}.q_norm"], w[f"{ours}.k_norm"])
            found = ops.linear(ops.segment_attention(qkv, spec, step), w[f"{ours}.o"])
            x = ops.add(x, ops.scale(found, w[f"{ours}.scale1"]) if self.scaled else found)
            up = ops.linear(self._normed(ops, x, w, f"{ours}.norm2"), w[f"{ours}.up"])
            fed = ops.linear(activated(ops, up, self.activation), w[f"{ours}.down"])
            x = ops.add(x, ops.scale(fed, w[f"{ours}.scale2"]) if self.scaled else fed)
        return self._normed(ops, x, w, "visual.norm") if self.last_norm else x

    def _normed(self, ops: Ops, x: Array, w: Mapping[str, Weight], name: str) -> Array:
        if self.rms:
            return ops.rms_norm(x, w[name], self.eps)
        return normed(ops, x, w, name, self.eps)

    # --- places -----------------------------------------------------------------------------------
    @property
    def _added(self) -> int:
        """Rows behind the patches: the class token, and as many that nobody sees as make it a whole
        token."""
        return self.patches_per_token if self.class_token else 0

    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`: positions of image tokens continue those of text. The
        table has the class token, its position, those of patches and the bias of patches, which
        the class token must not have."""
        if grid != (1, self.side, self.side):
            raise InvalidRequestError(f"the model cannot see an image of {grid} patches")
        row, column = merge_order(self.side, self.side, self.merge)
        count, added = self.side**2, self._added
        rows = (row * self.side + column)[:, None]
        weights = np.ones((count, 1), np.float32)
        if added:
            bias = np.full((count, 1), count + 2 if self.patch_bias else 0, np.int32)
            rows, behind = np.concatenate([rows + 2, bias], axis=1), np.zeros((added, 2), np.int32)
            behind[0] = (0, 1)
            has_bias = np.full((count, 1), self.patch_bias, np.float32)
            weights = np.concatenate([weights, has_bias], axis=1)
            rows = np.concatenate([rows, behind])
            weights = np.concatenate([weights, np.zeros((added, 2), np.float32)])
            weights[count] = 1
        places = np.pad(np.stack([row, column]), ((0, 0), (0, added)))
        windows = np.array([count + 1, added - 1], np.int32) if added > 1 else None
        tokens = count // self.patches_per_token
        return ImagePlaces(places, rows, weights, None, tokens, windows=windows)


def vit_sizes(read: ConfigReader, size: int, heads: int, patch: int) -> dict[str, Any]:
    """The fields of a `ViT` that `vision_config` has; the others are its defaults."""
    size, patch = read.integer("hidden_size", size), square(read, "patch_size", patch, 256)
    heads = read.integer("num_attention_heads", heads)
    if size % heads:
        raise read.error("num_attention_heads", f"must divide hidden_size = {size}")
    if read.integer("num_channels", 3) != 3:
        raise read.error("num_channels", "must be 3")
    side = square(read, "image_size", 224, 1 << 14) // patch
    if not side:
        raise read.error("image_size", f"must hold a patch of {patch} pixels")
    return {
        "depth": read.integer("num_hidden_layers", 12, high=1024),
        "hidden_size": size,
        "num_heads": heads,
        "mlp_size": read.integer("intermediate_size", 3072),
        "activation": read.activation(default="gelu_pytorch_tanh", also=("quick_gelu",)),
        "patch": patch,
        "side": side,
        "eps": read.number("layer_norm_eps", 1e-6),
    }


def square(read: ConfigReader, key: str, default: int, high: int) -> int:
    """A size in pixels, which may be given as a height and an equal width."""
    given = read.config.get(key)
    if isinstance(given, list) and len(given) == 2 and given[0] == given[1]:
        read = ConfigReader({**read.config, key: given[0]}, read.architecture)
    return read.integer(key, default, high=high)
