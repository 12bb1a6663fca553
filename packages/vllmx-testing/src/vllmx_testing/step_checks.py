"""Loading, limits, the life of a step, and that a row does not see its batch mates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadedModel
from vllmx_core.errors import CapacityError, WeightFormatError
from vllmx_core.weights.tensor import DType

from vllmx_testing.harness import PAGE, VOCAB, Harness, all_logprobs, mixed_steps
from vllmx_testing.plans import Driver, Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel, tiny_decoder

PROMPTS = [[1], [2, 3, 5, 7, 11, 13, 17], list(range(VOCAB)) * 2, [4] * PAGE, [8, 6]]


def decoder(vocab_size: int = VOCAB, dtype: DType = "f32") -> tuple[SyntheticModel, ArraySource]:
    builder = Builder(vocab_size, seed=3)
    model = tiny_decoder(builder)
    return model, ArraySource(builder.arrays, dtype)


class StepChecks(Harness):
    def test_decoder_against_the_reference(self) -> None:
        self.compare(*decoder(), mixed_steps(1))

    @pytest.mark.parametrize("dtype", ["bf16", "f16"])
    def test_decoder_in_the_dtype_of_its_checkpoint(self, dtype: DType) -> None:
        """Half precision all through: coarse (steps of bf16 are 0.125 at 25), but no garbage."""
        self.compare(*decoder(dtype=dtype), mixed_steps(1), tolerance=0.25, **self.native(dtype))

    def native(self, dtype: DType) -> dict[str, Any]:
        """Options that load a checkpoint of `dtype` as it is; override where that is refused."""
        return {"dtype": dtype}

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_ids_do_not_depend_on_chunks_batches_or_overlap(self, temperature: float) -> None:
        model, source = decoder(211)
        wanted = self._generate(model, source, PROMPTS, temperature)
        for index in (1, 2):
            alone = self._generate(model, source, [PROMPTS[index]], temperature)
            assert alone == [wanted[index]]
        for chunk in (1, 7):
            for overlap in (False, True):
                how = {"chunk": chunk, "overlap": overlap}
                assert self._generate(model, source, PROMPTS, temperature, **how) == wanted, how

    def _generate(
        self,
        model: SyntheticModel,
        source: ArraySource,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        **driver: Any,
    ) -> list[list[int]]:
        with self.loaded(model, source) as loaded:
            seeds = [len(prompt) for prompt in prompts]
            return Driver(loaded, **driver).generate(
                prompts, 20, seeds=seeds, temperature=temperature
            )

    def test_bits_do_not_depend_on_batch_mates(self) -> None:
        if not self.exact_batches:
            pytest.skip("this backend does not promise batch invariance")
        model, source = decoder()
        text = np.random.default_rng(0).integers(0, VOCAB, 37).tolist()
        with self.loaded(model, source, max_num_seqs=64) as loaded:
            plan = make_plan([Row(text[:36], 0, [0, 1, 2], "all")], PAGE)
            whole = all_logprobs(loaded, plan, VOCAB)
            plan = make_plan([Row(text[36:], 36, [0, 1, 2])], PAGE)
            last = all_logprobs(loaded, plan, VOCAB)
            for mates in (1, 6, 13, 40):
                self._check_bits(loaded, text, mates, whole, last)

    def _check_bits(
        self, loaded: LoadedModel, text: list[int], mates: int, whole: Any, last: Any
    ) -> None:
        """The same text in uneven chunks between `mates` other rows."""
        others = [Row([i % VOCAB], 0, [20 + i], "none") for i in range(mates)]
        blocks, start, got = [9, 4, 11], 0, []
        for length in (1, 2, 17, 16, 1):
            row = Row(text[start : start + length], start, blocks, "all")
            rows = [*others[: mates // 2], row, *others[mates // 2 :]]
            got.append(all_logprobs(loaded, make_plan(rows, PAGE), VOCAB))
            start += length
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate([whole, last]))

    def test_eager_and_recorded_give_the_same_answers(self) -> None:
        model, source = decoder()
        results = []
        for enforce_eager in (False, True):
            with self.loaded(model, source, enforce_eager=enforce_eager) as loaded:
                plans = [make_plan(rows, PAGE) for rows in mixed_steps(2)]
                results.append([all_logprobs(loaded, plan, VOCAB) for plan in plans])
        # A recorded step may be padded to another size.
        tolerance = 0.0 if self.exact_batches else 1e-5
        for recorded, eager in zip(*results, strict=True):
            np.testing.assert_allclose(recorded, eager, rtol=tolerance, atol=tolerance)

    def test_plan_arrays_may_be_reused_at_once(self) -> None:
        model, source = decoder()
        with self.loaded(model, source) as loaded:
            plan, rows = make_plan([Row([1, 2, 3], 0, [0], "all")], PAGE), sampling_rows(3)
            expected = loaded.step(plan, rows).result().ids
            handle = loaded.step(plan, rows)
            arrays = (plan.tokens, plan.positions, *plan.slots, *plan.block_tables, rows.target)
            for array in arrays:
                array[...] = 7
            np.testing.assert_array_equal(handle.result().ids, expected)

    def test_unused_table_entries_are_not_read(self) -> None:
        model, source = decoder()
        with self.loaded(model, source) as loaded:
            rows = [Row([1, 2, 3], 0, [0], "all"), Row(list(range(18)), 0, [1, 2], "all")]
            plan = make_plan(rows, PAGE)
            expected = all_logprobs(loaded, plan, VOCAB)
            plan.block_tables[0][0, 1:] = 1 << 30
            np.testing.assert_array_equal(all_logprobs(loaded, plan, VOCAB), expected)

    def test_references_to_the_step_before(self) -> None:
        """References stand among known tokens, out of order, with the first step still in
        flight."""
        model, source = decoder(211)
        first = make_plan([Row([i + 1], 0, [i]) for i in range(5)], PAGE)
        rows = [Row([-5], 1, [4]), Row([9], 0, [10]), Row([-1], 1, [0]), Row([-3], 1, [2])]
        with self.loaded(model, source) as loaded:
            handles = [
                loaded.step(first, sampling_rows(5)),
                loaded.step(make_plan(rows, PAGE), sampling_rows(4)),
            ]
            ids, overlapped = (handle.result().ids.tolist() for handle in handles)
        known = [Row([ids[4]], 1, [4]), rows[1], Row([ids[0]], 1, [0]), Row([ids[2]], 1, [2])]
        with self.loaded(model, source) as loaded:
            assert self.step_ids(loaded, [Row([i + 1], 0, [i]) for i in range(5)]) == ids
            assert self.step_ids(loaded, known) == overlapped

    def test_a_step_without_logit_rows(self) -> None:
        model, source = decoder()
        with self.loaded(model, source) as loaded:
            assert self.step_ids(loaded, [Row([1, 2, 3], 0, [0], "none")]) == []
            split = self.step_ids(loaded, [Row([4], 3, [0])])
            assert split == self.step_ids(loaded, [Row([1, 2, 3, 4], 0, [1])])

    def test_the_largest_step(self) -> None:
        model, source = decoder()
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": 96, "max_model_len": 96}
        text = np.random.default_rng(6).integers(0, VOCAB, 96).tolist()
        steps = [
            [Row(text, 0, [0, 1, 2, 3, 4, 5], "all")],
            [Row(text[i : i + 6], 0, [10 + i], "all") for i in range(16)],
            [Row([i], 6, [10 + i]) for i in range(16)],
        ]
        self.compare(model, source, steps, **limits)

    def test_info_tells_what_was_asked_for(self) -> None:
        backend = self.make_backend()
        assert all(isinstance(value, str) for value in backend.environment().values())
        with self.loaded(*decoder(), num_kv_blocks=37, block_size=32) as loaded:
            info = loaded.info
            assert (info.backend, info.num_kv_blocks, info.block_size) == (backend.name, 37, 32)
            assert info.dtype == self.dtype
            assert info.max_num_seqs == 16
            assert info.max_num_batched_tokens >= 256
            assert info.max_logit_rows >= 16
            assert min(info.weight_bytes, info.kv_cache_bytes) > 0
        with self.loaded(*decoder(), max_num_seqs=None) as loaded:
            info = loaded.info
            assert 1 <= info.max_num_seqs <= info.max_num_batched_tokens

    def test_elapsed_time_is_reported(self) -> None:
        with self.loaded(*decoder()) as loaded:
            plan = make_plan([Row([1], 0, [0])], PAGE)
            assert 0 < loaded.step(plan, sampling_rows(1)).result().elapsed_s < 60

    def test_a_cache_that_is_too_small_is_refused(self) -> None:
        model, source = decoder()
        for options in (
            {"num_kv_blocks": 2},
            {"num_kv_blocks": None, "kv_cache_memory_bytes": 512},
        ):
            with pytest.raises(CapacityError, match="128"), self.loaded(model, source, **options):
                pass

    def test_a_cache_that_may_shrink_is_as_large_as_fits(self) -> None:
        with self.loaded(*decoder(), num_kv_blocks=2, shrink_to_fit=True) as loaded:
            assert loaded.info.num_kv_blocks == 2
            assert len(self.step_ids(loaded, [Row(list(range(18)), 0, [1, 0])])) == 1

    def test_weights_that_do_not_match_are_refused(self) -> None:
        model, source = decoder()
        arrays = {name: source.part(name).dequantize() for name in source.names()}
        missing = {name: array for name, array in arrays.items() if name != "1.down.0.weight"}
        for changed in (missing, arrays | {"1.down.0.weight": arrays["1.down.0.weight"][:, 1:]}):
            with (
                pytest.raises(WeightFormatError, match=r"1\.down\.0\.weight"),
                self.loaded(model, ArraySource(changed)),
            ):
                pass

    def test_close_with_a_step_in_flight_and_twice(self) -> None:
        with self.loaded(*decoder()) as loaded:
            loaded.step(make_plan([Row([1], 0, [0])], PAGE), sampling_rows(1))
            loaded.close()
            loaded.close()
