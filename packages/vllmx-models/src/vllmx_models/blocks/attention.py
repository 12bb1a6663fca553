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
    Numbers,
    linear,
    packed_parts,
    part,
    transposed,
    vector,
)
from vllmx_models.blocks.norms import Norm
from vllmx_models.blocks.position_bias import Alibi, LearnedBias
from vllmx_models.blocks.query_scale import QueryScale
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
    by_head: bool = False
    """True if `qkv` has these three for each key/value head in turn."""
    transposed: bool = False
    """True if matrices are stored as (inputs, outputs); not with `gated` or `embedded`."""
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
    chunked: bool = False
    """See `AttentionSpec.chunked`."""
    scale: float | None = None
    """The factor of scores; None: 1 / sqrt(D)."""
    softcap: float | None = None
    rope_axes: tuple[int, ...] = ()
    """The position axis of each frequency, see `AttentionSpec.rope_axes`."""
    interleaved: bool = False
    """True if RoPE rotates neighbouring dimensions, as in GLM and Cohere."""
    qkv_bias: bool = False
    k_bias: bool = True
    """False if keys have no bias, whatever `qkv_bias` says, as in Whisper."""
    o_bias: bool = False
    qk_norm: Norm | None = None
    """The norm of query and key heads, before RoPE."""
    norm_last: bool = False
    """See `AttentionSpec.norm_last`; for one weight that all heads share."""
    norm_weights: Literal["shared", "each", "across", "none"] = "shared"
    """The weights of `qk_norm`: one (D) shared by all heads, one for each head (heads, D), one
    norm across all heads of q and one across those of k, or none."""
    clip: float | None = None
    """Queries, keys and values are held within +-clip; not with a `qk_norm` of shared weights."""
    value_size: int | None = None
    """The size of value heads, below D, without `v_norm` and `gated`; None: D. Pages have zeros
    behind them."""
    value_scale: float = 1.0
    """The factor of values."""
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
    position_bias: Alibi | LearnedBias | None = None
    """The bias of scores by distance; ALiBi only with `both_ways`."""
    gated: bool = False
    """True if the output is multiplied by the sigmoid of a gate. In the query matrix the D rows of
    each head's gate follow the head's D query rows."""
    query_scale: QueryScale | None = None
    """The factor of queries, which grows with the position; not with `qk_norm`."""
    embedded: Norm | None = None
    """The norm of the token's embedding, which q, k and v read before the stream (T, 2E)."""
    context: int | None = None
    """An own part of the store of hidden states, whose rows are the input at the tokens that
    `StepPlan.own_rows` names."""
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

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        """The weight of a norm that has none, and the bounds of `clip`."""
        found = [self._ones] if self.norm_weights == "none" else []
        return (*found, *(() if self.clip is None else (self._bounds,)))

    @property
    def _ones(self) -> Numbers:
        return Numbers(((1.0, self.head_size),))

    @property
    def _bounds(self) -> Numbers:
        assert self.clip is not None
        return Numbers(((-self.clip, 1), (self.clip, 1)))

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs = names.ours, names.within(self.names.module)
        width = self.num_heads * (self.value_size or self.head_size)
        qkv = WeightSpec(
            f"{ours}.qkv", "linear", self._qkv_parts(theirs), names.hidden_size, "column"
        )
        o = (part(f"{theirs}.{self.names.o}", names.hidden_size, self.o_bias),)
        vectors = list(self._norms(ours, theirs))
        if self.sinks:
            vectors.append(vector(f"{ours}.sinks", f"{theirs}.{self.names.sinks}", self.num_heads))
        specs = [qkv, *vectors, linear(f"{ours}.o", o, width, "row")]
        if isinstance(self.position_bias, LearnedBias):
            specs.append(self.position_bias.weights(f"{ours}.position_bias", self.num_heads))
        if self.names.transposed:
            return transposed(specs)
        if self.gated:
            gate = (self._half_of_queries(theirs, behind=True),)
            specs.insert(0, linear(f"{ours}.gate", gate, names.hidden_size))
        if self.embedded is not None:
            specs[:1] = self._over_both(qkv, self.embedded, names)
        return tuple(specs)

    @staticmethod
    def _over_both(qkv: WeightSpec, norm: Norm, names: LayerNames) -> Iterator[WeightSpec]:
        """The columns of q, k and v for the embedding and those for the stream."""
        source = f"{names.theirs}.input_layernorm"
        yield from norm.weights(f"{names.ours}.embed_norm", source, names.hidden_size)
        for end, first in (("_embedded", 0), ("", names.hidden_size)):
            parts = tuple(
                replace(one, first_col=first, bias=None if end else one.bias) for one in qkv.parts
            )
            yield replace(qkv, name=qkv.name + end, parts=parts)

    def _half_of_queries(self, theirs: str, *, behind: bool) -> PartSpec:
        """The query rows of each head, or (`behind`) the gate rows that follow them."""
        whole = part(f"{theirs}.{self.names.q}", self.num_heads * self.head_size, self.qkv_bias)
        size = self.head_size
        return replace(whole, runs=RowRuns(size if behind else 0, size, 2 * size))

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops = scope.ops
        if self.context is not None:
            x = ops.place(x, scope.step, self.context, own=True)
        gate = ops.linear(x, scope.weight("gate")) if self.gated else None  # (T, H * D)
        qkv = ops.linear(x, scope.weight("qkv"))  # (T, (H + 2K) * D); if shared, only queries
        if self.embedded is not None:
            name = f"layers.{scope.layer}.embed_norm"
            x = self.embedded.record(ops, scope.embedded, scope.weights, name)  # (T, E)
            qkv = ops.add(qkv, ops.linear(x, scope.weight("qkv_embedded")))
        if self.value_size is not None:
            keys = (self.num_heads + self.num_kv_heads) * self.head_size
            qkv = ops.resize(qkv, self.value_size, self.head_size, keys)
        q_norm, k_norm = self._norm(scope, "q_norm"), self._norm(scope, "k_norm")
        if (factors := scope.rope(self.query_scale)) is not None:
            qkv = ops.scale_at(qkv, factors, self.num_heads * self.head_size, scope.step)
        if self._normed_before:
            qkv, q_norm, k_norm = self._normed(ops, qkv, q_norm, k_norm)
        if self.clip is not None and (bounds := scope.rope(self._bounds)) is not None:
            assert q_norm is None
            qkv = ops.clip(qkv, bounds)
        if self.both_ways:
            x = ops.segment_attention(
                qkv,
                self._segments(),
                scope.step,
                rope=scope.rope(self.rope),
                bias=self._position_bias(scope),
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
            bias=self._position_bias(scope),
        )  # (T, H * D)
        if self.value_size is not None:
            x = ops.resize(x, self.head_size, self.value_size)  # (T, H * value_size)
        if self.value_scale != 1:
            x = ops.scale(x, self.value_scale)
        if gate is not None:
            x = ops.gate(x, gate, "sigmoid")
        return ops.linear(x, scope.weight("o"))  # (T, E)

    def _position_bias(self, scope: LayerScope) -> Weight | None:
        if isinstance(self.position_bias, LearnedBias):
            return scope.weight("position_bias")
        return scope.rope(self.position_bias)

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
            norm_last=self.norm_last,
            window=self.window,
            chunked=self.chunked,
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
        return self.both_ways or self.norm_weights in ("each", "across")

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
        if self.qk_norm is not None and self.norm_weights == "none":
            return scope.rope(self._ones)
        shared = name == "k_norm" and self.shared_with is not None
        return None if self.qk_norm is None or shared else scope.weight(name)

    def _norms(self, ours: str, theirs: str) -> Iterator[WeightSpec]:
        """The weights of `qk_norm`."""
        if self.qk_norm is None or self.norm_weights == "none":
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
        if self.names.qkv is not None and self.names.by_head:
            return self._parts_by_head(f"{theirs}.{self.names.qkv}")
        if self.names.qkv is not None:
            return packed_parts(f"{theirs}.{self.names.qkv}", (q, kv, kv), self.qkv_bias)
        values = self.num_kv_heads * (self.value_size or self.head_size)
        modules = [(self.names.q, q), (self.names.k, kv), (self.names.v, values)]
        if self.shared_with is not None:
            del modules[1:]
        parts = tuple(
            part(f"{theirs}.{name}", rows, self.qkv_bias and (self.k_bias or name != self.names.k))
            for name, rows in modules
        )
        return (self._half_of_queries(theirs, behind=False), *parts[1:]) if self.gated else parts

    def _parts_by_head(self, module: str) -> tuple[PartSpec, ...]:
        size, queries = self.head_size, self.num_heads // self.num_kv_heads * self.head_size
        runs = ((0, queries), (queries, size), (queries + size, size))
        return tuple(
            replace(
                part(module, self.num_kv_heads * rows, self.qkv_bias),
                runs=RowRuns(first, rows, queries + 2 * size),
            )
            for first, rows in runs
        )
