"""KV caches of every dtype round as their rule says, with every feature of attention.

A float32 backend differs from the float64 reference in the last bits, so a value near a tie may
round to the next code, and a single log-probability may differ by such a step. The checks therefore
compare two root mean square errors: the backend's against the reference with the same cache, and
that reference's against one without rounding. `kv_share` bounds their ratio, which is about 1e-5 in
float32 and up to 0.7 where codes are multiplied in bf16. A backend that rounds differently, does
not round, or uses another vector's scale has a ratio of 1 or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import ConfigError
from vllmx_core.kv_dtypes import CODED, KV_DTYPES, TURNED_MULTIPLE
from vllmx_core.model import Model
from vllmx_core.weights.part import WeightSource

from vllmx_testing.attention_checks import FEATURES, attention_model
from vllmx_testing.harness import (
    PAGE,
    VOCAB,
    Harness,
    all_logprobs,
    log_softmax,
    mixed_steps,
    reference_logits,
    whole_rows,
)
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.step_checks import decoder


class KVDtypeChecks(Harness):
    @pytest.mark.parametrize("kv", CODED)
    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_attention_over_codes(self, kv: str, features: dict[str, Any]) -> None:
        model, source = attention_model(**features)
        size = features.get("head_size", TURNED_MULTIPLE)
        if "q4" in kv and size % TURNED_MULTIPLE and kv in self.kv_dtypes:
            with (
                pytest.raises(ConfigError, match=f"{kv} is for heads.* have {size}: choose int8"),
                self.loaded(model, source, kv_cache_dtype=kv),
            ):
                pass
            return
        self._compare_codes(model, source, mixed_steps(), kv)

    @pytest.mark.parametrize("kv", CODED)
    def test_attention_over_codes_both_ways(self, kv: str) -> None:
        model, source = attention_model(causal=False, num_kv_heads=2, rotary_dim=16)
        self._compare_codes(model, source, whole_rows(), kv)

    @pytest.mark.parametrize("kv", CODED)
    def test_codes_of_a_long_context(self, kv: str) -> None:
        model, source = attention_model(num_kv_heads=2, rotary_dim=16, sinks=True)
        text = np.random.default_rng(2).integers(0, VOCAB, 701).tolist()
        blocks = np.random.default_rng(3).permutation(64).tolist()
        steps = [
            [Row(text[:600], 0, blocks, "last")],
            [Row(text[600:699], 600, blocks, "all")],
            [Row(text[699:700], 699, blocks)],
            [Row(text[700:], 700, blocks)],
        ]
        limits = {"max_model_len": 800, "num_kv_blocks": 64, "max_num_batched_tokens": 1024}
        self._compare_codes(model, source, steps, kv, **limits)

    @pytest.mark.parametrize("kv", ["bf16", "f16", "f32"])
    def test_wider_caches(self, kv: str) -> None:
        """bf16 and f16 may round queries and probabilities too."""
        limit = self.tolerance if kv == "f32" else 0.05
        if not self._refused_kv(kv):
            model, source = attention_model(num_kv_heads=2, rotary_dim=16)
            self.compare(model, source, mixed_steps(), tolerance=limit, kv_cache_dtype=kv)

    @pytest.mark.parametrize("kv", KV_DTYPES)
    def test_bits_do_not_depend_on_chunks_with_any_cache(self, kv: str) -> None:
        if not self.exact_batches:
            pytest.skip("this backend does not promise batch invariance")
        if self._refused_kv(kv):
            return
        model, source = attention_model(num_kv_heads=2, rotary_dim=16)
        text = np.random.default_rng(0).integers(0, VOCAB, 37).tolist()
        mate = Row([3, 1, 4, 1, 5], 0, [9], "all")
        with self.loaded(model, source, kv_cache_dtype=kv) as loaded:

            def run(*rows: Row) -> Any:
                return all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)

            whole = run(Row(text, 0, [0, 1, 2], "all"))
            parts = [run(Row(text[:7], 0, [5, 3, 4], "all"))]
            parts.append(run(mate, Row(text[7:20], 7, [5, 3, 4], "all"))[5:])
            parts += [run(Row(text[i : i + 1], i, [5, 3, 4]), mate)[:1] for i in range(20, 37)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)

    @pytest.mark.parametrize("kv", CODED)
    def test_codes_of_a_page_do_not_leak(self, kv: str) -> None:
        if not self._refused_kv(kv):
            model, source = attention_model(num_kv_heads=2, rotary_dim=16)
            self.check_leaks(model, source, kv_cache_dtype=kv)

    def test_an_unknown_kv_dtype_is_refused_with_the_choices(self) -> None:
        model, source = decoder()
        choices = "choose auto, " + ".*".join(self.kv_dtypes)
        with (
            pytest.raises(ConfigError, match=f"'int3'.*{choices}"),
            self.loaded(model, source, kv_cache_dtype="int3"),
        ):
            pass

    def _refused_kv(self, kv: str) -> bool:
        """True for a dtype that the backend does not have; then it must say so by name."""
        if kv in self.kv_dtypes:
            return False
        model, source = decoder()
        with (
            pytest.raises(ConfigError, match=f"no KV cache of {kv}: choose auto"),
            self.loaded(model, source, kv_cache_dtype=kv),
        ):
            pass
        return True

    def _compare_codes(
        self,
        model: Model,
        source: WeightSource,
        steps: Sequence[Sequence[Row]],
        kv: str,
        **options: Any,
    ) -> None:
        if self._refused_kv(kv):
            return
        options |= {"kv_cache_dtype": kv}
        off, rounding = [], []
        with self.loaded(model, source, **options) as loaded:
            assert loaded.info.kv_cache_dtype == kv
            size = loaded.info.block_size
            same = reference_logits(model, source, steps, size, options)
            exact = reference_logits(
                model, source, steps, size, options | {"kv_cache_dtype": "auto"}
            )
            for rows, logits, unrounded in zip(steps, same, exact, strict=True):
                plan = make_plan(rows, size)
                expected = log_softmax(logits)
                off.append(all_logprobs(loaded, plan, model.shape.vocab_size) - expected)
                rounding.append(log_softmax(unrounded) - expected)
        errors, yardstick = np.concatenate(off), np.concatenate(rounding)
        share = np.sqrt(np.square(errors).mean() / np.square(yardstick).mean())
        assert share < self.kv_share, f"{share:.3f} of what the cache's rounding costs"
