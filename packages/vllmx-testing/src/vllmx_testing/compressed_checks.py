"""Compressed attention: entries of windows, an indexer's picks among them, and windows of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from vllmx_core.model import (
    Array,
    CompressedAttentionSpec,
    CompressSpec,
    IndexerSpec,
    LatentKV,
    Ops,
    StepInputs,
    Weight,
)

from vllmx_testing.harness import PAGE, VOCAB, Harness, all_logprobs, mixed_steps
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.state_checks import with_slots
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

HIDDEN, ROTARY = 24, 8
FEATURES: dict[str, dict[str, Any]] = {
    "sparse": {},
    "one entry": {"picked": 1},
    "odd sizes": {"heads": 11, "size": 26, "window": 6},
    "as released": {"heads": 9, "size": 512, "index_size": 128},
    "no indexer": {"picked": 0},
    "heavy": {"ratio": 10, "overlap": False, "picked": 0},
    "longer than a page": {"ratio": 37, "overlap": False, "picked": 0},
    "the window alone": {"ratio": 0},
}


def compressed_model(
    seed: int = 0,
    *,
    heads: int = 5,
    size: int = 24,
    window: int = 9,
    ratio: int = 4,
    overlap: bool = True,
    picked: int = 3,
    index_size: int = 16,
) -> tuple[SyntheticModel, ArraySource]:
    """Two layers; the second reads what the first found."""
    builder = Builder(VOCAB, seed)
    builder.embedding("embed", HIDDEN)
    builder.rope("rope", ROTARY)
    sizes = {"": size, "index_": index_size} if picked else {"": size}
    specs: list[tuple[CompressedAttentionSpec, dict[str, CompressSpec]]] = []
    for layer in range(2):
        own = (layer, ratio) if ratio else (None, 0)
        state = builder.state(1, window - 1, size)
        attention = CompressedAttentionSpec(
            state, heads, size, ROTARY, window, size**-0.5, 1e-6, *own
        )
        compressors = {}
        for name, width in sizes.items() if ratio else ():
            series = 2 if overlap else 1
            compressors[name] = CompressSpec(
                layer=layer,
                state=builder.state(series, 3, width),
                size=width,
                ratio=ratio,
                rotary_dim=ROTARY,
                overlap=overlap,
                part="keys" if name else "entries",
                norm_eps=1e-6,
            )
            builder.linear(f"{layer}.{name}kv_gate", 2 * series * width, HIDDEN)
            builder.vector(f"{layer}.{name}gate_bias", ratio * series * width, centre=0.0)
            builder.vector(f"{layer}.{name}norm", width)
        if ratio:
            keys = index_size if picked else 0
            builder.caches.append(LatentKV(size - ROTARY, ROTARY, keys, ratio))
        builder.linear(f"{layer}.q", heads * size, HIDDEN).linear(f"{layer}.row", size, HIDDEN)
        builder.linear(f"{layer}.index_q", 33 * index_size, HIDDEN)
        builder.linear(f"{layer}.index_weights", 33, HIDDEN)
        builder.vector(f"{layer}.sinks", heads, centre=0.0)
        builder.linear(f"{layer}.out", HIDDEN, heads * size)
        specs.append((attention, compressors))
    builder.linear("head", VOCAB, HIDDEN)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x, rope = ops.embedding(step.tokens, w["embed"]), w["rope"]
        for layer, (attention, compressors) in enumerate(specs):
            for name, spec in compressors.items():
                at = f"{layer}.{name}"
                ops.compress(
                    ops.linear(x, w[f"{at}kv_gate"]),
                    spec,
                    step,
                    rope=rope,
                    bias=w[f"{at}gate_bias"],
                    norm=w[f"{at}norm"],
                )
            picks = None
            if "index_" in compressors:
                index = IndexerSpec(layer, 33, index_size, ROTARY, picked, True, ratio)
                q = ops.linear(x, w[f"{layer}.index_q"])
                weights = ops.linear(x, w[f"{layer}.index_weights"])
                picks = ops.indexer(q, None, weights, index, step, rope=rope)
            found = ops.compressed_attention(
                ops.linear(x, w[f"{layer}.q"]),
                ops.linear(x, w[f"{layer}.row"]),
                attention,
                step,
                rope=rope,
                sinks=w[f"{layer}.sinks"],
                picked=picks,
            )
            x = ops.add(x, ops.linear(found, w[f"{layer}.out"]))
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(HIDDEN, body), ArraySource(builder.arrays)


class CompressedChecks(Harness):
    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_compressed_attention(self, features: dict[str, Any]) -> None:
        if not self._lacks_entries():
            self.compare(*compressed_model(**features), with_slots(mixed_steps()))

    @pytest.mark.parametrize("kv", ["bf16", "f16"])
    def test_entries_in_sixteen_bits(self, kv: str) -> None:
        """All that there are, so that rounding decides no choice."""
        if kv in self.kv_dtypes and not self._lacks_entries():
            steps = with_slots(mixed_steps())
            self.compare(*compressed_model(picked=64), steps, tolerance=0.05, kv_cache_dtype=kv)

    @pytest.mark.parametrize("features", [{}, FEATURES["longer than a page"]], ids=["4", "37"])
    def test_chunks_and_mates_change_no_entries(self, features: dict[str, Any]) -> None:
        """Nor do states that are kept after tokens."""
        if self._lacks_entries():
            return
        text = np.random.default_rng(0).integers(0, VOCAB, 90).tolist()
        mate = Row([3, 1, 4, 1, 5], 0, [29], "none", 9)
        blocks = [1, 2, 3, 4, 5, 6]
        with self.loaded(
            *compressed_model(**features), num_state_slots=24, max_num_seqs=4
        ) as loaded:

            def run(*rows: Row) -> Any:
                return all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)

            whole = run(Row(text, 0, blocks, "all", 0))
            parts = [run(Row(text[:3], 0, blocks, "all", 0))]
            parts.append(run(Row(text[3:50], 3, blocks, "all", 0), mate))
            parts += [run(mate, Row(text[at : at + 1], at, blocks, "all", 0)) for at in (50, 51)]
            slots = [-1, *range(10, 23), -1]
            parts.append(run(Row(text[52:67], 52, blocks, "all", (0, 1), slots)))
            for index in (1, 6, 13):  # what follows a token whose states were kept
                at = 53 + index
                again = run(Row(text[at:67], at, blocks, "all", (slots[index], 2)))
                self._check_near(again, whole[at:67])
            parts.append(run(Row(text[67:], 67, blocks, "all", 1)))
            self._check_near(np.concatenate(parts), whole)

    def _check_near(self, found: Any, expected: Any) -> None:
        if self.exact_batches:
            np.testing.assert_array_equal(found, expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=0, atol=self.tolerance)

    def _lacks_entries(self) -> bool:
        return self.lacks("compress", compressed_model)
