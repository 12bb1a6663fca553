"""The checkpoint of a drafter together with its target's, without which it cannot be read: its
layers follow from the target's config, and its embedding and head may be the target's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from vllmx_core.errors import WeightFormatError
from vllmx_core.model import OWN_TENSOR
from vllmx_core.plugins.checkpoint import Checkpoint, open_checkpoint
from vllmx_core.weights.map import assemble, choices
from vllmx_core.weights.part import SourceOver, WeightPart, WeightSource, dense_part
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_engine.core.found_model import FoundModel

_PLAIN = {"LlamaForCausalLM", "LlamaModel"}
"""Architectures that the first EAGLE-3 drafters name, though they are another one."""
_MASK = ("mask_embedding", "model.mask_embedding")
_MASKED = "masked_embedding.weight"


def with_target_config(checkpoint: Checkpoint, target: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of `model:PATH` with the target's config as `target_config`."""
    config = {**checkpoint.config, "target_config": target}
    if "draft_vocab_size" in config and set(config.get("architectures") or ()) <= _PLAIN:
        config["architectures"] = ["LlamaForCausalLMEagle3"]
    return replace(checkpoint, config=config)


def with_target_weights(
    found: FoundModel, checkpoint: Checkpoint, borrowed: Iterable[tuple[PartSpec, ...]]
) -> Checkpoint:
    """The checkpoint of a drafter with parts of its target's weights. Raises what opening the
    target does."""
    target = open_checkpoint(found.registry, found.path, found.config.load_format).weights
    names = {one.name for parts in borrowed for part in parts for one in choices(part)}
    return replace(checkpoint, weights=DrafterWeights(checkpoint.weights, target, names))


def with_mask_embedding(checkpoint: Checkpoint, drafter: Any) -> Checkpoint:
    """The checkpoint of a drafter of blocks with the embedding that its file has for mask tokens
    in place of their row of the table. Raises WeightFormatError."""
    source, spec = checkpoint.weights, drafter.shape.drafts
    name = next((one for one in _MASK if one in source.names()), None)
    if name is None or spec is None or not spec.block:
        return checkpoint
    table = next(one for one in drafter.weights() if one.name == "embed")
    shape = source.part(name).shape
    if shape[-1] != table.cols or not spec.mask_token < table.rows:
        raise WeightFormatError(
            f"{name} has shape {list(shape)} and stands for token {spec.mask_token}, the embedding"
            f" has shape {[table.rows, table.cols]}: config.json and weights do not belong together"
        )
    drafter.borrowed["embed"] = (PartSpec(_MASKED, table.rows),)
    return replace(checkpoint, weights=MaskedTable(source, table, name, spec.mask_token))


class MaskedTable(SourceOver):
    """A `WeightSource` with one more tensor: an embedding in which row `token` is the vector
    `name`."""

    def __init__(self, source: WeightSource, table: WeightSpec, name: str, token: int) -> None:
        self._source, self._table = source, table
        self._name, self._token = name, token

    def names(self) -> Collection[str]:
        return {*self._source.names(), _MASKED}

    def part(self, name: str) -> WeightPart:
        if name != _MASKED:
            return self._source.part(name)
        values = np.array(assemble(self._table, self._source)[0])
        values[self._token] = self._source.part(self._name).dequantize().reshape(-1)
        return dense_part(name, values)


class DrafterWeights:
    """A `WeightSource` over a drafter's file and the tensors `borrowed` of its target, closed
    together. Where both have a name, the drafter's tensor has `OWN_TENSOR` before it."""

    def __init__(self, own: WeightSource, target: WeightSource, borrowed: Collection[str]) -> None:
        self._own, self._target = own, target
        self._borrowed = {*borrowed} & {*target.names()}

    def names(self) -> Collection[str]:
        own = self._own.names()
        return {*own, *self._borrowed, *(OWN_TENSOR + name for name in own)}

    def part(self, name: str) -> WeightPart:
        source = self._target if name in self._borrowed else self._own
        return source.part(name.removeprefix(OWN_TENSOR))

    def close(self) -> None:
        self._own.close()
        self._target.close()
