"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads share one cached latent a
token.

H heads, C rank of the latents, Dn and Dr the parts of a query head without and with RoPE, Dv the
size of a value head.
"""

from __future__ import annotations

from vllmx_core.model import Array, LatentKV, LatentSpec, StateSpec
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.indexer import PICKED, TokenIndexer
from vllmx_models.blocks.layer import LayerNames, LayerScope, part, vector
from vllmx_models.blocks.query_scale import QueryScale
from vllmx_models.blocks.rope import Rope


class LatentMixer(Record):
    """Attention of H heads over a cache of latents, and an output projection."""

    num_heads: int  # H
    rank: int  # C
    nope_size: int  # Dn
    value_size: int  # Dv
    rope: Rope
    """RoPE over Dr dimensions."""
    scale: float
    """The factor of scores."""
    q_rank: int | None = None
    """The rank of the query latents; None: queries are projected from the stream directly."""
    interleaved: bool = True
    bias: bool = False
    """True if all projections from and to the residual stream have a bias."""
    norm_eps: float = 1e-6
    """The epsilon of the norms of latents and queries."""
    query_scale: QueryScale | None = None
    """The factor of queries, which grows with the position."""
    cut_heads: bool = False
    """True if the checkpoint has two matrices for each head, k_b and v_b, instead of one kv_b."""
    indexer: TokenIndexer | None = None
    """Picks the tokens that are attended to; needs `q_rank`. None: all tokens."""
    shares_picks: bool = False
    """True if the layer attends to what the last indexer before it picked."""

    @property
    def head_size(self) -> int:
        """Dn + Dr."""
        return self.nope_size + self.rope.rotary_dim

    @property
    def cache(self) -> LatentKV:
        index_size = 0 if self.indexer is None else self.indexer.head_size
        return LatentKV(self.rank, self.rope.rotary_dim, index_size)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return ()

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, size = names.ours, f"{names.theirs}.self_attn", names.hidden_size
        row, rotary = f"{theirs}.kv_a_proj_with_mqa", self.rope.rotary_dim
        latent = (part(row, self.rank + rotary, self.bias),)
        heads, width = self.num_heads, self.num_heads * self.value_size
        k_b, v_b = zip(*(self.head_parts(theirs, head) for head in range(heads)), strict=True)
        return (
            *self._query_weights(ours, theirs, size),
            WeightSpec(f"{ours}.latent", "linear", latent, size),
            vector(f"{ours}.latent_norm", f"{theirs}.kv_a_layernorm.weight", self.rank),
            WeightSpec(
                f"{ours}.k_b", "stack", k_b, self.nope_size, "head", role="heads", count=heads
            ),
            WeightSpec(f"{ours}.v_b", "stack", v_b, self.rank, "head", role="heads", count=heads),
            WeightSpec(
                f"{ours}.o", "linear", (part(f"{theirs}.o_proj", size, self.bias),), width, "row"
            ),
            *self._index_weights(names),
        )

    def _index_weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        if self.indexer is None or self.q_rank is None:
            return ()
        return self.indexer.weights(names, self.q_rank)

    def _query_weights(self, ours: str, theirs: str, size: int) -> tuple[WeightSpec, ...]:
        rows = self.num_heads * self.head_size
        if self.q_rank is None:
            q = part(f"{theirs}.q_proj", rows, False)
            return (WeightSpec(f"{ours}.q", "linear", (q,), size, "column"),)
        down, up = (
            part(f"{theirs}.q_a_proj", self.q_rank, self.bias),
            part(f"{theirs}.q_b_proj", rows, False),
        )
        return (
            WeightSpec(f"{ours}.q_latent", "linear", (down,), size),
            vector(f"{ours}.q_norm", f"{theirs}.q_a_layernorm.weight", self.q_rank),
            WeightSpec(f"{ours}.q", "linear", (up,), self.q_rank, "column"),
        )

    def head_parts(self, theirs: str, head: int) -> tuple[PartSpec, PartSpec]:
        """k_b (C, Dn) and v_b (Dv, C) of a head; `theirs` is the prefix of the layer's mixer."""
        if self.cut_heads:
            return (
                PartSpec(f"{theirs}.heads.{head}.k_b_proj.weight", self.rank),
                PartSpec(f"{theirs}.heads.{head}.v_b_proj.weight", self.value_size),
            )
        name, keys, values = f"{theirs}.kv_b_proj.weight", self.nope_size, self.value_size
        first = head * (keys + values)
        return (
            PartSpec(name, self.rank, runs=RowRuns(first, keys, keys), turned=True),
            PartSpec(name, values, runs=RowRuns(first + keys, values, values)),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops = scope.ops
        rope = scope.rope(self.rope)
        assert rope is not None
        latent = ops.linear(x, scope.weight("latent"))  # (T, C + Dr)
        if self.q_rank is not None:
            whole, x = x, ops.linear(x, scope.weight("q_latent"))
            x = ops.rms_norm(x, scope.weight("q_norm"), self.norm_eps)
            if self.indexer is not None:
                scope.left[PICKED] = self.indexer.record(whole, x, rope, scope)
        q = ops.linear(x, scope.weight("q"))  # (T, H * (Dn + Dr))
        if (factors := scope.rope(self.query_scale)) is not None:
            q = ops.scale_at(q, factors, self.num_heads * self.head_size, scope.step)
        spec = LatentSpec(
            layer=scope.cache,
            num_heads=self.num_heads,
            rank=self.rank,
            nope_size=self.nope_size,
            rotary_dim=self.rope.rotary_dim,
            value_size=self.value_size,
            scale=self.scale,
            interleaved=self.interleaved,
            norm_eps=self.norm_eps,
        )
        picks = self.indexer is not None or self.shares_picks
        x = ops.latent_attention(
            q,
            latent,
            spec,
            scope.step,
            rope=rope,
            norm=scope.weight("latent_norm"),
            k_b=scope.weight("k_b"),
            v_b=scope.weight("v_b"),
            picked=scope.left[PICKED] if picks else None,
        )  # (T, H * Dv)
        return ops.linear(x, scope.weight("o"))  # (T, E)
