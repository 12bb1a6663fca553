"""DeepSeek-V4's attention: a window of tokens, and compressed entries of all before.

H heads of D numbers read one row a token, which is key and value. Di and Hi are the size and the
heads of the indexer.
"""

from __future__ import annotations

from typing import Literal

from vllmx_core.model import (
    Array,
    CompressedAttentionSpec,
    CompressSpec,
    IndexerSpec,
    LatentKV,
    StateSpec,
)
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.layer import LayerNames, LayerScope, linear, part, vector
from vllmx_models.blocks.rope import Rope


class Compressor(Record):
    """One entry for each `ratio` tokens."""

    ratio: int
    overlap: bool
    """True if an entry has tokens of the window before its own, too."""

    @property
    def series(self) -> int:
        return 2 if self.overlap else 1

    def state(self, size: int) -> StateSpec:
        """The sums of a window that has not ended."""
        return StateSpec(self.series, 3, size)

    def weights(self, ours: str, theirs: str, size: int, hidden: int) -> tuple[WeightSpec, ...]:
        """The weights for entries of `size` numbers; `ours` is the prefix of the logical names."""
        rows = self.series * size
        both = (part(f"{theirs}.wkv", rows, False), part(f"{theirs}.wgate", rows, False))
        bias, shape = (PartSpec(f"{theirs}.ape", self.ratio * rows),), (self.ratio, rows)
        return (
            linear(f"{ours}kv_gate", both, hidden, "none"),
            WeightSpec(f"{ours}gate_bias", "vector", bias, shape=shape),
            vector(f"{ours}entry_norm", f"{theirs}.norm.weight", size),
        )

    def record(
        self,
        x: Array,
        scope: LayerScope,
        mixer: CompressedMixer,
        ours: str,
        size: int,
        state: int,
        part: Literal["entries", "keys"],
    ) -> None:
        """Writes the entries of x (T, E) to the layer's cache."""
        spec = CompressSpec(
            layer=scope.cache,
            state=scope.state + state,
            size=size,
            ratio=self.ratio,
            rotary_dim=mixer.rope.rotary_dim,
            overlap=self.overlap,
            part=part,
            norm_eps=mixer.norm_eps,
        )
        rope = scope.rope(mixer.rope)
        assert rope is not None
        scope.ops.compress(
            scope.ops.linear(x, scope.weight(f"{ours}kv_gate")),
            spec,
            scope.step,
            rope=rope,
            bias=scope.weight(f"{ours}gate_bias"),
            norm=scope.weight(f"{ours}entry_norm"),
        )


class EntryIndexer(Record):
    """Picks entries by keys of its own, which are compressed as the entries are."""

    num_heads: int  # Hi
    head_size: int  # Di
    picked: int
    """The most entries that a query attends to."""


