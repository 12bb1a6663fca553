"""Drafters that read the hidden states of their target: what EAGLE-3 and DFlash share.

E hidden size, T tokens of a step, L rows of logits, V vocabulary, D the drafter's part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
from vllmx_core.errors import WeightFormatError
from vllmx_core.model import Array, DraftSpec, Model, ModelShape, Ops, StepInputs, Weight
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.map import choices
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import LayerScope, renamed_part
from vllmx_models.blocks.norms import ResidualStream
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, rope_tables

_OTHER_PREFIXES = (("layers.0.", "midlayer."), ("", "model."))


class Drafter:
    """The parts around a drafter's layers: a projection of the target's hidden states, ids that may
    be a part of the target's, an embedding and a head that may be the target's own.

    Args:
        num_ids: D; below V the checkpoint's tensor `d2t` says which ids they are.
    """

    def __init__(self, spec: DecoderSpec, drafts: DraftSpec, num_ids: int) -> None:
        self.spec, self.drafts, self._num_ids = spec, drafts, num_ids
        self.own_part = len(drafts.points)
        self.decoder = Decoder(spec)
        self.borrowed: dict[str, tuple[PartSpec, ...]] = {}
        """Parts of the target's weights, by the names of its own."""
        self._sources: F32 | None = None

    @property
    def shape(self) -> ModelShape:
        return replace(self.decoder.shape, drafts=self.drafts)

    def with_stored_head(self, source: WeightSource) -> Drafter:
        """The drafter with the ids that its file names. Raises WeightFormatError where the file
        does not fit its config."""
        shape, size = source.part("fc.weight").shape, self.spec.hidden_size
        if shape != (size, self.own_part * size):
            raise WeightFormatError(
                f"fc.weight has shape {list(shape)}, the config names {self.own_part} hidden states"
                f" of {size} numbers: config.json and weights do not belong together"
            )
        if self._num_ids < self.spec.vocab_size:
            self._sources = _sources(source, self._num_ids, self.spec.vocab_size)
        return self

    def borrow(self, target: Model, own: Collection[str]) -> None:
        """Takes embedding and head of the target where the file, with the tensors `own`, has none.
        Raises WeightFormatError for a matrix of another shape."""
        theirs = {spec.name: spec for spec in target.weights()}
        for spec in (one for one in self.weights() if one.name in ("embed", "lm_head")):
            names = [one.name for part in spec.parts for one in choices(part)]
            if not set(names).isdisjoint(own):
                continue
            other = theirs.get(spec.name)
            if other is None or (other.rows, other.cols) != (spec.rows, spec.cols):
                raise WeightFormatError(
                    f"the drafter's file has no {names[0]}, and the model no such matrix with shape"
                    f" {[spec.rows, spec.cols]}: choose the drafter of this model"
                )
            self.borrowed[spec.name] = other.parts

    def weights(self) -> tuple[WeightSpec, ...]:
        size = self.spec.hidden_size
        fc = [PartSpec("fc.weight", size, first_col=i * size) for i in range(self.own_part)]
        head = (PartSpec("lm_head.weight", self._num_ids),)
        specs = [
            *self.decoder.trunk_weights(),
            *(WeightSpec(f"fc.{i}", "linear", (part,), size) for i, part in enumerate(fc)),
            *self.norm_weights(),
            WeightSpec("lm_head", "linear", head, size, "vocab", role="vocabulary"),
        ]
        for prefix, other in _OTHER_PREFIXES:
            specs = [
                replace(one, parts=tuple(renamed_part(p, prefix, other) for p in one.parts))
                for one in specs
            ]
        return tuple(replace(one, parts=self.borrowed.get(one.name, one.parts)) for one in specs)

    def norm_weights(self) -> tuple[WeightSpec, ...]:
        """Norms outside the layers, but for the last one."""
        return ()

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        tables = self.decoder.constants(max_model_len)
        return tables if self._sources is None else {**tables, "sources": self._sources}

    def joined(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs, x: Array) -> Array:
        """(T, E) the projection of the target's hidden states. Rows of tokens without any, which
        read x (T, E), mean nothing."""
        states = [
            ops.linear(self.state(ops, w, ops.place(x, step, index), index), w[f"fc.{index}"])
            for index in range(self.own_part)
        ]
        found = states[0]
        for one in states[1:]:
            found = ops.add(found, one)
        return found

    def state(self, ops: Ops, w: Mapping[str, Weight], x: Array, index: int) -> Array:
        """A hidden state (T, E) as the projection reads it."""
        return x

    def through_layers(
        self, ops: Ops, w: Mapping[str, Weight], step: StepInputs, begin: Array, embedded: Array
    ) -> ResidualStream:
        """The stream (T, E) that `begin` becomes in the layers."""
        stream = ResidualStream(ops, w, self.spec.norm, begin)
        tables = rope_tables(self.spec.layers)
        self.decoder.layers(stream, LayerScope(ops, w, step, 0, 0, 0, tables, embedded, spans=True))
        return stream

    def logits(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs, x: Array) -> Array:
        """(T, E) -> (L, V), -inf for ids that the drafter lacks."""
        found = ops.logits(x, step.logit_rows, w["lm_head"])
        return found if self._sources is None else ops.spread(found, w["sources"])


def _sources(source: WeightSource, count: int, vocab_size: int) -> F32:
    """(V,) the drafter's id for each of the target's, -1: none. `d2t` (D,) holds the differences
    from the former to the latter. Raises WeightFormatError."""
    offsets = source.part("d2t")
    ids = np.zeros(0, np.int64)
    if offsets.shape == (count,):
        ids = np.arange(count) + offsets.dequantize().astype(np.int64)
    if np.unique(ids).size < count or not 0 <= ids.min() <= ids.max() < vocab_size:
        raise WeightFormatError(
            f"d2t, with shape {list(offsets.shape)}, does not lead from {count} ids to as many"
            f" below {vocab_size}: config.json and weights do not belong together"
        )
    sources = np.full(vocab_size, -1, np.float32)
    sources[ids] = np.arange(count)
    return sources
