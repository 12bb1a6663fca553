"""Latent attention over pages of latents: its options, long contexts, chunks, caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import ConfigError, UnsupportedOpError
from vllmx_core.kv_dtypes import LIMITS
from vllmx_core.model import Array, LatentSpec, Ops, StepInputs, Weight

from vllmx_testing.harness import PAGE, VOCAB, Harness, all_logprobs, mixed_steps
from vllmx_testing.plans import Row, make_plan
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
        last = self.latent_context - 1
        text = np.random.default_rng(2).integers(0, VOCAB, last + 1).tolist()
        blocks = np.random.default_rng(3).permutation(72).tolist()
        short = [Row([4], position, [100], "last") for position in range(4)]
        middle = last // 2
        steps = [
            [Row(text[:middle], 0, blocks, "last"), short[0]],
            [Row(text[middle : last - 1], middle, blocks, "all"), short[1]],
            [short[2], Row(text[last - 1 : last], last - 1, blocks)],
            [short[3], Row(text[last:], last, blocks)],
        ]
        self.compare(
            model, source, steps, max_model_len=1200, num_kv_blocks=128, max_num_batched_tokens=1024
        )

    @pytest.mark.parametrize("kv", ["bf16", "f16", "f32"])
    def test_latents_in_other_caches(self, kv: str) -> None:
        """bf16 and f16 may round queries and probabilities too."""
        if kv in self.kv_dtypes and not self._lacks_latents():
            limit = self.tolerance if kv == "f32" else 0.05
            self.compare(*latent_model(), mixed_steps(), tolerance=limit, kv_cache_dtype=kv)

    @pytest.mark.parametrize("kv", LIMITS)
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
        text = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()
        mate = Row([3, 1, 4, 1, 5], 0, [29], "all")
        blocks = list(range(30, 60))
        limits = {"max_model_len": 512, "max_num_batched_tokens": 512}
        with self.loaded(model, source, **limits) as loaded:

            def run(*rows: Row) -> Any:
                return all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)

            whole = run(Row(text, 0, list(range(29)), "all"))
            parts = [run(Row(text[:7], 0, blocks, "all"))]
            parts.append(run(mate, Row(text[7:380], 7, blocks, "all"))[5:])
            parts += [run(Row(text[i : i + 1], i, blocks), mate)[:1] for i in range(380, 400)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)

    def test_latents_that_a_page_held_before_do_not_leak(self) -> None:
        """A row with NaN breaks alone; who gets its blocks next sees nothing of it."""
        if self._lacks_latents():
            return
        model, source = latent_model()
        arrays = {name: np.array(source.part(name).dequantize()) for name in source.names()}
        arrays["embed.weight"][13] = np.nan
        text = np.random.default_rng(5).integers(0, 13, 20).tolist()
        fresh = [[Row(text[:19], 0, [3, 5], "all")], [Row(text[19:], 19, [3, 5])]]
        found = []
        for broken in (True, False):
            with self.loaded(model, ArraySource(arrays)) as loaded:
                if broken:
                    ids = self.step_ids(loaded, [Row([13] * 40, 0, [5, 3, 7]), Row([1, 2], 0, [9])])
                    assert ids[0] < 0 <= ids[1]
                found.append([self.step_ids(loaded, rows) for rows in fresh])
        assert found[0] == found[1]

    def _lacks_latents(self) -> bool:
        """True for a backend without the op; then it must say so by name."""
        if "latent_attention" not in self.missing_ops:
            return False
        with (
            pytest.raises(UnsupportedOpError, match="needs the op 'latent_attention'"),
            self.loaded(*latent_model()),
        ):
            pass
        return True