class CompressedMixer(Record):
    """Attention of H heads to a window and to entries, and an output projection in groups of
    heads."""

    num_heads: int  # H
    head_size: int  # D
    q_rank: int
    window: int
    groups: int
    """Groups of heads, each with a first output matrix of its own."""
    group_rank: int
    """Features of each group between the two output matrices."""
    rope: Rope
    norm_eps: float
    compressor: Compressor | None = None
    """None: the window alone."""
    indexer: EntryIndexer | None = None
    """None: all entries are attended to."""

    @property
    def cache(self) -> LatentKV | None:
        if self.compressor is None:
            return None
        rotary, keys = self.rope.rotary_dim, 0 if self.indexer is None else self.indexer.head_size
        return LatentKV(self.head_size - rotary, rotary, keys, self.compressor.ratio)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        found = [StateSpec(1, self.window - 1, self.head_size)]
        if self.compressor is not None:
            found.append(self.compressor.state(self.head_size))
            if self.indexer is not None:
                found.append(self.compressor.state(self.indexer.head_size))
        return tuple(found)

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, hidden = f"{names.ours}.", f"{names.theirs}.attn", names.hidden_size
        heads, size = self.num_heads, self.head_size
        width, rank = heads * size // self.groups, self.group_rank
        # transformers gives the norm of rows the compressor's name
        kv_norm = PartSpec(
            f"{theirs}.kv_norm.weight",
            size,
            alternatives=(PartSpec(f"{theirs}.norm.weight", size),),
        )
        first = tuple(
            PartSpec(f"{theirs}.wo_a.weight", rank, runs=RowRuns(group * rank, rank, rank))
            for group in range(self.groups)
        )
        last = (part(f"{theirs}.wo_b", hidden, False),)
        return (
            linear(
                f"{ours}q_latent", (part(f"{theirs}.wq_a", self.q_rank, False),), hidden, "none"
            ),
            vector(f"{ours}q_norm", f"{theirs}.q_norm.weight", self.q_rank),
            linear(f"{ours}q", (part(f"{theirs}.wq_b", heads * size, False),), self.q_rank, "none"),
            linear(f"{ours}kv", (part(f"{theirs}.wkv", size, False),), hidden, "none"),
            WeightSpec(f"{ours}kv_norm", "vector", (kv_norm,)),
            vector(f"{ours}sinks", f"{theirs}.attn_sink", heads),
            WeightSpec(f"{ours}o_groups", "stack", first, width, count=self.groups),
            linear(f"{ours}o", last, self.groups * rank, "none"),
            *self._compressor_weights(ours, theirs, hidden),
        )

    def _compressor_weights(self, ours: str, theirs: str, hidden: int) -> tuple[WeightSpec, ...]:
        if self.compressor is None:
            return ()
        own = self.compressor.weights(ours, f"{theirs}.compressor", self.head_size, hidden)
        if self.indexer is None:
            return own
        heads, size, theirs = self.indexer.num_heads, self.indexer.head_size, f"{theirs}.indexer"
        query, weigh = (
            (part(f"{theirs}.wq_b", heads * size, False),),
            (part(f"{theirs}.weights_proj", heads, False),),
        )
        return (
            *own,
            *self.compressor.weights(f"{ours}index_", f"{theirs}.compressor", size, hidden),
            linear(f"{ours}index_q", query, self.q_rank, "none"),
            linear(f"{ours}index_weights", weigh, hidden, "none"),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight, rope = scope.ops, scope.weight, scope.rope(self.rope)
        assert rope is not None
        latent = ops.linear(x, weight("q_latent"))  # (T, q_rank)
        latent = ops.rms_norm(latent, weight("q_norm"), self.norm_eps)
        row = ops.rms_norm(ops.linear(x, weight("kv")), weight("kv_norm"), self.norm_eps)  # (T, D)
        picked = self._picked(x, latent, scope)
        spec = CompressedAttentionSpec(
            state=scope.state,
            num_heads=self.num_heads,
            head_size=self.head_size,
            rotary_dim=self.rope.rotary_dim,
            window=self.window,
            scale=self.head_size**-0.5,
            norm_eps=self.norm_eps,
            layer=None if self.compressor is None else scope.cache,
            ratio=0 if self.compressor is None else self.compressor.ratio,
        )
        x = ops.compressed_attention(
            ops.linear(latent, weight("q")),
            row,
            spec,
            scope.step,
            rope=rope,
            sinks=weight("sinks"),
            picked=picked,
        )  # (T, H * D)
        return ops.linear(ops.grouped_linear(x, weight("o_groups")), weight("o"))  # (T, E)

    def _picked(self, x: Array, latent: Array, scope: LayerScope) -> Array | None:
        """Makes the entries of x and, with an indexer, returns the numbers (T, K) of those that are
        attended to."""
        if self.compressor is None:
            return None
        self.compressor.record(x, scope, self, "", self.head_size, 1, "entries")
        if self.indexer is None:
            return None
        size = self.indexer.head_size
        self.compressor.record(x, scope, self, "index_", size, 2, "keys")
        rope = scope.rope(self.rope)
        assert rope is not None
        spec = IndexerSpec(
            layer=scope.cache,
            num_heads=self.indexer.num_heads,
            head_size=size,
            rotary_dim=self.rope.rotary_dim,
            picked=self.indexer.picked,
            interleaved=True,
            ratio=self.compressor.ratio,
        )
        query = scope.ops.linear(latent, scope.weight("index_q"))
        weights = scope.ops.linear(x, scope.weight("index_weights"))
        return scope.ops.indexer(query, None, weights, spec, scope.step, rope=rope)
