"""RoPE parameters: what is refused, what is claimed, what a table is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import UnsupportedModelError
from vllmx_models.blocks.rope import SCALINGS, Rope, read_rope

HEAD = 8


def read(scaling: Any, **config: Any) -> Rope:
    rope = read_rope({"rope_scaling": scaling, **config}, HEAD, max_positions=1000)
    assert rope is not None
    return rope


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "magic"}, "'magic' is not known here; known: default, linear, dynamic"),
        ({"type": "mrope", "mrope_section": [2, 1, 1]}, "'mrope' is not known"),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, "keys that are not known here"),
        ({"rope_type": "linear", "factor": 2.0, "extra": 1}, "not known here: 'extra'"),
        ({"rope_type": 7}, "'7' is not known"),
        ({"rope_type": ["linear"]}, "is not known"),
        ("linear", "must be an object"),
        ({"rope_type": "linear"}, "needs factor as a number above 0, got None"),
        ({"rope_type": "linear", "factor": "2"}, "needs factor"),
        ({"rope_type": "linear", "factor": True}, "needs factor"),
        ({"rope_type": "linear", "factor": -2.0}, "needs factor"),
        ({"rope_type": "dynamic", "factor": float("inf")}, "needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 2.0},
         "needs high_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": "x"}, "needs beta_fast"),
        ({"rope_type": "longrope"}, "short_factor as a list of 4"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4},
         "short_factor as a list of 4"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, "x", 3.0]},
         "long_factor as a list of 4"),
        ({"rope_theta": 0}, "needs rope_theta"),
        ({"partial_rotary_factor": 0.4}, "rotate 3 of 8 head dimensions"),
        ({"partial_rotary_factor": 2.0}, "rotate 16 of 8 head dimensions"),
    ],
)  # fmt: skip
def test_refused(scaling: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(scaling)
    assert message in caught.value.message


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 1000),
        ({"rope_type": "linear", "factor": 2.5}, 2500),
        ({"rope_type": "dynamic", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 125,
            },
            1000,
        ),
        ({"type": "su", "original_max_position_embeddings": 100, **LONG}, 1000),
    ],
)
def test_context_that_is_claimed(scaling: Any, length: int) -> None:
    assert read(scaling).context_len == length


def test_a_layer_type_that_rotates_nothing() -> None:
    config = {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 5.0}}}
    assert read_rope(config, HEAD, max_positions=10) is None
    other = read_rope(config, HEAD, layer_type="sliding_attention", max_positions=10)
    assert other is not None
    assert other.theta == 5.0


def test_table_is_cos_then_sin_of_the_rotation() -> None:
    table = read(None, rope_theta=100.0).table(50)
    assert table.shape == (50, HEAD)
    assert table.dtype == np.float32
    angles = np.arange(50)[:, None] * 100.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    np.testing.assert_allclose(table, np.hstack([np.cos(angles), np.sin(angles)]), atol=1e-5)


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_factor_of_one_changes_nothing(kind: str) -> None:
    """Every scaling with neutral options is the plain rotation."""
    options = {
        "factor": 1.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0] * 4,
    }
    table = read({"rope_type": kind, **options}).table(100)
    np.testing.assert_allclose(table, read(None).table(100), atol=1e-5)


def test_longrope_takes_the_long_factors_for_a_long_context() -> None:
    rope = read({"rope_type": "longrope", "original_max_position_embeddings": 100, **LONG})
    short, long = rope.table(100), rope.table(101)
    factor = np.hypot(*short[1, [0, HEAD // 2]])
    np.testing.assert_allclose(factor, np.sqrt(1 + np.log(10) / np.log(100)), rtol=1e-6)
    np.testing.assert_allclose(np.arctan2(short[1, HEAD // 2], short[1, 0]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(np.arctan2(long[1, HEAD // 2], long[1, 0]), 0.5, rtol=1e-6)
