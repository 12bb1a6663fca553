"""The attention mixer: a fused q, k, v projection, attention over the paged KV cache, a projection.

H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from vllmx_core.model import Array, AttentionSpec, KVSpec, Ops, SharedKV, StateSpec, Weight
from vllmx_core.ops.head_norm import HeadNormSpec
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.layer import (
    LayerNames,
    LayerScope,
    linear,
    packed_parts,
    part,
    vector,
)
from vllmx_models.blocks.norms import Norm
from vllmx_models.blocks.rope import Rope


class AttentionNames(Record):
    """The names of the modules of attention in the checkpoint."""

    module: str = "self_attn"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    qkv: str | None = None
    """One matrix with the rows of q, then those of k, then those of v."""
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    """The module of the norm of keys, with {} where each head's norm is a module of its own."""
    sinks: str = "sinks"


class AttentionMixer(Record):
    """Grouped-query attention."""

    num_heads: int  # H
    num_kv_heads: int  # K
    head_size: int  # D
    rope: Rope | None = None
    """None: no position embedding (NoPE)."""
    window: int | None = None
    scale: float | None = None
    """The factor of scores; None: 1 / sqrt(D)."""
    softcap: float | None = None
    rope_axes: tuple[int, ...] = ()
    """The position axis of each frequency, see `AttentionSpec.rope_axes`."""
    interleaved: bool = False
    """True if RoPE rotates neighbouring dimensions, as in GLM and Cohere."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Norm | None = None
    """The norm of query and key heads, before RoPE."""
    norm_weights: Literal["shared", "each", "across"] = "shared"
    """The weights of `qk_norm`: one (D) shared by all heads, one for each head (heads, D), or one
    norm across all heads of q and one across those of k."""
    v_norm: bool = False
    """True if value heads get an RMS norm without a weight."""
    shared_with: int | None = None
    """An earlier layer; this one reads its keys and values and has none of its own."""
    sinks: bool = False
    """True if each head has a learned logit in addition to those of the tokens."""
    spans: bool = False
    """True if attention within an image is bidirectional: `AttentionSpec.spans`."""
    both_ways: bool = False
    """True if attention is bidirectional: there is no KV cache and a step holds whole texts."""
    gated: bool = False
    """True if the output is multiplied by the sigmoid of a gate. In the query matrix the D rows of
    each head's gate follow the head's D query rows."""
    names: AttentionNames = AttentionNames()

    @property
    def cache(self) -> KVSpec | SharedKV | None:
        if self.both_ways:
            return None
        if self.shared_with is not None:
            return SharedKV(self.shared_with)
        return KVSpec(self.num_kv_heads, self.head_size, self.window)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return ()

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs = names.ours, names.within(self.names.module)
        width = self.num_heads * self.head_size
        qkv = WeightSpec(
            f"{ours}.qkv", "linear", self._qkv_parts(theirs), names.hidden_size, "column"
        )
        o = (part(f"{theirs}.{self.names.o}", names.hidden_size, self.o_bias),)
        vectors = list(self._norms(ours, theirs))
        if self.sinks:
            vectors.append(vector(f"{ours}.sinks", f"{theirs}.{self.names.sinks}", self.num_heads))
        specs = [qkv, *vectors, linear(f"{ours}.o", o, width, "row")]
        if self.gated:
            gate = (self._half_of_queries(theirs, behind=True),)
            specs.insert(0, linear(f"{ours}.gate", gate, names.hidden_size))
        return tuple(specs)

    def _half_of_queries(self, theirs: str, *, behind: bool) -> PartSpec:
        """The query rows of each head, or (`behind`) the gate rows that follow them."""
        whole = part(f"{theirs}.{self.names.q}", self.num_heads * self.head_size, self.qkv_bias)
        size = self.head_size
        return replace(whole, runs=RowRuns(size if behind else 0, size, 2 * size))

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops = scope.ops
        gate = ops.linear(x, scope.weight("gate")) if self.gated else None  # (T, H * D)
        qkv = ops.linear(x, scope.weight("qkv"))  # (T, (H + 2K) * D); if shared, only queries
        q_norm, k_norm = self._norm(scope, "q_norm"), self._norm(scope, "k_norm")
        if self._normed_before:
            qkv, q_norm, k_norm = self._normed(ops, qkv, q_norm, k_norm)
        if self.both_ways:
            x = ops.segment_attention(
                qkv, self._segments(), scope.step, rope=scope.rope(self.rope)
            )  # (T, H * D)
            return ops.linear(x, scope.weight("o"))  # (T, E)
        x = ops.attention(
            qkv,
            self._options(scope.cache, spans=self.spans and scope.spans),
            scope.step,
            rope=scope.rope(self.rope),
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=scope.weight("sinks") if self.sinks else None,
        )  # (T, H * D)
        if gate is not None:
            x = ops.gate(x, gate, "sigmoid")
        return ops.linear(x, scope.weight("o"))  # (T, E)

    def _options(self, layer: int, *, spans: bool) -> AttentionSpec:
        return AttentionSpec(
            layer=layer,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.head_size**-0.5 if self.scale is None else self.scale,
            rotary_dim=0 if self.rope is None else self.rope.rotary_dim,
            interleaved=self.interleaved,
            norm_eps=1e-6 if self.qk_norm is None else self.qk_norm.eps,
            window=self.window,
            softcap=self.softcap,
            rope_axes=self.rope_axes,
            spans=spans,
            shared=self.shared_with is not None,
        )

    def _segments(self) -> SegmentSpec:
        assert self.softcap is None, "segments have no soft-cap"
        assert not self.sinks, "segments have no sinks"
        return SegmentSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.head_size**-0.5 if self.scale is None else self.scale,
            0 if self.rope is None else self.rope.rotary_dim,
            self.interleaved,
            self.window,
        )

    @property
    def _own_norms(self) -> bool:
        """True if the norm's weight is not a single one shared by all heads."""
        return self.both_ways or self.norm_weights != "shared"

    @property
    def _normed_before(self) -> bool:
        """True if a separate op normalises heads: `ops.attention` only fuses norms of queries and
        keys with one weight for all heads."""
        own = self.qk_norm is not None and self._own_norms
        return own or (self.v_norm and self.shared_with is None)

    def _normed(
        self, ops: Ops, qkv: Array, q_norm: Weight | None, k_norm: Weight | None
    ) -> tuple[Array, Weight | None, Weight | None]:
        """Returns the normalised heads and the norm weights that `ops.attention` still applies."""
        norm = self.qk_norm
        assert norm is not None
        spec = HeadNormSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            norm.eps,
            norm.kind,
            across=self.norm_weights == "across",
            values=self.v_norm,
        )
        if not self._own_norms:
            return ops.head_norm(qkv, spec), q_norm, k_norm
        return ops.head_norm(qkv, spec, q_norm, k_norm), None, None

    def _norm(self, scope: LayerScope, name: str) -> Weight | None:
        shared = name == "k_norm" and self.shared_with is not None
        return None if self.qk_norm is None or shared else scope.weight(name)

    def _norms(self, ours: str, theirs: str) -> Iterator[WeightSpec]:
        """The weights of `qk_norm`."""
        if self.qk_norm is None:
            return
        size, offset = self.head_size, self.qk_norm.offset
        kinds = [("q_norm", self.names.q_norm, self.num_heads)]
        if self.shared_with is None:
            kinds.append(("k_norm", self.names.k_norm, self.num_kv_heads))
        for name, module, heads in kinds:
            source = f"{theirs}.{module}.weight"
            count = 1 if self.norm_weights == "shared" else heads
            if "{}" in module:
                parts = tuple(PartSpec(source.format(head), size) for head in range(count))
                yield WeightSpec(f"{ours}.{name}", "vector", parts, offset=offset)
            elif self.norm_weights == "shared" and self.both_ways:
                repeated = (PartSpec(source, size),) * heads
                yield WeightSpec(f"{ours}.{name}", "vector", repeated, offset=offset)
            else:
                shape = (heads, size) if self.norm_weights == "each" else None
                flat = (PartSpec(source, count * size),)
                yield WeightSpec(f"{ours}.{name}", "vector", flat, offset=offset, shape=shape)

    def _qkv_parts(self, theirs: str) -> tuple[PartSpec, ...]:
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        if self.names.qkv is not None:
            return packed_parts(f"{theirs}.{self.names.qkv}", (q, kv, kv), self.qkv_bias)
        modules = [(self.names.q, q), (self.names.k, kv), (self.names.v, kv)]
        if self.shared_with is not None:
            del modules[1:]
        parts = tuple(part(f"{theirs}.{name}", rows, self.qkv_bias) for name, rows in modules)
        return (self._half_of_queries(theirs, behind=False), *parts[1:]) if self.gated else parts
