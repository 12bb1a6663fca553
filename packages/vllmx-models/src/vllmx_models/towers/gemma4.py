"""The vision tower of Gemma 4: the decoder's layers with bidirectional attention and 2D RoPE; the
output is averaged over squares of patches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import Activation, Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.ops.head_norm import HeadNormSpec
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.layer import vector
from vllmx_models.blocks.rope import Rope
from vllmx_models.blocks.tower import merge_order, prefixed
from vllmx_models.config import ConfigReader

logger = logging.getLogger("vllmx.models")
_TOWER, _PROJECTOR = "model.vision_tower.", "model.embed_vision."
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


class Gemma4Tower(Record):
    """A `vllmx_core.model.Encoder`."""

    depth: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    activation: Activation
    patch: int
    merge: int
    """Side of the square of patches that form one token."""
    longest_side: int
    """The maximum side of an image in patches."""
    out_size: int
    eps: float
    theta: float
    standardised: bool
    clipped: bool = False
    """True if inputs and outputs of each layer's matrices are clipped to stored bounds."""
    colours_last: bool = True

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
        return tuple(prefixed(spec, "model.", ("",)) for spec in self._weights())

    def _weights(self) -> Iterator[WeightSpec]:
        size, embedder = self.hidden_size, f"{_TOWER}patch_embedder"
        yield _linear("visual.patch", (f"{embedder}.input_proj",), size, self.patch_width)
        table = PartSpec(f"{embedder}.position_embedding_table", 2 * self.longest_side)
        shape = (2, self.longest_side, size)
        yield WeightSpec("visual.positions", "embedding", (table,), size, shape=shape)
        for index in range(self.depth):
            yield from self._layer(f"visual.{index}", f"{_TOWER}encoder.layers.{index}")
        if self.standardised:
            bias = (PartSpec(f"{_TOWER}std_bias", 1),)
            yield WeightSpec("visual.std_bias", "embedding", bias, size, shape=(size,))
            yield vector("visual.std_scale", f"{_TOWER}std_scale", size)
        yield _linear("visual.out", (f"{_PROJECTOR}embedding_projection",), self.out_size, size)

    def _layer(self, ours: str, theirs: str) -> Iterator[WeightSpec]:
        size, head = self.hidden_size, self.head_size
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        for name in _NORMS:
            yield vector(f"{ours}.{name}", f"{theirs}.{name}_layernorm.weight", size)
        v = PartSpec(f"{attention}.v_proj.linear.weight", self.num_kv_heads * head)
        queries = self._halves(f"{attention}.q_proj.linear.weight", self.num_heads)
        keys = self._halves(f"{attention}.k_proj.linear.weight", self.num_kv_heads)
        qkv = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys}
        yield from self._together(f"{ours}.qkv", {**qkv, f"{attention}.v_proj": (v,)}, size)
        for name, heads in (("q_norm", self.num_heads), ("k_norm", self.num_kv_heads)):
            each = self._halves(f"{attention}.{name}.weight", 1)
            yield WeightSpec(f"{ours}.{name}", "vector", each * heads)
        for name, modules, rows, cols in (
            ("o", (f"{attention}.o_proj",), size, self.num_heads * head),
            ("gate_up", (f"{mlp}.gate_proj", f"{mlp}.up_proj"), self.mlp_size, size),
            ("down", (f"{mlp}.down_proj",), size, self.mlp_size),
        ):
            parts = {one: (PartSpec(f"{one}.linear.weight", rows),) for one in modules}
            yield from self._together(f"{ours}.{name}", parts, cols)

    def _together(
        self, ours: str, modules: Mapping[str, tuple[PartSpec, ...]], cols: int
    ) -> Iterator[WeightSpec]:
        """Matrices with the same input: fused into one, or, if clipped, each with its own input
        bounds, and the bounds of all outputs."""
        if not self.clipped:
            parts = tuple(part for each in modules.values() for part in each)
            yield WeightSpec(ours, "linear", parts, cols)
            return
        for index, (module, parts) in enumerate(modules.items()):
            yield WeightSpec(f"{ours}.{index}", "linear", parts, cols)
            yield _bounds(f"{ours}.{index}.in", (module,), "input")
        yield _bounds(f"{ours}.out", modules, "output")

    def _halves(self, name: str, heads: int) -> tuple[PartSpec, ...]:
        """The rows of each head, reordered so that RoPE pairs dimension i with i + D / 2: the file
        has the pairs of the column axis first, then those of the row axis."""
        quarter, head = self.head_size // 4, self.head_size
        return tuple(
            PartSpec(name, quarter, runs=RowRuns(number * head + place * quarter, quarter, head))
            for number in range(heads)
            for place in (0, 2, 1, 3)
        )

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """RoPE tables of the column axis, then of the row axis, and a norm weight of ones."""
        longest = min(self.longest_side, max_model_len * self.merge)
        half = Rope("default", self.theta, self.head_size // 2, longest).table(longest)
        cos, sin = np.split(half, 2, axis=1)
        table = np.concatenate([cos, cos, sin, sin], axis=1)
        return {"visual.rope": table, "visual.ones": np.ones(self.hidden_size, np.float32)}

    # --- the pass ---------------------------------------------------------------------------------
    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        x = ops.add(x, ops.mix(step, w["visual.positions"]))
        for index in range(self.depth):
            x = self._through(ops, x, w, step, f"visual.{index}")
        x = ops.scale(x, self.hidden_size**0.5)
        if self.standardised:  # a table of one row, looked up by all tokens
            bias = ops.embedding(step.tokens, w["visual.std_bias"])
            x = ops.add(x, ops.scale(bias, -1.0))
        x = ops.merge(x, self.patches_per_token, "mean")
        if self.standardised:
            x = ops.scale(x, w["visual.std_scale"])
        return (ops.linear(ops.rms_norm(x, w["visual.ones"], self.eps), w["visual.out"]),)

    def _through(
        self, ops: Ops, x: Array, w: Mapping[str, Weight], step: StepInputs, ours: str
    ) -> Array:
        """One layer."""
        heads, kv_heads, head = self.num_heads, self.num_kv_heads, self.head_size
        norms = HeadNormSpec(heads, kv_heads, head, self.eps, values=True)
        axes = (0,) * (head // 4) + (1,) * (head // 4)
        spec = SegmentSpec(heads, kv_heads, head, 1.0, head, rope_axes=axes)

        def normed(value: Array, name: str) -> Array:
            return ops.rms_norm(value, w[f"{ours}.{name}"], self.eps)

        def product(value: Array, name: str, count: int = 1) -> Array:
            return self._product(ops, value, w, f"{ours}.{name}", count)

        qkv = product(normed(x, "input"), "qkv", 3)
        qkv = ops.head_norm(qkv, norms, w[f"{ours}.q_norm"], w[f"{ours}.k_norm"])
        seen = ops.segment_attention(qkv, spec, step, rope=w["visual.rope"])
        x = ops.add(x, normed(product(seen, "o"), "post_attention"))
        gate_up = product(normed(x, "pre_feedforward"), "gate_up", 2)
        fed = product(ops.gated_act(gate_up, self.activation), "down")
        return ops.add(x, normed(fed, "post_feedforward"))

    def _product(self, ops: Ops, x: Array, w: Mapping[str, Weight], ours: str, count: int) -> Array:
        """x times the matrices of `_together`; the results are concatenated."""
        if not self.clipped:
            return ops.linear(x, w[ours])
        first, *others = (
            ops.linear(ops.clip(x, w[f"{ours}.{index}.in"]), w[f"{ours}.{index}"])
            for index in range(count)
        )
        return ops.clip(first, w[f"{ours}.out"], *others)

    # --- places -----------------------------------------------------------------------------------
    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`: positions of image tokens continue those of text."""
        frames, tall, wide = grid
        merge, most = self.merge, self.longest_side
        whole = frames == 1 and tall % merge == 0 and wide % merge == 0
        if not whole or not (merge <= tall <= most and merge <= wide <= most):
            raise InvalidRequestError(f"the model cannot see an image of {grid} patches")
        row, column = merge_order(tall, wide, merge)
        return ImagePlaces(
            np.stack([column, row]),
            np.stack([column, row + np.int32(most)], axis=1),
            np.ones((tall * wide, 2), np.float32),
            None,
            tall * wide // self.patches_per_token,
        )


def gemma4_tower(config: Mapping[str, Any], width: int) -> Gemma4Tower | None:
    """Reads `vision_config`. None if it is absent or unsupported."""
    vision = config.get("vision_config")
    if vision is None:
        return None
    if not isinstance(vision, Mapping):
        raise ConfigReader(config, "Gemma4ForConditionalGeneration").error(
            "vision_config", "must be an object"
        )
    read = ConfigReader(vision, "Gemma4ForConditionalGeneration")
    if read.flag("attention_bias", False):
        logger.warning("text alone is served, images are refused: the tower's attention has biases")
        return None
    heads, head = read.integer("num_attention_heads", 12), read.integer("head_dim", 64)
    kv_heads = read.integer("num_key_value_heads", heads)
    if heads % kv_heads or head % 4:
        raise read.error("head_dim", "must be a multiple of 4, and heads one of key/value heads")
    return Gemma4Tower(
        depth=read.integer("num_hidden_layers", 16, high=1024),
        hidden_size=read.integer("hidden_size", 768),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        mlp_size=read.integer("intermediate_size", 3072),
        activation=read.activation("hidden_activation", default="gelu_pytorch_tanh"),
        patch=read.integer("patch_size", 16, high=256),
        merge=read.integer("pooling_kernel_size", 3, high=16),
        longest_side=read.integer("position_embedding_size", 10240, high=1 << 16),
        out_size=width,
        eps=read.number("rms_norm_eps", 1e-6),
        theta=read.part("rope_parameters").number("rope_theta", 100.0),
        standardised=read.flag("standardize", False),
        clipped=read.flag("use_clipped_linears", False),
    )


def _linear(name: str, modules: tuple[str, ...], rows: int, cols: int) -> WeightSpec:
    parts = tuple(PartSpec(f"{module}.weight", rows) for module in modules)
    return WeightSpec(name, "linear", parts, cols)


def _bounds(name: str, modules: Iterable[str], side: str) -> WeightSpec:
    """The clipping bounds, minimum and maximum, of each module's input or output."""
    parts = (PartSpec(f"{one}.{side}_{end}", 1) for one in modules for end in ("min", "max"))
    return WeightSpec(name, "vector", tuple(parts), shape=(1,))
