"""Attention over paged KV, one feature after the other and all together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import ConfigError, UnsupportedOpError
from vllmx_core.model import Array, AttentionSpec, Ops, StepInputs, Weight
from vllmx_core.recorded.recording import record

from vllmx_testing.harness import (
    LONG_CONTEXT,
    PAGE,
    VOCAB,
    Harness,
    all_logprobs,
    load_options,
    long_steps,
    mixed_steps,
    whole_rows,
    with_nan,
)
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

FEATURES: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped 2": {"num_kv_heads": 2},
    "grouped 3": {"num_heads": 6, "num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "grouped 16": {"num_heads": 16, "num_kv_heads": 1},
    "head size 64": {"head_size": 64, "num_kv_heads": 2},
    "head size 128": {"head_size": 128, "num_heads": 2, "num_kv_heads": 1},
    "head size 80": {"head_size": 80, "num_heads": 2, "num_kv_heads": 1},
    "head size 20": {"head_size": 20, "num_heads": 3, "num_kv_heads": 3, "rotary_dim": 20},
    "rope": {"rotary_dim": 16},
    "rope partial": {"rotary_dim": 6},
    "rope interleaved": {"rotary_dim": 16, "interleaved": True},
    "rope interleaved partial": {"rotary_dim": 6, "interleaved": True},
    "qk norm": {"norms": True},
    "qk norm eps": {"norms": True, "norm_eps": 0.4},
    "qk norm and rope": {"norms": True, "rotary_dim": 16, "num_kv_heads": 2},
    "rope and qk norm": {
        "norms": True,
        "norm_last": True,
        "norm_eps": 0.1,
        "rotary_dim": 8,
        "num_kv_heads": 2,
    },
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "window of a page": {"window": PAGE, "num_kv_heads": 2},
    "window 23": {"window": 23, "rotary_dim": 16},
    "chunks of 5": {"window": 5, "chunked": True},
    "chunks of 23": {"window": 23, "chunked": True, "num_kv_heads": 2, "rotary_dim": 16},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "scale": {"scale": 1.0},
    "everything": {
        "num_kv_heads": 2,
        "norms": True,
        "rotary_dim": 8,
        "window": 20,
        "softcap": 3.0,
        "sinks": True,
        "scale": 0.4,
    },
}
SPANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, with a window": {"num_kv_heads": 2, "window": 40},
    "soft-cap and norms": {"num_kv_heads": 1, "softcap": 2.0, "norms": True},
}
HIDDEN = 24


def attention_model(seed: int = 0, **features: Any) -> tuple[SyntheticModel, ArraySource]:
    """Layers of nothing but attention, one for each of `windows`, or two that are alike, so that a
    wrong page of the first is seen in the second."""
    values: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "head_size": 16, "scale": 0.25}
    norms, sinks = features.pop("norms", False), features.pop("sinks", False)
    biased = features.pop("biased", False)
    values |= features
    windows: Sequence[int | None] = values.pop("windows", [values.pop("window", None)] * 2)
    shared = values.pop("shared", False)  # by all layers but the first
    kv_heads: Sequence[int] = values.pop("kv_heads", [values.pop("num_kv_heads")] * len(windows))
    specs = [
        AttentionSpec(i, window=window, num_kv_heads=own, shared=shared and i > 0, **values)
        for i, (window, own) in enumerate(zip(windows, kv_heads, strict=True))
    ]
    size, heads = values["head_size"], values["num_heads"]
    builder = Builder(VOCAB, seed)
    builder.embedding("embed", HIDDEN)
    if "rotary_dim" in values:
        builder.rope("rope", values["rotary_dim"])
    for layer, spec in enumerate(specs):
        builder.attention(spec)
        rows = (heads * size,) + (spec.num_kv_heads * size,) * (0 if spec.shared else 2)
        builder.linear(f"{layer}.qkv", rows, HIDDEN)
        builder.linear(f"{layer}.out", HIDDEN, heads * size)
        builder.vector(f"{layer}.q_norm", size)
        builder.vector(f"{layer}.k_norm", size)
        builder.vector(f"{layer}.sinks", heads, centre=0.5)
        if biased:
            builder.vector(f"{layer}.bias", (2 * 512 - 1) * heads, centre=0.0, spread=1.0)
    builder.linear("head", VOCAB, HIDDEN)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        for layer, spec in enumerate(specs):
            attended = ops.attention(
                ops.linear(x, w[f"{layer}.qkv"]),
                spec,
                step,
                rope=w.get("rope"),
                q_norm=w[f"{layer}.q_norm"] if norms else None,
                k_norm=w[f"{layer}.k_norm"] if norms and not spec.shared else None,
                sinks=w[f"{layer}.sinks"] if sinks else None,
                bias=w.get(f"{layer}.bias"),
            )
            x = ops.add(x, ops.linear(attended, w[f"{layer}.out"]))
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(HIDDEN, body), ArraySource(builder.arrays)


class AttentionChecks(Harness):
    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_attention(self, features: dict[str, Any]) -> None:
        self.compare(*attention_model(**features), mixed_steps())

    @pytest.mark.parametrize(
        "features",
        [{}, {"norms": True, "rotary_dim": 16, "num_kv_heads": 2, "sinks": True}, {"window": 5}],
    )
    def test_pages_of_an_earlier_layer(self, features: dict[str, Any]) -> None:
        """The second layer brings queries alone."""
        model, source = attention_model(shared=True, **features)
        self.compare(model, source, mixed_steps())

    def test_attention_both_ways(self) -> None:
        """Rows without a causal mask come whole."""
        model, source = attention_model(causal=False, num_kv_heads=2, rotary_dim=16)
        self.compare(model, source, whole_rows())

    @pytest.mark.parametrize("features", SPANS.values(), ids=SPANS.keys())
    def test_spans(self, features: dict[str, Any]) -> None:
        """Tokens of an image see each other both ways: spans begin and end inside of pages, are
        longer than a tile, follow each other, lie in a later chunk, or are not there at all."""
        model, source = self._model_with_spans(**features)
        random = np.random.default_rng(6)
        texts = [random.integers(0, VOCAB, length).tolist() for length in (330, 20, 1)]
        blocks = [random.permutation(21).tolist(), [21, 22], [23]]
        first = Row(texts[0][:7], 0, blocks[0], "all")
        images = Row(texts[0][7:325], 7, blocks[0], "all", spans=[(9, 25), (30, 310), (310, 311)])
        steps = [
            [first, Row(texts[1], 0, blocks[1], "all", spans=[(0, 20)])],
            [Row(texts[2], 0, blocks[2]), images, Row([5], 20, blocks[1])],
            [Row([3], 1, blocks[2]), Row(texts[0][325:], 325, blocks[0], "all")],
        ]
        limits = {"max_model_len": 512, "max_num_batched_tokens": 512}
        self.compare(model, source, steps, **limits)

    @pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8", "q8,q4"])
    def test_spans_are_exact(self, kv_dtype: str) -> None:
        """No bit depends on where chunks end, or on who else is in the step."""
        if not self.exact_batches or kv_dtype not in self.kv_dtypes:
            pytest.skip("the backend does not promise it")
        model, source = self._model_with_spans(num_kv_heads=2)
        text = np.random.default_rng(7).integers(0, VOCAB, 330).tolist()
        spans, mate = [(9, 25), (30, 310), (310, 311)], Row([3] * 20, 0, [22, 23], spans=[(1, 19)])
        limits = {"max_model_len": 512, "max_num_batched_tokens": 512, "kv_cache_dtype": kv_dtype}
        found = []
        for ends, mates in (([330], []), ([7, 325, 330], [mate]), ([25, 30, 311, 330], [])):
            with self.loaded(model, source, **limits) as loaded:
                parts = []
                for begin, end in pairwise([0, *ends]):
                    row = Row(text[begin:end], begin, range(21), "all", spans=spans)
                    plan = make_plan([*mates, row], loaded.info.block_size)
                    parts.append(all_logprobs(loaded, plan, VOCAB)[len(mates) :])
                found.append(np.concatenate(parts))
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)

    @pytest.mark.parametrize("features", [{}, {"num_kv_heads": 2, "window": 40}])
    def test_bias(self, features: dict[str, Any]) -> None:
        """Scores with a number added by distance, over pages of more than one partition."""
        model, source = self._model_with(biased=True, **features)
        limits = {"max_model_len": 512, "max_num_batched_tokens": 512, "num_kv_blocks": 128}
        for steps in (mixed_steps(), long_steps(480, 300)):
            self.compare(model, source, steps, **limits)

    def _model_with_spans(self, **features: Any) -> tuple[SyntheticModel, ArraySource]:
        return self._model_with(spans=True, rotary_dim=16, **features)

    def _model_with(self, **features: Any) -> tuple[SyntheticModel, ArraySource]:
        """Skips where the backend refuses it by name, as it must unless it has these options."""
        model, source = attention_model(**features)
        backend = self.make_backend()
        if not all(map(backend.supports, record(model, 512).steps.ops)):
            with pytest.raises(UnsupportedOpError, match="needs the op 'attention'"):
                backend.load(model, source, load_options(self.dtype, {}))
            pytest.skip(f"{backend.name} refuses {', '.join(features)} by name")
        return model, source

    @pytest.mark.parametrize("block_size", [8, 32, 128])
    def test_block_sizes(self, block_size: int) -> None:
        model, source = attention_model(num_kv_heads=2, rotary_dim=16)
        steps = mixed_steps(page=block_size)
        limits = {"max_model_len": 512, "max_num_batched_tokens": 512, "num_kv_blocks": 80}
        if block_size in self.block_sizes:
            self.compare(model, source, steps, block_size=block_size, **limits)
            return
        with (
            pytest.raises(ConfigError, match=f"block_size {block_size}"),
            self.loaded(model, source, block_size=block_size, **limits),
        ):
            pass

    @pytest.mark.parametrize("features", [{}, {"window": 100}, {"sinks": True}])
    def test_long_context(self, features: dict[str, Any]) -> None:
        """Chunks and decodes at a context of more than a thousand tokens."""
        model, source = attention_model(num_kv_heads=2, rotary_dim=16, **features)
        self.compare(model, source, long_steps(1101, 600), **LONG_CONTEXT)

    def test_blocks_are_shared_and_handed_on(self) -> None:
        """Two rows read one prefix; later another row owns its blocks."""
        model, source = attention_model(num_kv_heads=2, rotary_dim=16)
        prefix = np.random.default_rng(4).integers(0, VOCAB, 2 * PAGE).tolist()
        steps = [
            [Row([*prefix, 1, 2], 0, [4, 8, 1], "all")],
            [Row([3, 5, 7], 2 * PAGE, [4, 8, 2], "all"), Row([6], 2 * PAGE + 2, [4, 8, 1])],
            [Row([8], 2 * PAGE + 3, [4, 8, 2]), Row([9], 2 * PAGE + 3, [4, 8, 1])],
            [Row([2, 2, 2], 0, [8], "all"), Row([5] * 20, 0, [1, 4], "all")],
        ]
        self.compare(model, source, steps)

    def test_what_a_page_held_before_does_not_leak(self) -> None:
        """A row with NaN breaks alone; who gets its blocks next sees nothing of it."""
        model, source = attention_model(num_kv_heads=2, rotary_dim=16)
        source = with_nan(source)
        random = np.random.default_rng(5)
        text = [token for token in random.integers(0, VOCAB, 40).tolist() if token != 13]
        fresh = [[Row(text[:19], 0, [3, 5], "all")], [Row(text[19:20], 19, [3, 5])]]
        with self.loaded(model, source) as loaded:
            self.step_ids(loaded, [Row([13] * 40, 0, [5, 3, 7]), Row(text[:4], 0, [9])])
            used = [self.step_ids(loaded, rows) for rows in fresh]
        with self.loaded(model, source) as loaded:
            assert [self.step_ids(loaded, rows) for rows in fresh] == used
        assert min(min(ids) for ids in used) >= 0
