"""Models that give a vector for each text: what a step of theirs is, apart from their ops."""

from __future__ import annotations

import numpy as np
import pytest

from vllmx_testing.harness import PAGE, VOCAB, Harness, all_vectors
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel, tiny_decoder

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


def text_model() -> tuple[SyntheticModel, ArraySource]:
    """A decoder without a head: a text is what its last token became."""
    builder = Builder(VOCAB)
    return tiny_decoder(builder, pooled=True), ArraySource(builder.arrays)


class VectorChecks(Harness):
    @pytest.fixture
    def texts(self) -> tuple[SyntheticModel, ArraySource]:
        if "pool" in self.missing_ops:
            pytest.skip(f"{self.make_backend().name} refuses pool by name")
        return text_model()

    def test_vectors_of_chunks(self, texts: tuple[SyntheticModel, ArraySource]) -> None:
        steps = [
            [Row(TEXT[:7], 0, [3, 1], "none"), Row([5, 3], 0, [0])],
            [Row(TEXT[7:], 7, [3, 1])],
            [Row([1, 2], 0, [2]), Row(TEXT, 0, [4, 5])],
        ]
        self.compare(*texts, steps)

    def test_vectors_op_by_op(self, texts: tuple[SyntheticModel, ArraySource]) -> None:
        self.compare(*texts, [[Row([1, 2], 0, [2]), Row(TEXT, 0, [4, 5])]], enforce_eager=True)

    def test_vectors_of_two_steps_in_flight(
        self, texts: tuple[SyntheticModel, ArraySource]
    ) -> None:
        plans = [make_plan([Row(TEXT[at:], 0, [at, at + 1])], PAGE) for at in (0, 2, 4)]
        with self.loaded(*texts) as loaded:
            alone = [all_vectors(loaded, plan) for plan in plans]
            first = loaded.step(plans[0], sampling_rows(0))
            second = loaded.forward(plans[1]).sample(sampling_rows(0))
            found = [first.result()]
            third = loaded.step(plans[2], sampling_rows(0))
            found += [second.result(), third.result()]
        for each, vectors in zip(found, alone, strict=True):
            np.testing.assert_array_equal(each.vectors, vectors)

    def test_vectors_of_a_broken_text_break_no_other(
        self, texts: tuple[SyntheticModel, ArraySource]
    ) -> None:
        model, source = texts
        arrays = {name: source.part(name).dequantize().copy() for name in source.names()}
        arrays["embed.weight"][7] = np.nan
        rows = [Row([1, 7], 0, [0]), Row([1, 2, 3], 0, [1])]
        with self.loaded(model, ArraySource(arrays)) as loaded:
            broken, whole = all_vectors(loaded, make_plan(rows, PAGE))
        assert np.isnan(broken).all()
        assert np.isfinite(whole).all()
