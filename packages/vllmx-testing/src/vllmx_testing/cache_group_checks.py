"""Models whose layers keep different pages: several block tables over one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from vllmx_core.cache.groups import cache_layout
from vllmx_core.model import Model
from vllmx_core.weights.part import WeightSource

from vllmx_testing.attention_checks import attention_model
from vllmx_testing.harness import PAGE, VOCAB, Harness, all_logprobs
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource

WINDOWS: dict[str, tuple[int | None, ...]] = {
    "two groups": (5, None, 5, None),
    "an empty place": (20, None, 20, 20, None),
    "three windows": (33, None, 3),
    "a window alone": (19, 19),
}
_NAN = VOCAB - 1
"""A token whose embedding is NaN."""


def grouped_model(
    windows: Sequence[int | None], **features: Any
) -> tuple[Model, ArraySource, tuple[int | None, ...]]:
    """A model with a layer for each window, its weights, and the windows of its cache groups."""
    sizes = features or {"num_kv_heads": 2}
    model, source = attention_model(windows=windows, rotary_dim=16, **sizes)
    table = np.array(source.part("embed.weight").dequantize())
    table[_NAN] = np.nan
    arrays = {name: source.part(name).dequantize() for name in source.names()}
    source = ArraySource(arrays | {"embed.weight": table})
    return model, source, cache_layout(model.shape, grouped=True).windows


class _Blocks:
    """Hands out blocks, those first that were given back last."""

    def __init__(self, windows: Sequence[int | None], count: int) -> None:
        self.windows = windows
        self.free = np.random.default_rng(3).permutation(count).tolist()
        self.gone = [self.free.pop() for _ in windows]
        """A block full of NaN for each group, which stands for all that fell out of a window."""

    def poison(self) -> list[Row]:
        """A step that fills the blocks that nothing may read, and has one logit row besides."""
        other = [[block] for block in self.free[: len(self.gone)]]
        poison = Row([_NAN] * PAGE, 0, [[block] for block in self.gone], "none")
        return [poison, Row([1], 0, other)]

    def extend(self, tables: list[list[int]], start: int, end: int) -> None:
        """Makes room for tokens start ... end - 1 of a sequence; takes what they no longer see."""
        for window, table, gone in zip(self.windows, tables, self.gone, strict=True):
            first = 0 if window is None else max(0, start - window + 1) // PAGE
            self.free += [block for block in table[:first] if block != gone]
            table[:first] = [gone] * first
            while len(table) * PAGE < end:
                table.append(self.free.pop())

    def release(self, tables: list[list[int]]) -> None:
        for table, gone in zip(tables, self.gone, strict=True):
            self.free += [block for block in table if block != gone]


def grouped_steps(
    texts: Sequence[Sequence[int]], windows: Sequence[int | None], chunk: int, count: int = 40
) -> list[list[Row]]:
    """Sequences that begin one step after the other and go on by chunks, each of which takes the
    blocks that others have left; the first is fed token by token."""
    blocks = _Blocks(windows, count)
    steps = [blocks.poison()]
    done = [0] * len(texts)
    tables: list[list[list[int]]] = [[[] for _ in windows] for _ in texts]
    while any(end < len(text) for end, text in zip(done, texts, strict=True)):
        rows = []
        for index, text in enumerate(texts[: len(steps)]):
            start, end = done[index], min(done[index] + (chunk if index else 1), len(text))
            if start == len(text):
                continue
            blocks.extend(tables[index], start, end)
            rows.append(Row(text[start:end], start, [list(t) for t in tables[index]], "all"))
            done[index] = end
        for text, end, table in zip(texts, done, tables, strict=True):
            if end == len(text):
                blocks.release(table)
                table[:] = [[] for _ in windows]
        steps.append(rows)
    return steps


def _texts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(6)
    return [random.integers(0, _NAN, length).tolist() for length in lengths]


class CacheGroupChecks(Harness):
    @pytest.mark.parametrize("chunk", [1, 7, 64])
    @pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS.keys())
    def test_cache_groups(self, windows: Sequence[int | None], chunk: int) -> None:
        """Pages outside of a window are NaN here and belong to others already."""
        model, source, groups = grouped_model(windows)
        steps = grouped_steps(_texts(9, 58, 37), groups, chunk)
        self.compare(model, source, steps, group_caches=True)

    def test_cache_groups_of_unequal_pages(self) -> None:
        """Layers with a window have more heads than those without, as in Gemma 4."""
        model, source, groups = grouped_model((5, None, 5), kv_heads=(4, 2, 4))
        assert groups == (5, 5, None)
        steps = grouped_steps(_texts(9, 58, 37), groups, 7)
        long = {"max_model_len": 1024, "max_num_batched_tokens": 64, "num_kv_blocks": 100}
        with self.loaded(model, source, group_caches=True, **long) as loaded:
            assert loaded.info.cache_windows == groups
        self.compare(model, source, steps, group_caches=True, **long)

    def test_cache_groups_are_reported(self) -> None:
        model, source, groups = grouped_model(WINDOWS["an empty place"])
        assert groups == (20, 20, None)
        with self.loaded(model, source) as whole:
            assert whole.info.cache_windows == (None,)
        with self.loaded(model, source, group_caches=True) as grouped:
            assert grouped.info.cache_windows == groups
            assert whole.info.num_kv_blocks == grouped.info.num_kv_blocks
            assert whole.info.kv_cache_bytes == 5 / 2 * grouped.info.kv_cache_bytes

    @pytest.mark.parametrize("dtype", ["int8", "fp8"])
    def test_cache_groups_of_codes(self, dtype: str) -> None:
        """Groups of coded pages answer as one table for all layers does, in which no page is given
        away."""
        if dtype not in self.kv_dtypes:
            pytest.skip(f"no KV cache of {dtype}")
        model, source, groups = grouped_model(WINDOWS["an empty place"])
        found = []
        for windows in (groups, (None,)):
            steps = grouped_steps(_texts(9, 58, 37), windows, 7)
            found.append(
                self._logprobs(
                    model, source, steps, group_caches=windows == groups, kv_cache_dtype=dtype
                )
            )
        np.testing.assert_allclose(found[1], found[0], rtol=0, atol=self.tolerance)

    def test_cache_groups_do_not_feel_their_batch(self) -> None:
        """The last sequence alone and whole, and in chunks among others."""
        if not self.exact_batches:
            pytest.skip("bits may depend on the batch")
        model, source, groups = grouped_model(WINDOWS["three windows"])
        half = _NAN // 2  # the last one is known by its ids
        texts = [
            [token // 2 + half * (i == 2) for token in text]
            for i, text in enumerate(_texts(20, 58, 37))
        ]
        steps = grouped_steps(texts[2:], groups, 1)
        alone = self._logprobs(model, source, steps, from_id=half, group_caches=True)
        for chunk in (7, 64):
            steps = grouped_steps(texts, groups, chunk)
            among = self._logprobs(model, source, steps, from_id=half, group_caches=True)
            np.testing.assert_array_equal(among, alone)

    def _logprobs(
        self,
        model: Model,
        source: WeightSource,
        steps: Sequence[Sequence[Row]],
        *,
        from_id: int = 0,
        **options: Any,
    ) -> npt.NDArray[np.float32]:
        """(L, V) of all steps one after the other, of the rows whose ids are not below `from_id`;
        not of the first step."""
        found = []
        with self.loaded(model, source, **options) as loaded:
            for rows in steps:
                got = all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)
                own = np.concatenate([row.tokens for row in rows if row.logits == "all"] or [[]])
                found.append(got[: len(own)][own >= from_id])
        return np.concatenate(found)
