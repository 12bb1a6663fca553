"""Sparse attention: which tokens an indexer picks, and latent attention to them alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from vllmx_core.model import Array, IndexerSpec, LatentSpec, Ops, StepInputs, Weight

from vllmx_testing.harness import LONG_CONTEXT, VOCAB, Harness, long_steps, mixed_steps
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

HIDDEN = 24
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pairs": {"interleaved": True},
    "one token": {"picked": 1},
    "one head": {"num_heads": 1, "head_size": 8},
    "odd sizes": {"num_heads": 37, "head_size": 22},
    "as released": {"num_heads": 64, "head_size": 128},
    "all tokens": {"picked": 100},
}


def sparse_model(seed: int = 0, **features: Any) -> tuple[SyntheticModel, ArraySource]:
    """Three layers of sparse latent attention; the second one uses the picks of the first."""
    values: dict[str, Any] = {"num_heads": 9, "head_size": 16, "rotary_dim": 8, "picked": 7}
    values |= features
    builder = Builder(VOCAB, seed)
    latents = [LatentSpec(layer, 4, 32, 12, 8, 10, 0.3) for layer in range(3)]
    indexers = {layer: IndexerSpec(layer, **values) for layer in (0, 2)}
    builder.embedding("embed", HIDDEN)
    builder.rope("rope", 8)
    for layer, latent in enumerate(latents):
        index = indexers.get(layer)
        builder.latent_attention(latent, 0 if index is None else index.head_size)
        builder.linear(f"{layer}.q", 4 * 20, HIDDEN)
        builder.linear(f"{layer}.latent", latent.row_size, HIDDEN)
        builder.linear(f"{layer}.out", HIDDEN, 4 * latent.value_size)
        if index is not None:
            builder.linear(f"{layer}.index_q", index.num_heads * index.head_size, HIDDEN)
            builder.linear(f"{layer}.index_k", index.head_size, HIDDEN)
            builder.linear(f"{layer}.index_weights", index.num_heads, HIDDEN)
    builder.linear("head", VOCAB, HIDDEN)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        picked: Array | None = None
        for layer, latent in enumerate(latents):
            if layer in indexers:
                q, key, weights = (
                    ops.linear(x, w[f"{layer}.index_{name}"]) for name in ("q", "k", "weights")
                )
                picked = ops.indexer(q, key, weights, indexers[layer], step, rope=w["rope"])
            attended = ops.latent_attention(
                ops.linear(x, w[f"{layer}.q"]),
                ops.linear(x, w[f"{layer}.latent"]),
                latent,
                step,
                rope=w["rope"],
                norm=w[f"{layer}.norm"],
                k_b=w[f"{layer}.k_b"],
                v_b=w[f"{layer}.v_b"],
                picked=picked,
            )
            x = ops.add(x, ops.linear(attended, w[f"{layer}.out"]))
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(HIDDEN, body), ArraySource(builder.arrays)


def tied(builder_arrays: dict[str, Any]) -> dict[str, Any]:
    """Every score is 0, so that a tie decides each choice."""
    names = [name for name in builder_arrays if ".index_weights" in name]
    return builder_arrays | {name: builder_arrays[name] * 0 for name in names}


class SparseChecks(Harness):
    sparse_context = 1101
    """Tokens of a long context."""

    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_sparse_attention(self, features: dict[str, Any]) -> None:
        if not self._lacks_indexers():
            self.compare(*sparse_model(**features), mixed_steps())

    def test_ties_go_to_the_earlier_position(self) -> None:
        if self._lacks_indexers():
            return
        model, source = sparse_model()
        arrays = {name: np.array(source.part(name).dequantize()) for name in source.names()}
        self.compare(model, ArraySource(tied(arrays)), mixed_steps())

    def test_picks_of_a_long_context(self) -> None:
        """A chunk that picks all, one that picks some, and decodes."""
        if self._lacks_indexers():
            return
        model, source = sparse_model(picked=300, num_heads=33)
        steps = long_steps(self.sparse_context, 290, "last")
        self.compare(model, source, steps, **LONG_CONTEXT)

    @pytest.mark.parametrize("kv", ["bf16", "f16"])
    def test_all_picked_is_full_attention(self, kv: str) -> None:
        """Caches whose rounding would decide a choice hold all that is picked."""
        if kv in self.kv_dtypes and not self._lacks_indexers():
            steps = mixed_steps()
            self.compare(*sparse_model(picked=64), steps, tolerance=0.05, kv_cache_dtype=kv)

    def test_bits_of_picks_do_not_depend_on_chunks(self) -> None:
        """Nor on mates."""
        if not self.exact_batches:
            pytest.skip("this backend does not promise batch invariance")
        if self._lacks_indexers():
            return
        model, source = sparse_model(picked=270)
        self.check_chunks(model, source, end=390)

    def _lacks_indexers(self) -> bool:
        return self.lacks("indexer", sparse_model)
