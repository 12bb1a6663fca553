"""Two ranks of the CPU backend multiply every type of block as it is stored, and come to what one
process comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.checkpoint import Checkpoint, quantise_in_situ
from vllmx_core.testing.model_suite import random_weights

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


@pytest.mark.parametrize("isq", TYPES)
def test_two_ranks(isq: str) -> None:
    model, _ = of(CONFIG)
    checkpoint = Checkpoint(Path("model"), CONFIG, random_weights(model))
    source = quantise_in_situ(REGISTRY, checkpoint, model, isq).weights
    found = []
    for count in (1, 2):
        ranks = cpu_ranks(model, source, count, "bf16")
        found += ranks.each(lambda loaded: logits(loaded, TEXT, CUTS))
        sizes = ranks.each(lambda loaded: loaded.info.weight_bytes)
        ranks.each(lambda loaded: loaded.close())
        ranks.close()
        if count == 1:
            whole = sizes[0]
    expected, first, second = found
    np.testing.assert_allclose(first, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    np.testing.assert_array_equal(second, first)  # or they would draw different ids
    assert max(sizes) < 0.6 * whole, "what is cut keeps its type"
