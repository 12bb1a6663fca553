"""Weights picked out of larger tensors equal the same weights in tensors of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from vllmx_core.plan import F32
from vllmx_core.weights.spec import PartSpec, RowRuns
from vllmx_core.weights.tensor import DType

from vllmx_testing.harness import VOCAB, Harness, all_logprobs, mixed_steps
from vllmx_testing.plans import make_plan
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel, tiny_decoder

HEAD = 8


class WeightChecks(Harness):
    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_picked_weights_are_the_weights(self, dtype: DType) -> None:
        """The same bits: what a kernel multiplies does not depend on how the file holds it."""
        builder = Builder(VOCAB)
        model = tiny_decoder(builder)
        arrays, picked = scattered(builder.arrays, model)
        found = []
        for map_of, source in (
            (model, ArraySource(builder.arrays, dtype)),
            (picked, ArraySource(arrays, dtype)),
        ):
            with self.loaded(map_of, source) as loaded:
                plans = [make_plan(rows, loaded.info.block_size) for rows in mixed_steps()]
                found.append([all_logprobs(loaded, plan, VOCAB) for plan in plans])
        for plain, others in zip(*found, strict=True):
            np.testing.assert_array_equal(plain, others)


def scattered(
    arrays: Mapping[str, F32], model: SyntheticModel
) -> tuple[dict[str, F32], SyntheticModel]:
    """The arrays of `tiny_decoder` as an odd checkpoint holds them, and the model with a map that
    finds them: queries in a stack, keys between rows of others, values the other way round, gate
    and up in turns, the second product in the middle of wider rows, norms under another name."""
    odd, moved = dict(arrays), dict[str, PartSpec]()
    random = np.random.default_rng(7)

    def noise(*shape: int) -> F32:
        return random.standard_normal(shape).astype(np.float32)

    for name in [name for name in arrays if name.endswith(".qkv.0.weight")]:
        layer = name.removesuffix(".qkv.0.weight")
        query, key, value = (odd.pop(f"{layer}.qkv.{part}.weight") for part in range(3))
        odd[f"{layer}.q"] = np.stack([noise(*query.shape), query])
        moved[name] = PartSpec(f"{layer}.q", len(query), entry=1)
        heads = key.reshape(-1, HEAD, key.shape[1])
        both = np.concatenate([noise(*heads.shape), heads], axis=1)
        odd[f"{layer}.k"] = both.reshape(-1, key.shape[1])
        runs = RowRuns(HEAD, HEAD, 2 * HEAD)
        moved[f"{layer}.qkv.1.weight"] = PartSpec(f"{layer}.k", len(key), runs=runs)
        odd[f"{layer}.v"] = np.ascontiguousarray(value.T)
        moved[f"{layer}.qkv.2.weight"] = PartSpec(f"{layer}.v", len(value), transposed=True)
        pair = [odd.pop(f"{layer}.gate_up.{part}.weight") for part in range(2)]
        odd[f"{layer}.gu"] = np.stack(pair, axis=1).reshape(-1, pair[0].shape[1])
        for part in range(2):
            turns = PartSpec(f"{layer}.gu", len(pair[0]), runs=RowRuns(part, 1, 2))
            moved[f"{layer}.gate_up.{part}.weight"] = turns
        down = odd.pop(f"{layer}.down.0.weight")
        odd[f"{layer}.d"] = np.concatenate([noise(len(down), 5), down, noise(len(down), 3)], 1)
        moved[f"{layer}.down.0.weight"] = PartSpec(f"{layer}.d", len(down), first_col=5)
        norm = f"{layer}.norm_in.weight"
        odd[f"{layer}.n"] = odd.pop(norm)
        moved[norm] = PartSpec(norm, len(odd[f"{layer}.n"]), alternatives=("no", f"{layer}.n"))
    specs = tuple(
        replace(spec, parts=tuple(moved.get(part.name, part) for part in spec.parts))
        for spec in model.specs
    )
    return odd, replace(model, specs=specs)
