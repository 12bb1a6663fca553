"""The second half of a layer of an encoder-decoder: cross-attention, then an MLP.

H heads, D head size. Keys and values are features of the model's tower.
"""

from __future__ import annotations

from vllmx_core.model import Array
from vllmx_core.ops.cross_attention import CrossSpec
from vllmx_core.records import Record
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import LayerNames, LayerScope, linear, part
from vllmx_models.blocks.norms import Norm


class CrossThenMLP(Record):
    """A `Block` in the place of the feed-forward. It reads the stream without a norm, and norms the
    input of each of its two parts."""

    num_heads: int
    head_size: int
    mlp: DenseMLP
    norm: Norm
    module: str = "encoder_attn"
    q: str = "q_proj"
    o: str = "out_proj"
    bias: bool = True
    """True if the projections of queries and of the output have one."""
    scale: float | None = None
    """The factor of scores; None: 1 / sqrt(D)."""
    cross_norm: str = "encoder_attn_layer_norm"
    mlp_norm: str = "final_layer_norm"

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, width = names.ours, self.num_heads * self.head_size
        q = (part(names.within(f"{self.module}.{self.q}"), width, self.bias),)
        o = (part(names.within(f"{self.module}.{self.o}"), names.hidden_size, self.bias),)
        return (
            *self.norm.weights(
                f"{ours}.cross_norm", names.within(self.cross_norm), names.hidden_size
            ),
            linear(f"{ours}.cross_q", q, names.hidden_size, "none"),
            linear(f"{ours}.cross_o", o, width, "none"),
            *self.norm.weights(f"{ours}.mlp_norm", names.within(self.mlp_norm), names.hidden_size),
            *self.mlp.weights(names),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, layer = scope.ops, scope.layer
        scale = self.head_size**-0.5 if self.scale is None else self.scale
        spec = CrossSpec(self.num_heads, self.head_size, scale, 2 * layer, 2 * layer + 1)
        heard = self.norm.record(ops, x, scope.weights, f"layers.{layer}.cross_norm")
        heard = ops.cross_attention(ops.linear(heard, scope.weight("cross_q")), spec, scope.step)
        heard = ops.linear(heard, scope.weight("cross_o"))
        normed = self.norm.record(ops, ops.add(x, heard), scope.weights, f"layers.{layer}.mlp_norm")
        return ops.add(heard, self.mlp.record(normed, scope))
