"""RoPE and window metadata -> config.json, against what the converter was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_models.blocks.rope import read_rope

from .models import TYPES, of_type, write_model
from .test_source import BASE

HEAD = 16
Extra = Callable[[gguf.GGUFWriter], None]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.fixture
def open_config(registry: Registry, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The config.json of a file without layers' weights, plus what `extra` writes."""

    def open_(
        extra: Extra, tensors: dict[str, np.ndarray] | None = None, **config: Any
    ) -> dict[str, Any]:
        table = {"token_embd.weight": np.zeros((48, 64), np.float32)}
        path = write_model(
            tmp_path / "x.gguf",
            BASE | config,
            table | (tensors or {}),
            of_type(TYPES.F32),
            extra=extra,
        )
        checkpoint = open_checkpoint(registry, path)
        build_model(registry, checkpoint)  # whatever it says, an architecture takes it
        checkpoint.weights.close()
        return checkpoint.config

    return open_


def converter_factors(theta: float, dim: int, scaling: dict[str, float]) -> np.ndarray:
    """Llama 3's divisors, one frequency at a time, as its release states them."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    found = []
    for i in range(0, dim, 2):
        wave = 2 * np.pi * theta ** (i / dim)
        if wave < original / high:
            found.append(1.0)
        elif wave > original / low:
            found.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_named_again(
    open_config: Callable[..., dict[str, Any]], factor: float
) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = converter_factors(500000.0, HEAD, scaling)
    assert len(set(factors.tolist())) > 2
    config = open_config(lambda writer: None, {"rope_freqs.weight": factors}, rope_theta=500000.0)
    assert config["rope_scaling"] == scaling
    assert config["rope_theta"] == 500000.0


def test_other_divisors_are_taken_as_they_are(open_config: Callable[..., dict[str, Any]]) -> None:
    divisors = np.array([1, 1, 2, 3, 5, 8, 13, 21], np.float32)
    config = open_config(lambda writer: None, {"rope_freqs.weight": divisors})
    ours = read_rope(config, HEAD, max_positions=512)
    plain = read_rope({"rope_theta": 10000.0}, HEAD, max_positions=512)
    assert ours is not None
    assert plain is not None
    inverse, attention_factor = ours.frequencies(512)
    np.testing.assert_array_equal(inverse, plain.frequencies(512)[0] / divisors)
    assert attention_factor == 1.0


def linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def old_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_float32("llama.rope.scale_linear", 4.0)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_rope_scaling_yarn_beta_fast(16.0)
    writer.add_rope_scaling_yarn_attn_factor(1.25)


def none(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        (linear, {"rope_type": "linear", "factor": 4.0}),
        (old_linear, {"rope_type": "linear", "factor": 4.0}),
        (none, None),
        (
            yarn,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 16.0,
                "attention_factor": 1.25,
                "original_max_position_embeddings": 128,
            },
        ),
    ],
)
def test_scalings_of_the_metadata(
    open_config: Callable[..., dict[str, Any]], extra: Extra, scaling: dict[str, Any] | None
) -> None:
    assert open_config(extra).get("rope_scaling") == scaling


def test_longrope_factors_are_tensors(open_config: Callable[..., dict[str, Any]]) -> None:
    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(128)
        writer.add_rope_scaling_attn_factors(1.5)

    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(1, 9, 8, dtype=np.float32)
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    assert open_config(longrope, tensors)["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "attention_factor": 1.5,
        "original_max_position_embeddings": 128,
    }
    with pytest.raises(WeightFormatError, match="rope_factors_short"):
        open_config(longrope)


@pytest.mark.parametrize(
    ("key", "kind", "item", "error", "message"),
    [
        ("rope.freq_base", "float32", float("nan"), WeightFormatError, "number above 0 and"),
        ("rope.freq_base", "string", "x", WeightFormatError, "number above 0 and"),
        ("rope.freq_base", "float64", 1e300, WeightFormatError, "at most 3"),
        ("rope.scaling.type", "string", "warp", UnsupportedModelError, "'warp' is not known"),
        ("rope.scaling.type", "uint32", 1, WeightFormatError, "must be text"),
        ("attention.head_count", "array", [4, 2], UnsupportedModelError, "layer to layer"),
        ("attention.head_count", "int32", -4, WeightFormatError, "between 1 and"),
        ("attention.value_length", "uint32", 8, WeightFormatError, "must be the key length"),
        ("attention.scale", "float32", 0.5, UnsupportedModelError, "changes the model"),
        ("logit_scale", "float32", 0.5, UnsupportedModelError, "changes the model"),
        ("rope.dimension_count", "uint32", 99, WeightFormatError, "between 1 and 16"),
        ("rope.dimension_sections", "array", [1, 2], UnsupportedModelError, "changes the model"),
    ],
)
def test_values_that_cannot_be(
    open_config: Callable[..., dict[str, Any]],
    key: str,
    kind: str,
    item: Any,
    error: type[Exception],
    message: str,
) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"llama.{key}", None)
        getattr(writer, f"add_{kind}")(f"llama.{key}", item)

    with pytest.raises(error, match=message):
        open_config(extra)


def test_equal_values_for_each_layer_are_one(open_config: Callable[..., dict[str, Any]]) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_array("llama.attention.head_count_kv", [2, 2])

    assert open_config(extra)["num_key_value_heads"] == 2


def test_rotating_a_part_of_the_head(open_config: Callable[..., dict[str, Any]]) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.rope.dimension_count"]
        writer.add_rope_dimension_count(8)

    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        open_config(extra)  # llama has none; the key is passed on and refused by name
