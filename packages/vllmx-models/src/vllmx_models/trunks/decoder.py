"""The decoder that most open models share: layers of a mixer and a feed-forward around a stream.

An architecture reads its config.json into a `DecoderSpec`: layers are data, built of the blocks in
`vllmx_models.blocks`. E hidden size, T tokens of a step, V vocabulary, L rows of logits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import (
    LAST_NORM,
    Array,
    Encoder,
    FeatureSpec,
    Model,
    ModelShape,
    Ops,
    Output,
    StepInputs,
    Weight,
)
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.map import resolved
from vllmx_core.weights.part import WeightSource, are_equal
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.altup import AltUp
from vllmx_models.blocks.hyper_connections import HyperConnections
from vllmx_models.blocks.layer import (
    Block,
    FeedForward,
    LayerNames,
    LayerScope,
    Mixer,
    Numbers,
    Positions,
    renamed,
    vector,
)
from vllmx_models.blocks.norms import PRE, LayerNorms, Norm, ResidualStream
from vllmx_models.blocks.position_bias import Alibi
from vllmx_models.blocks.query_scale import QueryScale
from vllmx_models.blocks.rope import Rope
from vllmx_models.config import ConfigReader
from vllmx_models.trunks.pooling_heads import LinearHead, num_labels, read_modules

logger = logging.getLogger("vllmx.models")
HEAD = "lm_head.weight"
"""The head in checkpoints of transformers, even if the text model is part of a larger one."""


class LayerSpec(Record):
    """One layer; one of its two blocks may be missing."""

    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: LayerNorms = PRE
    extra: Block | None = None
    """A block after the feed-forward that reads the stream without a norm."""
    scalar: str | None = None
    """A tensor with one value that scales the stream at the end of the layer."""

    @property
    def both(self) -> tuple[Mixer, FeedForward]:
        """The blocks of a layer that has two."""
        assert self.mixer is not None, "the layer has no mixer"
        assert self.feed_forward is not None, "the layer has no feed-forward"
        return self.mixer, self.feed_forward


class ModelNames(Record):
    """Modules of the checkpoint outside the layers."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    also: tuple[str, str] | None = None
    """(prefix, alternative prefix in other checkpoints)."""
    embedding_also: str | None = None
    """Another module of the embedding in some checkpoints."""
    first_layer: int = 0
    """The number of the first layer in the checkpoint."""


class Prediction(Protocol):
    """Layers of multi-token prediction, see `vllmx_models.trunks.heads`."""

    def model(self, spec: DecoderSpec) -> Model:
        """The drafter for a decoder."""


class DecoderSpec(Record):
    """The architecture of a decoder as data."""

    vocab_size: int  # V
    hidden_size: int  # E
    layers: tuple[LayerSpec, ...]
    max_model_len: int
    dtype: str
    norm: Norm
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """The factor of each block's output."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    features: FeatureSpec | None = None
    """Image features: the first part replaces embeddings, part i is added after layer i - 1."""
    names: ModelNames = ModelNames()
    prediction: Prediction | None = None
    hyper: HyperConnections | AltUp | None = None
    """None: one residual stream."""
    positions: Positions | None = None
    """A table of positions, which is added to the embeddings."""
    head_bias: bool = False

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of the layers that have one."""
        return tuple(layer.mixer for layer in self.layers if layer.mixer is not None)


