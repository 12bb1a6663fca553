"""RoPE tables against the rotary modules of Hugging Face transformers, both config styles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_models.blocks.rope import read_rope

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEAD, POSITIONS = 64, 256
FACTORS = {
    "short_factor": np.linspace(1, 1.4, HEAD // 2).tolist(),
    "long_factor": np.geomspace(1, 30, HEAD // 2).tolist(),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3-no-original": LLAMA3,
    "yarn": YARN,
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-no-truncate": {**YARN, "truncate": False},
    "yarn-mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn-mscale-equal": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-narrow-ramp": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS},
    "longrope-factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "factor": 8.0,
        **FACTORS,
    },
    "longrope-attention-factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.5,
        **FACTORS,
    },
    "longrope-no-original": {"rope_type": "longrope", **FACTORS},
}


def hf_config(kind: str, parameters: dict[str, Any], **options: Any) -> Any:
    return transformers.AutoConfig.for_model(
        kind,
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        head_dim=HEAD,
        max_position_embeddings=16384,
        rope_parameters={"rope_theta": 10000.0, **parameters},
        **options,
    )


def hf_table(config: Any, positions: Any) -> Any:
    """(T, D): cos of D / 2 angles, then sin, for the length that the last position makes."""
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.tensor(positions)[None])
    half = cos.shape[-1] // 2
    return np.concatenate([cos[0, :, :half].numpy(), sin[0, :, :half].numpy()], axis=1)


@pytest.mark.parametrize(
    ("style", "length"), [("parameters", 4096), ("scaling", 4097), ("type", 40000)]
)
@pytest.mark.parametrize("name", SCALINGS)
def test_table(name: str, style: str, length: int) -> None:
    positions = np.concatenate([np.arange(POSITIONS), [length - 2, length - 1]])
    expected = hf_table(hf_config("llama", dict(SCALINGS[name])), positions)
    rope = read_rope(styled(SCALINGS[name], style), HEAD, max_positions=16384)
    assert rope is not None
    assert rope.rotary_dim == HEAD
    # float32 angles near 40000 are steps of 0.004 apart; both sides round the same product
    np.testing.assert_allclose(rope.table(length)[positions], expected, atol=3e-3)
    np.testing.assert_allclose(rope.table(length)[:POSITIONS], expected[:POSITIONS], atol=2e-5)


def styled(parameters: dict[str, Any], style: str) -> dict[str, Any]:
    if style == "parameters":
        return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}
    scaling = dict(parameters)
    if style == "type":
        scaling["type"] = scaling.pop("rope_type")
    return {"rope_theta": 10000.0, "rope_scaling": scaling}


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_one_dictionary_for_each_layer_type(layer_type: str) -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    rope = read_rope(
        {"rope_parameters": parameters}, HEAD, layer_type=layer_type, max_positions=16384
    )
    assert rope is not None
    expected = hf_table(hf_config("llama", parameters[layer_type]), np.arange(POSITIONS))
    np.testing.assert_allclose(rope.table(POSITIONS), expected, atol=2e-5)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_partial_rotation(where: str) -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    config: dict[str, Any] = {"rope_parameters": parameters}
    (parameters if where == "inside" else config)["partial_rotary_factor"] = 0.5
    rope = read_rope(config, HEAD, max_positions=16384)
    assert rope is not None
    assert rope.rotary_dim == HEAD // 2
    hf = hf_config("glm4", {"rope_type": "default", "partial_rotary_factor": 0.5})
    module = transformers.models.glm4.modeling_glm4.Glm4RotaryEmbedding(hf)
    angles = np.arange(POSITIONS)[:, None] * module.inv_freq.numpy()[None]
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(rope.table(POSITIONS), expected, atol=2e-5)


def test_phi3_keeps_the_original_length_outside() -> None:
    scaling = {"type": "su", **FACTORS}
    config = {"rope_scaling": scaling, "original_max_position_embeddings": 4096}
    rope = read_rope(config, HEAD, max_positions=16384)
    assert rope is not None
    expected = hf_table(hf_config("llama", SCALINGS["longrope"]), np.arange(POSITIONS))
    np.testing.assert_allclose(rope.table(POSITIONS), expected, atol=2e-5)
