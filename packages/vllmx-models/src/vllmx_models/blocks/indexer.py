"""The indexer of DeepSeek sparse attention (arXiv:2512.02556): which tokens latent attention reads.

Hi heads of Di numbers score the tokens for each query; see `vllmx_core.ops.indexer`.
"""

from __future__ import annotations

from vllmx_core.model import Array, IndexerSpec, Weight
from vllmx_core.records import Record
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.layer import LayerNames, LayerScope, linear, part, vector

PICKED = "picked"
"""The name under which a layer leaves its picks to later ones."""
NORM_EPS = 1e-6


class TokenIndexer(Record):
    """Scores tokens by projections of the query latents and of the layer's input."""

    num_heads: int  # Hi
    head_size: int  # Di
    picked: int
    """The most tokens that a query attends to."""
    interleaved: bool

    def weights(self, names: LayerNames, q_rank: int) -> tuple[WeightSpec, ...]:
        """See `Block.weights`. `q_rank`: the numbers of a query latent."""
        ours, theirs = names.ours, f"{names.theirs}.self_attn.indexer"
        heads, size = self.num_heads, self.head_size
        query = part(f"{theirs}.wq_b", heads * size, False)
        key, weigh = (
            part(f"{theirs}.{name}", rows, False)
            for name, rows in (("wk", size), ("weights_proj", heads))
        )
        return (
            linear(f"{ours}.index_q", (query,), q_rank, "none"),
            linear(f"{ours}.index_k", (key,), names.hidden_size, "none"),
            vector(f"{ours}.index_norm", f"{theirs}.k_norm.weight", size),
            vector(f"{ours}.index_norm_bias", f"{theirs}.k_norm.bias", size),
            linear(f"{ours}.index_weights", (weigh,), names.hidden_size, "none"),
        )

    def record(self, x: Array, q_latent: Array, rope: Weight, scope: LayerScope) -> Array:
        """x (T, E), query latents (T, q_rank) -> (T, picked) positions."""
        ops = scope.ops
        key = ops.linear(x, scope.weight("index_k"))
        norm, bias = scope.weight("index_norm"), scope.weight("index_norm_bias")
        spec = IndexerSpec(
            layer=scope.cache,
            num_heads=self.num_heads,
            head_size=self.head_size,
            rotary_dim=rope.cols,
            picked=self.picked,
            interleaved=self.interleaved,
        )
        return ops.indexer(
            ops.linear(q_latent, scope.weight("index_q")),
            ops.layer_norm(key, norm, bias, NORM_EPS),
            ops.linear(x, scope.weight("index_weights")),
            spec,
            scope.step,
            rope=rope,
        )
