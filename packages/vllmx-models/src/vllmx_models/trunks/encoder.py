"""The encoder of embedders, cross-encoders and classifiers: layers with bidirectional attention and
a pooling head.

An architecture reads its config.json into an `EncoderSpec`, made of the same blocks as decoders.
E hidden size, T tokens of a step, L texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import Array, ModelShape, Ops, StepInputs, Weight
from vllmx_core.ops.activation import ActKind
from vllmx_core.ops.pool import PoolKind
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import LayerNames, LayerScope
from vllmx_models.blocks.norms import Norm
from vllmx_models.config import ConfigReader
from vllmx_models.trunks.decoder import LayerSpec, rope_tables
from vllmx_models.trunks.pooling_heads import ClassHead, PoolingHead, num_labels, pooled

_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""The names of norm weights in early BERT checkpoints."""


class EncoderNames(Record):
    """Modules of the checkpoint outside the layers."""

    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str | None = "embeddings.LayerNorm"
    layers: str = "encoder.layer"
    norm: str | None = None
    """The norm after the last layer."""
    prefixes: tuple[str, ...] = ()
    """Optional prefixes of all modules in checkpoints."""


class EncoderSpec(Record):
    """The architecture of an encoder as data."""

    vocab_size: int
    hidden_size: int  # E
    layers: tuple[LayerSpec, ...]
    max_model_len: int
    dtype: str
    norm: Norm
    sums_normed: bool = False
    """True for post-norm, as in BERT: norms follow each residual sum; else pre-norm."""
    positions: int = 0
    """Rows of the position table; 0: no table."""
    first_position: int = 0
    """The position of a text's first token."""
    token_types: int = 0
    """Rows of the token type table; 0: no table."""
    names: EncoderNames = EncoderNames()


class Encoder:
    """A `vllmx_core.model.Model` over an `EncoderSpec`, with a pooling head."""

    def __init__(self, spec: EncoderSpec, head: PoolingHead) -> None:
        self.spec, self.head = spec, head
        self._tables = rope_tables(spec.layers)

    @property
    def shape(self) -> ModelShape:
        spec = self.spec
        return ModelShape(
            spec.vocab_size,
            spec.hidden_size,
            spec.max_model_len,
            (),
            spec.dtype,
            output=self.head.output,
            output_size=self.head.size(spec.hidden_size),
            whole_prompts=True,
        )

    def weights(self) -> tuple[WeightSpec, ...]:
        """The weight map, by the names that the architecture's checkpoints have."""
        found = (*self._weights(), *self.head.weights(self.spec.hidden_size))
        return tuple(_renamed(one, self.spec.names.prefixes) for one in found)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return {name: rope.table(max_model_len) for name, rope in self._tables.items()}

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        return self.head.record(ops, w, self.hidden(ops, w, step), step)

    def hidden(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """(T, E) the hidden states after the last layer."""
        norm = self.spec.norm
        x = self._embedded(ops, w, step)  # (T, E)
        if self.spec.names.embedding_norm:
            x = norm.record(ops, x, w, "embed_norm")
        for index, layer in enumerate(self.spec.layers):
            scope = LayerScope(ops, w, step, index, 0, 0, self._tables, x)
            x = self._layer(layer, scope, x)
        return norm.record(ops, x, w, "norm") if self.spec.names.norm else x

    def _embedded(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        if self.spec.token_types:
            x = ops.add(x, ops.embedding(step.token_types, w["token_types"]))
        if self.spec.positions:
            first = self.spec.first_position
            x = ops.add(x, ops.embedding(step.positions, w["positions"], first))
        return x

    def _layer(self, layer: LayerSpec, scope: LayerScope, x: Array) -> Array:
        ops, norm, names = scope.ops, self.spec.norm, layer.norms.named

        def normed(x: Array, name: str) -> Array:
            known = name in names
            return (
                norm.record(ops, x, scope.weights, f"layers.{scope.layer}.{name}") if known else x
            )

        mixer, feed_forward = layer.both
        if self.spec.sums_normed:
            x = normed(ops.add(x, mixer.record(x, scope)), "attn_post_norm")
            return normed(ops.add(x, feed_forward.record(x, scope)), "mlp_post_norm")
        x = ops.add(x, mixer.record(normed(x, "attn_norm"), scope))
        return ops.add(x, feed_forward.record(normed(x, "mlp_norm"), scope))

    def _weights(self) -> Iterator[WeightSpec]:
        spec, names, size = self.spec, self.spec.names, self.spec.hidden_size
        tables = {
            "embed": (names.words, spec.vocab_size),
            "token_types": (names.types, spec.token_types),
            "positions": (names.positions, spec.positions),
        }
        for name, (module, rows) in tables.items():
            if rows:
                part = PartSpec(f"{module}.weight", rows)
                yield WeightSpec(name, "embedding", (part,), size, role="vocabulary")
        if names.embedding_norm:
            yield from spec.norm.weights("embed_norm", names.embedding_norm, size)
        for index, layer in enumerate(spec.layers):
            where = LayerNames(f"layers.{index}", f"{names.layers}.{index}", size)
            for block in layer.both:
                yield from block.weights(where)
            for name, module in layer.norms.named.items():
                yield from spec.norm.weights(f"{where.ours}.{name}", where.within(module), size)
        if names.norm:
            yield from spec.norm.weights("norm", names.norm, size)


Constructor = Callable[[Mapping[str, Any]], Encoder]


def embedder(
    spec_of: Callable[[ConfigReader], EncoderSpec], name: str, default: PoolKind = "mean"
) -> Constructor:
    """The constructor of an embedder, which pools by `default` unless modules.json says otherwise;
    `name` is the family's, such as Bert."""

    def construct(config: Mapping[str, Any]) -> Encoder:
        spec = spec_of(ConfigReader(config, f"{name}Model"))
        return Encoder(spec, pooled(config, spec.hidden_size, default))

    return construct


def classifier(
    spec_of: Callable[[ConfigReader], EncoderSpec],
    name: str,
    dense: str,
    classes: str,
    activation: ActKind = "tanh",
) -> Constructor:
    """The constructor of a classifier on the first token, with the modules of its two layers."""

    def construct(config: Mapping[str, Any]) -> Encoder:
        read = ConfigReader(config, f"{name}ForSequenceClassification")
        head = ClassHead(num_labels(read), dense, classes, activation=activation)
        return Encoder(spec_of(read), head)

    return construct


def _renamed(spec: WeightSpec, prefixes: tuple[str, ...]) -> WeightSpec:
    """Adds the names that other checkpoints have as alternatives."""
    return replace(
        spec, parts=tuple(replace(one, alternatives=_others(one, prefixes)) for one in spec.parts)
    )


def _others(part: PartSpec, prefixes: tuple[str, ...]) -> tuple[str | PartSpec, ...]:
    names = [part.name]
    for end, old in _OLD_NAMES.items():
        if part.name.endswith(end):
            names.append(part.name.removesuffix(end) + old)
    prefixed = (prefix + name for name in names for prefix in prefixes)
    return (*prefixed, *names[1:], *part.alternatives)
