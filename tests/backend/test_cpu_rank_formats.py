"""Two ranks of the CPU backend multiply every type of block as it is stored, and come to what one
process comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.plugins.checkpoint import Checkpoint, quantise_in_situ
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.part import StoredPart, WeightPart, WeightSource
from vllmx_core.weights.tensor import RawTensor
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.quantization.float4 import fp4_part
from vllmx_models.quantization.float8 import Fp8
from vllmx_testing.model_suite import random_weights
from vllmx_testing.synthetic import ArraySource

from .cpu_ranks import cpu_ranks, logits
from .test_sharding import LLAMA, REGISTRY, of

TEXT = [(7 * at * at + 3) % 59 for at in range(20)]
CUTS = (17, 18)
CONFIG: dict[str, Any] = LLAMA | {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 128,
    "num_key_value_heads": 2, "num_hidden_layers": 1,
}  # fmt: skip
"""Each rank has 256 columns of what is cut so: one block of the widest types."""
TYPES = (
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "int8", "fp8",
)  # fmt: skip


BLOCKS = {"IQ4_NL": 0.01, "IQ4_XS": 0.0003, "MXFP4": 0.0}
"""Types that are read and not made while loading, with a scale at which features keep their size.
"""


class Blocks(ArraySource):
    """Random blocks in the place of each matrix that is cut.

    Args:
        kind: their type, "fp4" for MXFP4 and "fp8" for blocks of FP8 as safetensors have them.
    """

    def __init__(self, model: Model, kind: str) -> None:
        super().__init__({})
        self._parts = dict(random_weights(model)._parts)
        random = np.random.default_rng(5)
        for spec in model.weights():
            for part in spec.parts if spec.shard in ("row", "column") and spec.cols else ():
                shape = (part.rows, spec.cols)
                self._parts[part.name] = self._made(part.name, kind, shape, random)

    def _made(
        self, name: str, kind: str, shape: tuple[int, int], random: np.random.Generator
    ) -> WeightPart:
        if kind == "fp4":
            groups = (shape[0], shape[1] // 32)
            codes = random.integers(0, 256, (*groups, 16), np.uint8)
            exponents = random.integers(121, 124, groups, np.uint8)
            raws = (RawTensor(name, "u8", one.shape, one.reshape(-1)) for one in (codes, exponents))
            return fp4_part(name, *raws, shape)
        if kind == "fp8":
            return fp8_blocks(name, shape, random)
        of_type = TYPES_BY_NAME[kind]
        count = shape[0] * shape[1] // of_type.values
        blocks = random.integers(0, 256, (count, of_type.num_bytes), np.uint8)
        if kind == "MXFP4":
            blocks[:, 0] = random.integers(121, 124, count)
        else:
            scales = BLOCKS[kind] * random.standard_normal(count)
            blocks[:, :2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
        return weight_part(name, of_type, shape, blocks.reshape(-1))


def fp8_blocks(name: str, shape: tuple[int, int], random: np.random.Generator) -> WeightPart:
    """A scale for each block of 128 by 128, as DeepSeek and Qwen write them."""
    codes = (random.integers(0, 0x40, shape) | random.integers(0, 2, shape) << 7).astype(np.uint8)
    scales = random.uniform(0.02, 0.04, [-(-size // 128) for size in shape]).astype(np.float32)
    raws = {
        "weight": RawTensor(name, "f8e4m3", shape, codes.reshape(-1)),
        "scale": RawTensor(name, "f32", scales.shape, scales.view(np.uint8).reshape(-1)),
    }
    options = {"strategy": "block", "block_rows": 128, "block_cols": 128, "dtype": "f8e4m3"}
    return StoredPart(name, shape, Fp8(8, None, options), raws)


def check(model: Model, source: WeightSource, dtype: str, near: float, **how: bool) -> None:
    """Two ranks come to what one does, with half of the bytes each."""
    found = []
    for count in (1, 2):
        ranks = cpu_ranks(model, source, count, dtype, **how)
        found += ranks.each(lambda loaded: logits(loaded, TEXT, CUTS))
        sizes = ranks.each(lambda loaded: loaded.info.weight_bytes)
        ranks.each(lambda loaded: loaded.close())
        ranks.close()
        if count == 1:
            whole = sizes[0]
    expected, first, second = found
    np.testing.assert_allclose(first, expected, rtol=0, atol=near * np.abs(expected).max())
    np.testing.assert_array_equal(second, first)  # or they would draw different ids
    assert max(sizes) < 0.6 * whole, "what is cut keeps its type"


@pytest.mark.parametrize("isq", TYPES)
def test_two_ranks(isq: str) -> None:
    model, _ = of(CONFIG)
    checkpoint = Checkpoint(Path("model"), CONFIG, random_weights(model))
    check(model, quantise_in_situ(REGISTRY, checkpoint, model, isq).weights, "bf16", 0.02)


@pytest.mark.parametrize("kind", [*BLOCKS, "fp4", "fp8"])
def test_types_that_are_read_alone(kind: str) -> None:
    """With float32 activations nothing is rounded to int8, so that no block may go astray; with
    `--deterministic` bits are equal, in the fast way as well."""
    model, _ = of(CONFIG | {"num_hidden_layers": 2})
    source = Blocks(model, kind)
    check(model, source, "f32", 2e-5)
    check(model, source, "bf16", 0.02)
    check(model, source, "bf16", 0.0, deterministic=True)


def test_blocks_of_256_are_for_no_more_ranks() -> None:
    model, _ = of(CONFIG)
    for kind, ranks in (("IQ4_XS", "1 or 2"), ("MXFP4", "1 or 2 or 4")):
        with pytest.raises(ConfigError, match=rf"among 8 .* --tensor-parallel-size {ranks}$"):
            sharded(model, Blocks(model, kind), 64, 0, 8)
