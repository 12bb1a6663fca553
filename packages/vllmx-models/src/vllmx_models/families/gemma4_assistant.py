"""Gemma 4's assistants (Gemma4AssistantForCausalLM): a few layers of queries, which read the keys
and values of their target's last layers. They read its hidden states and its embedding too.

A drafted token has no keys and values, so all queries of a draft have the position of the last id
and see the ids before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import (
    LAST_NORM,
    OWN_TENSOR,
    Array,
    CacheSpec,
    DraftSpec,
    Model,
    ModelShape,
    Ops,
    StepInputs,
    Weight,
)
from vllmx_core.plan import AnyArray
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.layer import LayerScope, linear
from vllmx_models.blocks.norms import ResidualStream
from vllmx_models.config import ConfigReader
from vllmx_models.configs.drafter import target_config
from vllmx_models.configs.text import text_config
from vllmx_models.families.gemma4 import gemma4
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec

_NAME = "Gemma4AssistantForCausalLM"


class Gemma4Assistant:
    """Sizes: T tokens of a step, L logit rows, V vocabulary, E and F hidden sizes of the drafter
    and its target.

    Args:
        target: the decoder that it drafts for.
        owners: the layer of the target whose keys and values each layer reads.
    """

    def __init__(self, spec: DecoderSpec, target: Decoder, owners: tuple[int, ...]) -> None:
        self._spec, self._target, self._owners = spec, target, owners
        self._decoder = Decoder(spec)
        self.borrowed: dict[str, tuple[PartSpec, ...]] = {}
        """Parts of the target's weights, by the names of its own."""

    @property
    def shape(self) -> ModelShape:
        size = self._target.spec.hidden_size
        drafts = DraftSpec((LAST_NORM,), (size,), size, reads_pages=True)
        caches: tuple[CacheSpec, ...] = self._target.shape.caches
        return replace(self._decoder.shape, caches=caches, drafts=drafts)

    def with_stored_head(self, source: WeightSource) -> Gemma4Assistant:
        """The assistant: its head is its embedding."""
        return self

    def borrow(self, target: Model, own: Collection[str]) -> None:
        """Takes the embedding of the target."""
        (table,) = (spec for spec in target.weights() if spec.name == "embed")
        self.borrowed["embed"] = table.parts

    def weights(self) -> tuple[WeightSpec, ...]:
        size, theirs = self._spec.hidden_size, self._target.spec.hidden_size
        (table,) = (spec for spec in self._target.weights() if spec.name == "embed")
        table = replace(table, parts=self.borrowed.get("embed", table.parts))
        halves = (PartSpec("pre_projection.weight", size, first_col=col) for col in (0, theirs))
        embedded, hidden = halves
        own, *others = self._decoder.trunk_weights()
        (part,) = own.parts
        head = (replace(part, name=OWN_TENSOR + part.name, alternatives=()),)
        return (
            table,
            linear("pre.embedded", (embedded,), theirs),
            linear("pre.hidden", (hidden,), theirs),
            *others,
            linear("post", (PartSpec("post_projection.weight", theirs),), size),
            replace(own, name="lm_head", kind="linear", parts=head),
        )

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """The tables of rotations, one position on: a query follows the context that it sees."""
        tables = self._decoder.constants(max_model_len + 1)
        return {name: table[1:] for name, table in tables.items()}

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        embedded = ops.embedding(step.tokens, w["embed"])
        embedded = ops.scale(embedded, self._target.spec.embedding_scale)  # (T, F)
        hidden = ops.place(ops.place(embedded, step, 0), step, 1, own=True)  # (T, F)
        x = ops.linear(embedded, w["pre.embedded"])
        x = ops.add(x, ops.linear(hidden, w["pre.hidden"]))  # (T, E)
        stream = ResidualStream(ops, w, self._spec.norm, x)
        tables = self._decoder.tables
        for index, (layer, owner) in enumerate(zip(self._spec.layers, self._owners, strict=True)):
            scope = LayerScope(ops, w, step, index, owner, 0, tables, x, spans=False)
            self._decoder.layer(layer, stream, scope)
        x = stream.normed("norm")
        ops.write(ops.linear(x, w["post"]), 1)
        return ops.logits(x, step.logit_rows, w["lm_head"])  # (L, V)


def gemma4_assistant(config: Mapping[str, Any]) -> Gemma4Assistant:
    """Layers of Gemma 4. The head over clusters of ids (`use_ordered_embeddings`), a faster way to
    nearly the same logits, is left out."""
    target = gemma4(target_config(ConfigReader(config, _NAME)))
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    decoder = gemma4({**text_config(config, {}), **own, "architectures": ["Gemma4ForCausalLM"]})
    read, size = ConfigReader(config, _NAME), target.spec.hidden_size
    if read.integer("backbone_hidden_size", size) != size:
        raise read.error("backbone_hidden_size", f"does not fit the model, whose size is {size}")
    if decoder.spec.vocab_size != target.spec.vocab_size:
        found, wanted = decoder.spec.vocab_size, target.spec.vocab_size
        raise UnsupportedModelError(
            f"the assistant has {found} ids, the model {wanted}: choose the assistant of this model"
        )
    pairs = [_over(layer, target) for layer in decoder.spec.layers]
    layers = tuple(layer for layer, _ in pairs)
    spec = replace(decoder.spec, layers=layers, logit_softcap=None, tied_embeddings=False)
    return Gemma4Assistant(spec, target, tuple(owner for _, owner in pairs))


def _over(layer: LayerSpec, target: Decoder) -> tuple[LayerSpec, int]:
    """A layer of queries alone, and the last layer of the target of its kind. The context ends one
    position before the query, so a window reaches one less far."""
    mixer = layer.mixer
    assert isinstance(mixer, AttentionMixer)
    slides, found = mixer.window is not None, 0
    for index, theirs in enumerate(target.spec.mixers):
        if isinstance(theirs, AttentionMixer) and theirs.shared_with is None:
            found = index if (theirs.window is not None) == slides else found
    owner = target.spec.mixers[found]
    assert isinstance(owner, AttentionMixer)
    sizes = [(one.num_kv_heads, one.head_size, one.window) for one in (mixer, owner)]
    if sizes[0] != sizes[1]:
        raise UnsupportedModelError(
            f"the assistant reads layers with (key/value heads, head size, window) = {sizes[0]},"
            f" the model has {sizes[1]}: choose the assistant of this model"
        )
    window = None if mixer.window is None else mixer.window - 1
    return replace(layer, mixer=replace(mixer, shared_with=found, window=window)), found
