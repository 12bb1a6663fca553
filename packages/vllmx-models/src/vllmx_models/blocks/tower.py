"""Parts shared by the vision towers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import Activation, Array, Ops, StepInputs, Weight
from vllmx_core.ops.head_norm import HeadNormSpec
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.plan import I32, AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part, vector
from vllmx_models.blocks.rope import Rope

_LONGEST_SIDE = 1 << 14
_QUICK = 1.702


def merge_order(tall: int, wide: int, merge: int) -> tuple[I32, I32]:
    """(N,) row and column of each patch, ordered so that merge x merge neighbours are adjacent."""
    places = np.arange(tall * wide, dtype=np.int32).reshape(
        tall // merge, merge, wide // merge, merge
    )
    order = places.transpose(0, 2, 1, 3).reshape(-1)
    return order // np.int32(wide), order % np.int32(wide)


def norm(name: str, source: str, size: int) -> tuple[WeightSpec, WeightSpec]:
    """The weight and the bias of a layer norm."""
    scale = vector(name, f"{source}.weight", size)
    return scale, vector(f"{name}.bias", f"{source}.bias", size)


def normed(ops: Ops, x: Array, w: Mapping[str, Weight], name: str, eps: float) -> Array:
    """Records the layer norm of x with the weights that `norm` lists."""
    return ops.layer_norm(x, w[name], w[f"{name}.bias"], eps)


def activated(ops: Ops, x: Array, kind: str) -> Array:
    """Records an activation, or "quick_gelu", x * sigmoid(1.702 x)."""
    if kind == "quick_gelu":
        return ops.scale(ops.activation(ops.scale(x, _QUICK), "silu"), 1 / _QUICK)
    return ops.activation(x, cast(Activation, kind))


def linear(name: str, source: str, rows: int, cols: int, *, bias: bool = True) -> WeightSpec:
    """A matrix of a tower; towers are not sharded."""
    return WeightSpec(name, "linear", (part(source, rows, bias=bias),), cols)


def prefixed(spec: WeightSpec, prefix: str, others: tuple[str, ...]) -> WeightSpec:
    """Adds alternative names with each of the `others` in place of `prefix`."""
    return replace(spec, parts=tuple(_prefixed(one, prefix, others) for one in spec.parts))


def _prefixed(one: PartSpec, prefix: str, others: tuple[str, ...]) -> PartSpec:
    name = one.name.removeprefix(prefix)
    return replace(one, alternatives=tuple(other + name for other in others))


def layer_weights(
    ours: str, theirs: str, size: int, inner: int, mlp: tuple[str, str]
) -> Iterator[WeightSpec]:
    """The weights of `layer`. `mlp`: the names of its two matrices."""
    yield from norm(f"{ours}.norm1", f"{theirs}.norm1", size)
    yield linear(f"{ours}.qkv", f"{theirs}.attn.qkv", 3 * size, size)
    yield linear(f"{ours}.o", f"{theirs}.attn.proj", size, size)
    yield from norm(f"{ours}.norm2", f"{theirs}.norm2", size)
    yield linear(f"{ours}.up", f"{theirs}.mlp.{mlp[0]}", inner, size)
    yield linear(f"{ours}.down", f"{theirs}.mlp.{mlp[1]}", size, inner)


def layer(
    ops: Ops,
    x: Array,
    w: Mapping[str, Weight],
    step: StepInputs,
    ours: str,
    spec: SegmentSpec,
    kind: str,
    eps: float,
) -> Array:
    """Records a layer with layer norms, RoPE and an MLP."""
    qkv = ops.linear(normed(ops, x, w, f"{ours}.norm1", eps), w[f"{ours}.qkv"])
    seen = ops.segment_attention(qkv, spec, step, rope=w["visual.rope"])
    x = ops.add(x, ops.linear(seen, w[f"{ours}.o"]))
    up = ops.linear(normed(ops, x, w, f"{ours}.norm2", eps), w[f"{ours}.up"])
    return ops.add(x, ops.linear(activated(ops, up, kind), w[f"{ours}.down"]))


_GATED = ("gate", "up")


def gated_layer_weights(
    ours: str, theirs: str, size: int, inner: int, *, qkv_bias: bool = True, bias: bool = True
) -> Iterator[WeightSpec]:
    """The weights of `gated_layer`."""
    yield vector(f"{ours}.norm1", f"{theirs}.norm1.weight", size)
    yield linear(f"{ours}.qkv", f"{theirs}.attn.qkv", 3 * size, size, bias=qkv_bias)
    yield linear(f"{ours}.o", f"{theirs}.attn.proj", size, size, bias=bias)
    yield vector(f"{ours}.norm2", f"{theirs}.norm2.weight", size)
    both = tuple(part(f"{theirs}.mlp.{one}_proj", inner, bias=bias) for one in _GATED)
    yield WeightSpec(f"{ours}.gate_up", "linear", both, size)
    yield linear(f"{ours}.down", f"{theirs}.mlp.down_proj", size, inner, bias=bias)


def gated_layer(
    ops: Ops,
    x: Array,
    w: Mapping[str, Weight],
    step: StepInputs,
    ours: str,
    spec: SegmentSpec,
    kind: Activation,
    eps: float,
    *,
    qk_norm: bool = False,
) -> Array:
    """Records a layer with RMS norms, RoPE and a gated MLP. `qk_norm`: each head of queries and
    keys is normed by `q_norm` and `k_norm`."""
    qkv = ops.linear(ops.rms_norm(x, w[f"{ours}.norm1"], eps), w[f"{ours}.qkv"])
    if qk_norm:
        norms = HeadNormSpec(spec.num_heads, spec.num_kv_heads, spec.head_size, eps)
        qkv = ops.head_norm(qkv, norms, w[f"{ours}.q_norm"], w[f"{ours}.k_norm"])
    found = ops.segment_attention(qkv, spec, step, rope=w["visual.rope"])
    x = ops.add(x, ops.linear(found, w[f"{ours}.o"]))
    gate_up = ops.linear(ops.rms_norm(x, w[f"{ours}.norm2"], eps), w[f"{ours}.gate_up"])
    return ops.add(x, ops.linear(ops.gated_act(gate_up, kind), w[f"{ours}.down"]))


class PatchTower(Record):
    """The part that Qwen's towers share: patches of one frame or more, RoPE by row and column, and
    squares of patches merged into tokens."""

    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    activation: Activation
    patch: int
    frames: int
    merge: int
    out_size: int
    theta: float

    @property
    def patch_width(self) -> int:
        return 3 * self.frames * self.patch**2

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    @property
    def colours_last(self) -> bool:
        return False

    @property
    def attention(self) -> SegmentSpec:
        """Attention whose first half of frequencies rotates by row, the second one by column."""
        head = self.hidden_size // self.num_heads
        axes = (0,) * (head // 4) + (1,) * (head // 4)
        return SegmentSpec(self.num_heads, self.num_heads, head, head**-0.5, head, rope_axes=axes)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """RoPE tables of the row axis, then of the column axis; an image of n tokens has at most n
        rows and columns of merged patches."""
        longest = self.longest(max_model_len)
        half = self.hidden_size // self.num_heads // 2
        cos, sin = np.split(Rope("default", self.theta, half, longest).table(longest), 2, axis=1)
        return {"visual.rope": np.concatenate([cos, cos, sin, sin], axis=1)}

    def longest(self, max_model_len: int) -> int:
        """The most patches of a side of an image that the context holds."""
        return min(max_model_len * self.merge, _LONGEST_SIDE)

    def sides(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """Height and width in patches. Raises InvalidRequestError for an image of other sides."""
        frames, tall, wide = grid
        merge, most = self.merge, _LONGEST_SIDE
        whole = frames == 1 and tall % merge == 0 and wide % merge == 0
        if not whole or not (merge <= tall <= most and merge <= wide <= most):
            raise InvalidRequestError(f"the model cannot see an image of {grid} patches")
        return tall, wide

    def positions(self, tall: int, wide: int) -> I32:
        """(3, N) of the tokens of an image: time is constant, rows and columns count from 0."""
        row, column = merge_order(tall // self.merge, wide // self.merge, 1)
        return np.stack([np.zeros_like(row), row, column])
