"""Latent attention over pages of latents: its options, long contexts, chunks, caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from vllmx_core.errors import ConfigError
from vllmx_core.kv_dtypes import CODED
from vllmx_core.model import Array, LatentSpec, Ops, StepInputs, Weight

from vllmx_testing.harness import LONG_CONTEXT, VOCAB, Harness, long_steps, mixed_steps
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "halves": {"interleaved": False},
    "one head": {"num_heads": 1},
    "odd sizes": {"num_heads": 3, "rank": 20, "nope_size": 6, "rotary_dim": 2, "value_size": 9},
    "many heads": {"num_heads": 40, "rank": 64, "nope_size": 16, "value_size": 16},
    "wide": {"num_heads": 5, "rank": 128, "nope_size": 48, "rotary_dim": 32, "value_size": 64},
    "as released": {
        "num_heads": 2,
        "rank": 512,
        "nope_size": 128,
        "rotary_dim": 64,
        "value_size": 128,
    },
    "norm eps": {"norm_eps": 0.4},
    "scale": {"scale": 1.0},
}
HIDDEN = 24


def latent_model(seed: int = 0, **features: Any) -> tuple[SyntheticModel, ArraySource]:
    """Two layers of nothing but latent attention, so that a wrong row of the first is seen in the
    second."""
    values: dict[str, Any] = {
        "num_heads": 4,
        "rank": 32,
        "nope_size": 12,
        "rotary_dim": 8,
        "value_size": 10,
        "scale": 0.3,
    }
    specs = [LatentSpec(layer, **(values | features)) for layer in range(2)]
    first, builder = specs[0], Builder(VOCAB, seed)
    heads, head = first.num_heads, first.nope_size + first.rotary_dim
    builder.embedding("embed", HIDDEN)
    builder.rope("rope", first.rotary_dim)
    for layer, spec in enumerate(specs):
        builder.latent_attention(spec)
        builder.linear(f"{layer}.q", heads * head, HIDDEN)
        builder.linear(f"{layer}.latent", spec.row_size, HIDDEN)
        builder.linear(f"{layer}.out", HIDDEN, heads * spec.value_size)
    builder.linear("head", VOCAB, HIDDEN)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        for layer, spec in enumerate(specs):
            q, latent = ops.linear(x, w[f"{layer}.q"]), ops.linear(x, w[f"{layer}.latent"])
            attended = ops.latent_attention(
                q,
                latent,
                spec,
                step,
                rope=w["rope"],
                norm=w[f"{layer}.norm"],
                k_b=w[f"{layer}.k_b"],
                v_b=w[f"{layer}.v_b"],
            )
            x = ops.add(x, ops.linear(attended, w[f"{layer}.out"]))
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(HIDDEN, body), ArraySource(builder.arrays)


class LatentChecks(Harness):
    latent_context = 1101
    """Tokens of a long context."""

    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_latent_attention(self, features: dict[str, Any]) -> None:
        if not self._lacks_latents():
            self.compare(*latent_model(**features), mixed_steps())

    def test_latents_of_a_long_context(self) -> None:
        """Chunks, and decodes at their end."""
        if self._lacks_latents():
            return
        model, source = latent_model(rank=48)
        steps = long_steps(self.latent_context, (self.latent_context - 1) // 2)
        self.compare(model, source, steps, **LONG_CONTEXT)

    @pytest.mark.parametrize("kv", ["bf16", "f16", "f32"])
    def test_latents_in_other_caches(self, kv: str) -> None:
        """bf16 and f16 may round queries and probabilities too."""
        if kv in self.kv_dtypes and not self._lacks_latents():
            limit = self.tolerance if kv == "f32" else 0.05
            self.compare(*latent_model(), mixed_steps(), tolerance=limit, kv_cache_dtype=kv)

    @pytest.mark.parametrize("kv", CODED)
    def test_latents_are_no_codes(self, kv: str) -> None:
        if kv not in self.kv_dtypes or self._lacks_latents():
            return
        model, source = latent_model()
        with (
            pytest.raises(ConfigError, match=f"{kv}.*latent attention.*choose auto"),
            self.loaded(model, source, kv_cache_dtype=kv),
        ):
            pass

    def test_bits_of_latents_do_not_depend_on_chunks(self) -> None:
        """Nor on mates, at a context that backends part among their threads."""
        if not self.exact_batches:
            pytest.skip("this backend does not promise batch invariance")
        if self._lacks_latents():
            return
        model, source = latent_model(num_heads=9, rank=80)
        self.check_chunks(model, source, end=380)

    def test_latents_that_a_page_held_before_do_not_leak(self) -> None:
        if not self._lacks_latents():
            self.check_leaks(*latent_model())

    def _lacks_latents(self) -> bool:
        return self.lacks("latent_attention", latent_model)
