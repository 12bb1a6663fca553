"""A decoder that answers with vectors or scores of texts: its layers, and another end.

Embedders (Qwen3-Embedding, E5-Mistral), rerankers whose score is what they think of "no" and "yes"
(Qwen3-Reranker), and `...ForSequenceClassification` over any decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import Array, ModelShape, Ops, Output, StepInputs, Weight
from vllmx_core.plan import AnyArray
from vllmx_core.weights.part import PartSpec, RowRuns, WeightSpec

from vllmx_models.configs.checked import ConfigReader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec
from vllmx_models.trunks.tails import End, num_labels, read_modules


class PooledDecoder:
    """A `vllmx_core.model.Model`."""

    def __init__(self, spec: DecoderSpec, end: End) -> None:
        self.spec, self._decoder, self._end = spec, Decoder(spec), end

    @property
    def shape(self) -> ModelShape:
        shape, end = self._decoder.shape, self._end
        return replace(
            shape,
            output=end.output,
            output_size=end.size(shape.hidden_size),
            whole_prompts=end.pooling != "last" or not (shape.caches or shape.states),
        )

    def weights(self) -> tuple[WeightSpec, ...]:
        return (*self._decoder.trunk_weights(), *self._end.weights(self.shape.hidden_size))

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return self._decoder.constants(max_model_len)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        return self._end.record(ops, w, self._decoder.hidden(ops, w, step), step)


def pooled_decoder(spec: DecoderSpec, output: Output, config: Mapping[str, Any]) -> PooledDecoder:
    """Makes a decoder that pools as `vllmx_core.text_modules` and the config say; the last token's
    vector by default. Raises UnsupportedModelError."""
    if spec.names.also is None:  # saved without the head, its layers have no prefix
        spec = replace(spec, names=replace(spec.names, also=("model.", "")))
    pooling, dense = read_modules(config, spec.hidden_size)
    if output == "vectors":
        return PooledDecoder(spec, End("vectors", pooling or "last", dense))
    tokens = config.get("score_tokens")
    if tokens is None:
        head = _labels(spec, config)
    elif "score_rows" in config:
        head = _rows(spec, PartSpec("score.weight", 1), config["score_rows"])
    else:
        head = _token_rows(spec, tokens)
    return PooledDecoder(spec, End("scores", "last", ((head, "identity"),)))


def _labels(spec: DecoderSpec, config: Mapping[str, Any]) -> WeightSpec:
    """The matrix of `...ForSequenceClassification`, a row a label."""
    count = num_labels(ConfigReader(config, "ForSequenceClassification"))
    return WeightSpec("score", "linear", (PartSpec("score.weight", count),), spec.hidden_size)


def _rows(spec: DecoderSpec, head: PartSpec, rows: Sequence[int]) -> WeightSpec:
    """Some rows of a head, in this order."""
    parts = tuple(replace(head, rows=1, runs=RowRuns(row, 1, 1)) for row in rows)
    return WeightSpec("score", "linear", parts, spec.hidden_size)


def _token_rows(spec: DecoderSpec, tokens: Sequence[object]) -> WeightSpec:
    """The rows of the head that belong to these tokens."""
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