class Decoder:
    """A `vllmx_core.model.Model` over a `DecoderSpec`, optionally with a vision tower."""

    def __init__(self, spec: DecoderSpec, encoder: Encoder | None = None) -> None:
        self.spec = spec
        self.encoder = encoder
        self.tables = rope_tables(spec.layers)

    @property
    def shape(self) -> ModelShape:
        spec = self.spec
        return ModelShape(
            spec.vocab_size,
            spec.hidden_size,
            spec.max_model_len,
            tuple(mixer.cache for mixer in spec.mixers if mixer.cache is not None),
            spec.dtype,
            tuple(state for mixer in spec.mixers for state in mixer.states),
            features=spec.features,
        )

    @property
    def heads(self) -> Model | None:
        """See `vllmx_core.model.heads_of`."""
        return None if self.spec.prediction is None else self.spec.prediction.model(self.spec)

    def answering(self, output: Output, config: Mapping[str, Any]) -> Model:
        """The model with a pooling head instead of logits, as its config says."""
        return pooled_decoder(self.text_alone().spec, output, config)

    def text_alone(self) -> Decoder:
        """The model without its tower, for backends that lack the tower's ops."""
        return Decoder(replace(self.spec, features=None))

    def with_stored_head(self, source: WeightSource) -> Decoder:
        """The decoder with the stored head, if the config ties it to the embedding but the two
        differ."""
        if not self.spec.tied_embeddings:
            return self
        untied = Decoder(replace(self.spec, tied_embeddings=False), self.encoder)
        head, table = (resolved(source, one.weights()[-1].parts[0]) for one in (untied, self))
        if not {head.name, table.name} <= set(source.names()):
            return self
        stored, embedding = source.part(head.name), source.part(table.name)
        if are_equal(stored, embedding):
            return self
        if stored.shape != embedding.shape:
            logger.warning(
                "tie_word_embeddings is true: %s is left out, its shape %s is not that of the"
                " embedding, %s",
                head.name,
                list(stored.shape),
                list(embedding.shape),
            )
            return self
        logger.warning(
            "tie_word_embeddings is true, but %s differs from %s: the stored head is used",
            head.name,
            table.name,
        )
        return untied

    def weights(self) -> tuple[WeightSpec, ...]:
        """The weight map, by the names that the architecture's checkpoints have."""
        spec = self.spec
        head = (self.head_part(),)
        found = (
            WeightSpec("lm_head", "linear", head, spec.hidden_size, "vocab", role="vocabulary"),
        )
        return (*self.trunk_weights(), *self._named(found))

    def head_part(self) -> PartSpec:
        """The matrix of the head, as the checkpoint names it."""
        if self.spec.tied_embeddings:
            return self._table_part()
        head = f"{self.spec.names.head}.weight"
        other = () if head == HEAD else (HEAD,)
        bias = f"{self.spec.names.head}.bias" if self.spec.head_bias else None
        return PartSpec(head, self.spec.vocab_size, bias, alternatives=other)

    def _table_part(self) -> PartSpec:
        """The embedding; if tied, a checkpoint may store it under the head's name."""
        spec, names = self.spec, self.spec.names
        other = (f"{names.head}.weight",) if spec.tied_embeddings else ()
        if names.embedding_also is not None:
            other = (*other, f"{names.embedding_also}.weight")
        return PartSpec(f"{names.embedding}.weight", spec.vocab_size, alternatives=other)

    def trunk_weights(self) -> tuple[WeightSpec, ...]:
        """Weights that `hidden` reads."""
        spec, names = self.spec, self.spec.names
        table = (self._table_part(),)
        layers = (self._layer_weights(index, layer) for index, layer in enumerate(spec.layers))
        found = (
            WeightSpec("embed", "embedding", table, spec.hidden_size, "vocab", role="vocabulary"),
            *(() if spec.positions is None else spec.positions.weights(spec.hidden_size)),
            *(weight for layer in layers for weight in layer),
            *(() if spec.hyper is None else spec.hyper.last_weights(spec.hidden_size)),
            *spec.norm.weights("norm", names.norm, spec.hidden_size),
        )
        return self._named(found)

    def _named(self, specs: tuple[WeightSpec, ...]) -> tuple[WeightSpec, ...]:
        also = self.spec.names.also
        return specs if also is None else tuple(renamed(one, *also) for one in specs)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return {name: rope.table(max_model_len) for name, rope in self.tables.items()}

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = _scaled(ops, self.hidden(ops, w, step), self.spec.logit_scale)
        return ops.logits(x, step.logit_rows, w["lm_head"], self.spec.logit_softcap)  # (L, V)

    def hidden(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """(T, E) the output of the last norm."""
        spec = self.spec
        x = self.first_input(ops, w, step)
        if spec.features is not None and not spec.features.crossed:
            x = ops.place(x, step)
        stream = ResidualStream(ops, w, spec.norm, x)
        if spec.hyper is not None:
            stream = spec.hyper.stream(ops, w, spec.norm, x)
        spans = spec.features is not None and spec.features.spans
        self.layers(stream, LayerScope(ops, w, step, 0, 0, 0, self.tables, x, spans))
        x = stream.normed("norm")
        ops.tap(x, LAST_NORM)
        return x

    def layers(self, stream: ResidualStream, scope: LayerScope) -> None:
        """Records all layers over the stream, with the scope of the first."""
        features = self.spec.features
        num_added = 0 if features is None or features.crossed else features.parts - 1
        for index, layer in enumerate(self.spec.layers):
            stream.tap(index)
            self.layer(layer, stream, scope)
            cache, state = scope.cache, scope.state
            if layer.mixer is not None:
                cache += layer.mixer.cache is not None
                state += len(layer.mixer.states)
            if index < num_added:
                added = scope.ops.place(stream.read(), scope.step, index + 1, adds=True)
                stream.replace(added)
            scope = replace(scope, layer=index + 1, cache=cache, state=state)
        stream.tap(len(self.spec.layers))

    def first_input(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """(T, E) the residual stream before the first layer, but for images."""
        x = _scaled(ops, ops.embedding(step.tokens, w["embed"]), self.spec.embedding_scale)
        table = self.spec.positions
        return x if table is None else ops.add(x, table.record(ops, w, step))

    def layer(self, layer: LayerSpec, stream: ResidualStream, scope: LayerScope) -> None:
        """Records one layer over the stream."""
        if layer.norms.parallel:
            self._parallel(layer, stream, scope)
        else:
            self._mix(layer, stream, scope)
            self._feed(layer, stream, scope)
        if layer.extra is not None:
            stream.add(layer.extra.record(stream.read(), scope))
        if layer.scalar is not None:
            stream.scale(f"layers.{scope.layer}.scalar")

    def _mix(self, layer: LayerSpec, stream: ResidualStream, scope: LayerScope) -> None:
        if layer.mixer is None:
            return
        names = layer.norms.named
        x = self._read("attn_norm", names, stream, scope)
        stream.add(self._written("attn_post_norm", names, layer.mixer.record(x, scope), scope))

    def _feed(self, layer: LayerSpec, stream: ResidualStream, scope: LayerScope) -> None:
        if layer.feed_forward is None:
            return
        names = layer.norms.named
        x = self._read("mlp_norm", names, stream, scope)
        fed = layer.feed_forward.record(x, replace(scope, stream=stream.read()))
        stream.add(self._written("mlp_post_norm", names, fed, scope))

    def _parallel(self, layer: LayerSpec, stream: ResidualStream, scope: LayerScope) -> None:
        """Records a layer with both blocks in parallel on the layer's input."""
        (mixer, feed_forward), names = layer.both, layer.norms.named
        x = self._read("attn_norm", names, stream, scope)
        mixed = self._written("attn_post_norm", names, mixer.record(x, scope), scope)
        if "mlp_norm" in names:
            x = self._read("mlp_norm", names, stream, scope)
        fed = feed_forward.record(x, replace(scope, stream=stream.read()))
        fed = self._written("mlp_post_norm", names, fed, scope)
        stream.add(scope.ops.add(mixed, fed))

    def _read(
        self, name: str, names: Mapping[str, str], stream: ResidualStream, scope: LayerScope
    ) -> Array:
        """A block's input: the stream, normalised if the layer has the norm `name`."""
        return stream.normed(f"layers.{scope.layer}.{name}") if name in names else stream.read()

    def _written(self, name: str, names: Mapping[str, str], x: Array, scope: LayerScope) -> Array:
        """A block's update of the stream: its output, normalised and scaled."""
        if name in names:
            x = self.spec.norm.record(scope.ops, x, scope.weights, f"layers.{scope.layer}.{name}")
        return _scaled(scope.ops, x, self.spec.residual_scale)

    def _layer_weights(self, index: int, layer: LayerSpec) -> tuple[WeightSpec, ...]:
        size, number = self.spec.hidden_size, self.spec.names.first_layer + index
        names = LayerNames(f"layers.{index}", f"{self.spec.names.layers}.{number}", size)
        norms = {
            name: self.spec.norm.weights(f"{names.ours}.{name}", f"{names.theirs}.{module}", size)
            for name, module in layer.norms.named.items()
        }
        scalar = None if layer.scalar is None else f"{names.theirs}.{layer.scalar}"
        hyper = self.spec.hyper
        return (
            *(() if hyper is None else hyper.layer_weights(names.ours, names.theirs, size)),
            *norms.get("attn_norm", ()),
            *(() if layer.mixer is None else layer.mixer.weights(names)),
            *norms.get("attn_post_norm", ()),
            *norms.get("mlp_norm", ()),
            *(() if layer.feed_forward is None else layer.feed_forward.weights(names)),
            *norms.get("mlp_post_norm", ()),
            *(() if layer.extra is None else layer.extra.weights(names)),
            *(() if scalar is None else (vector(f"{names.ours}.scalar", scalar, 1),)),
        )


def rope_tables(layers: Sequence[LayerSpec]) -> dict[str, Rope | QueryScale | Alibi | Numbers]:
    """The distinct RoPEs, query scales, ALiBi and numbers of the layers by the names of their
    tables."""
    found: list[Rope | QueryScale | Alibi | Numbers] = []
    for layer in layers:
        # a mixer of a plugin may have no others than `rope`
        names = ("rope", "query_scale", "position_bias")
        named = [getattr(layer.mixer, name, None) for name in names]
        for one in (*named, *getattr(layer.mixer, "numbers", ())):
            if hasattr(one, "table") and one not in found:
                found.append(one)
    return {f"rope.{index}": one for index, one in enumerate(found)}


def _scaled(ops: Ops, x: Array, factor: float) -> Array:
    return x if factor == 1.0 else ops.scale(x, factor)


class PooledDecoder:
    """A decoder with a pooling head instead of logits: it returns vectors or scores.

    Embedders (Qwen3-Embedding, E5-Mistral), rerankers that score by the logits of "no" and "yes"
    (Qwen3-Reranker), and `...ForSequenceClassification` over any decoder.
    """

    def __init__(self, spec: DecoderSpec, head: LinearHead) -> None:
        self.spec, self._decoder, self._head = spec, Decoder(spec), head

    @property
    def shape(self) -> ModelShape:
        shape, head = self._decoder.shape, self._head
        return replace(
            shape,
            output=head.output,
            output_size=head.size(shape.hidden_size),
            whole_prompts=head.pooling != "last" or not (shape.caches or shape.states),
        )

    def weights(self) -> tuple[WeightSpec, ...]:
        return (*self._decoder.trunk_weights(), *self._head.weights(self.shape.hidden_size))

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return self._decoder.constants(max_model_len)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        return self._head.record(ops, w, self._decoder.hidden(ops, w, step), step)


def pooled_decoder(spec: DecoderSpec, output: Output, config: Mapping[str, Any]) -> PooledDecoder:
    """Makes a decoder with the pooling of `vllmx_core.text_modules` and the config, by default of
    the last token. Raises UnsupportedModelError."""
    if spec.names.also is None:  # saved without the head, its layers have no prefix
        spec = replace(spec, names=replace(spec.names, also=("model.", "")))
    pooling, dense = read_modules(config, spec.hidden_size)
    if dense and pooling is None:
        raise UnsupportedModelError(
            "modules.json has a dense layer and no pooling: vectors of each token are served of"
            " encoders alone, such as lightonai/GTE-ModernColBERT-v1"
        )
    if output == "vectors":
        return PooledDecoder(spec, LinearHead("vectors", pooling or "last", dense))
    tokens = config.get("score_tokens")
    if tokens is None:
        head = _labels(spec, config)
    elif "score_rows" in config:
        head = _rows(spec, PartSpec("score.weight", 1), config["score_rows"])
    else:
        head = _token_rows(spec, tokens)
    return PooledDecoder(spec, LinearHead("scores", "last", ((head, "identity"),)))


def _labels(spec: DecoderSpec, config: Mapping[str, Any]) -> WeightSpec:
    """The matrix of `...ForSequenceClassification`, one row for each label."""
    count = num_labels(ConfigReader(config, "ForSequenceClassification"))
    return WeightSpec("score", "linear", (PartSpec("score.weight", count),), spec.hidden_size)


def _rows(spec: DecoderSpec, head: PartSpec, rows: Sequence[int]) -> WeightSpec:
    """Selected rows of a head, in this order."""
    parts = tuple(replace(head, rows=1, runs=RowRuns(row, 1, 1)) for row in rows)
    return WeightSpec("score", "linear", parts, spec.hidden_size)


def _token_rows(spec: DecoderSpec, tokens: Sequence[object]) -> WeightSpec:
    """The rows of the output head of these tokens."""
    head, rows = Decoder(spec).head_part(), []
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < spec.vocab_size:
            raise UnsupportedModelError(
                f"score_tokens names the token {token!r}, the vocabulary has {spec.vocab_size}"
            )
        rows.append(token)
    found = _rows(spec, head, rows)
    also = spec.names.also
    if also is None or not head.name.startswith(also[0]):
        return found
    names = (also[1] + head.name.removeprefix(also[0]),)
    return replace(found, parts=tuple(replace(one, alternatives=names) for one in found.parts))
