"""Rows with adapters equal the model whose weights have the adapter in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from vllmx_core.adapters import Adapter, AdapterRoom, LowRank, module_key
from vllmx_core.backend import HasAdapters, LoadedModel
from vllmx_core.errors import AdapterError, UnsupportedOpError
from vllmx_core.plan import F32, I32, StepPlan
from vllmx_core.reference.backend import ReferenceBackend

from vllmx_testing.harness import VOCAB, Harness, all_logprobs, load_options, log_softmax
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel, tiny_decoder

ROOM = AdapterRoom(slots=3, rank=9)
TEXTS = ([3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [18, 0, 7, 7, 7], [2])


def random_adapter(arrays: dict[str, F32], rank: int, seed: int, part: str = "") -> Adapter:
    """Changes of all matrices whose names contain `part`; the table's leaves a tied head alone."""
    random = np.random.default_rng(seed)
    modules = {}
    for name, array in arrays.items():
        if array.ndim != 2 or part not in name:
            continue
        rows, cols = array.shape[::-1] if name.startswith("embed") else array.shape
        a = random.standard_normal((rank, cols)).astype(np.float32) * np.float32(cols**-0.5)
        b = random.standard_normal((rows, rank)).astype(np.float32) * np.float32(rank**-0.5)
        modules[module_key(name.removesuffix(".weight"))] = LowRank(a, b)
    return Adapter(modules)


def merged(arrays: dict[str, F32], adapter: Adapter) -> dict[str, F32]:
    """The weights with an adapter in them; the tied head gets a tensor of its own."""
    found = dict(arrays)
    for name, array in arrays.items():
        change = adapter.modules.get(module_key(name.removesuffix(".weight")))
        if change is not None:
            delta = change.b @ change.a
            found[name] = array + (delta.T if name.startswith("embed") else delta)
    return found


def untied_decoder() -> tuple[SyntheticModel, dict[str, F32]]:
    """A decoder whose head is a matrix of its own."""
    builder = Builder(VOCAB)
    model = tiny_decoder(builder)
    builder.specs.pop()
    builder.linear("head", VOCAB, 32)
    return SyntheticModel(model.shape, tuple(builder.specs), model.tables, model.body), dict(
        builder.arrays
    )


def plan_with(slots: Sequence[int], block_size: int, *, texts: Sequence[int] | None = None) -> Any:
    """A step of whole texts, each by the adapter in its slot."""
    numbers = range(len(slots)) if texts is None else texts
    rows = [Row(TEXTS[text], 0, [text], "all") for text in numbers]
    plan = make_plan(rows, block_size)
    plan.adapters = np.array(slots, np.int32)
    return plan


class AdapterChecks(Harness):
    def with_adapters(self) -> AbstractContextManager[LoadedModel]:
        """The decoder with room for adapters."""
        model, arrays = untied_decoder()
        return self.loaded(model, ArraySource(arrays), adapters=ROOM)

    def test_adapters_equal_merged_weights(self) -> None:
        if self._refused():
            return
        model, arrays = untied_decoder()
        some = {0: random_adapter(arrays, 4, 1), 2: random_adapter(arrays, 9, 2, "qkv.1")}
        with self.with_adapters() as loaded:
            plan = plan_with((0, -1, 2, 0), loaded.info.block_size)
            put(loaded, some)
            got = all_logprobs(loaded, plan, VOCAB)
            wanted = _oracle(model, arrays, some, plan, loaded.info.block_size)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=self.tolerance)
            # another adapter in a slot, one that is gone, and the same model without any
            some = {0: random_adapter(arrays, 1, 3)}
            put(loaded, {**some, 2: None})
            got = all_logprobs(loaded, plan, VOCAB)
            wanted = _oracle(model, arrays, some, plan, loaded.info.block_size)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=self.tolerance)

    def test_a_row_does_not_depend_on_other_adapters(self) -> None:
        if self._refused():
            return
        if not self.exact_batches:
            pytest.skip("its rows depend on the batch")
        _, arrays = untied_decoder()
        slots: I32 = np.array((1, -1, 0, 2), np.int32)
        with self.with_adapters() as loaded:
            put(loaded, {slot: random_adapter(arrays, 3 + slot, slot) for slot in range(3)})
            size = loaded.info.block_size
            together = all_logprobs(loaded, plan_with(slots.tolist(), size), VOCAB)
            alone = [
                all_logprobs(loaded, plan_with([slot], size, texts=[text]), VOCAB)
                for text, slot in enumerate(slots.tolist())
            ]
            np.testing.assert_array_equal(together, np.concatenate(alone))
            none = plan_with((-1,) * 4, size)
            without = all_logprobs(loaded, none, VOCAB)
            np.testing.assert_array_equal(alone[1], without[7:10])

    def test_an_adapter_that_does_not_fit(self) -> None:
        if self._refused():
            return
        _, arrays = untied_decoder()
        good = random_adapter(arrays, 4, 1)
        a, b = np.zeros((4, 31), np.float32), np.zeros((32, 4), np.float32)
        with self.with_adapters() as loaded:
            plan = plan_with((0, 0, 0, 0), loaded.info.block_size)
            put(loaded, {0: good})
            before = all_logprobs(loaded, plan, VOCAB)
            with pytest.raises(AdapterError, match=r"does not fit the model: .*0\.qkv\.0"):
                put(loaded, {0: Adapter({"0.qkv.0": LowRank(a, b)})})
            np.testing.assert_array_equal(all_logprobs(loaded, plan, VOCAB), before)

    def _refused(self) -> bool:
        if "adapt" not in self.missing_ops:
            return False
        with pytest.raises(UnsupportedOpError, match="needs the op 'adapt'"):
            self.with_adapters().__enter__()
        return True


def put(loaded: LoadedModel, adapters: Mapping[int, Adapter | None]) -> None:
    """Fills slots."""
    assert isinstance(loaded, HasAdapters), "the model takes no adapters"
    for slot, adapter in adapters.items():
        loaded.set_adapter(slot, adapter)


def _oracle(
    model: SyntheticModel,
    arrays: dict[str, F32],
    adapters: dict[int, Adapter],
    plan: StepPlan,
    block_size: int,
) -> F32:
    """(L, V) log-probabilities in float64, each row by weights with its adapter in them."""
    assert plan.adapters is not None
    found = []
    for text, slot in enumerate(plan.adapters.tolist()):
        weights = merged(arrays, adapters[slot]) if slot in adapters else arrays
        options = load_options("f64", {})
        oracle = ReferenceBackend().load(model, ArraySource(weights), options)
        found.append(log_softmax(oracle.logits(plan_with([-1], block_size, texts=[text]))))
    return np.concatenate(found).astype(np.float32)
