"""config.json: real ones are served or refused with a clear reason, and nothing that changes the
result is ignored."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import KVSpec
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.plugins.specs import ModelSpec
from vllmx_models.blocks.rope import SCALINGS
from vllmx_models.trunks.decoder import Decoder

ROOT = Path(__file__).parents[3]
COPIES = ROOT / "tests" / "data" / "configs"
SHARED = ROOT.parent / "shared" / "configs"
BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@cache
def load_registry_once() -> Registry:
    return load_registry()


SERVED = sorted(name for spec in load_registry_once().all(ModelSpec) for name in spec.architectures)


@pytest.fixture
def registry() -> Registry:
    return load_registry_once()


@pytest.fixture
def build(registry: Registry) -> Any:
    def build_(architecture: str, **config: Any) -> Decoder:
        config = {**BASE, "architectures": [architecture], **config}
        model = registry.model_for(config).load()(config)
        assert isinstance(model, Decoder)
        return model

    return build_


def config_files() -> list[Path]:
    found = sorted(COPIES.glob("*.json")) + sorted(SHARED.glob("*/*.json"))
    others = ("_hf_quant_config.json", ".generation_config.json")
    return [path for path in found if not path.name.endswith(others)]


@pytest.mark.parametrize("path", config_files(), ids=lambda path: path.stem)
def test_public_configs(registry: Registry, path: Path) -> None:
    config = json.loads(path.read_text())
    names = config.get("architectures")
    if names and names[0] in SERVED:
        model = registry.model_for(config).load()(config)
        text = {"vocab_size": 262208, **config, **config.get("text_config", {})}
        assert model.shape.vocab_size == text["vocab_size"]
        blocks = text.get("layers_block_type", ())  # some say no number beside the list
        assert len(model.spec.layers) == text.get("num_hidden_layers", len(blocks))
        assert model.shape.dtype == "bf16" or ".partial" in path.name
        specs = model.weights()
        assert len({spec.name for spec in specs}) == len(specs)
    else:
        with pytest.raises(UnsupportedModelError, match="no installed plugin serves"):
            registry.model_for(config)


def test_qwen3_dimensions(registry: Registry) -> None:
    config = json.loads((COPIES / "Qwen--Qwen3-0.6B.json").read_text())
    model = registry.model_for(config).load()(config)
    assert model.shape.max_model_len == 40960
    assert set(model.shape.caches) == {KVSpec(8, 128)}
    weights = {spec.name: spec for spec in model.weights()}
    assert weights["layers.27.qkv"].rows == (16 + 8 + 8) * 128
    assert weights["layers.0.o"].cols == 16 * 128
    assert weights["lm_head"].parts == weights["embed"].parts  # tied
    assert [weights[name].shard for name in ("layers.0.qkv", "layers.0.o", "embed")] == [
        "column",
        "row",
        "vocab",
    ]


def test_model_type_serves_where_architectures_is_missing(registry: Registry) -> None:
    config = {**BASE, "model_type": "qwen3"}
    assert registry.model_for(config).load()(config).shape.kv_specs[0].head_size == 128


QUIRKS = [
    ("LlamaForCausalLM", {"hidden_act": "xielu"}, "hidden_act = xielu"),
    ("LlamaForCausalLM", {"sliding_window": 128}, "sliding_window = 128"),
    ("LlamaForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("LlamaForCausalLM", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ("LlamaForCausalLM", {"is_causal": False}, "is_causal"),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("LlamaForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("LlamaForCausalLM", {"layer_types": 5}, "layer_types"),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "must divide num_attention_heads = 4"),
    ("LlamaForCausalLM", {"num_attention_heads": 5}, "not a multiple of num_attention_heads"),
    ("LlamaForCausalLM", {"hidden_size": None}, "hidden_size = None is needed"),
    ("LlamaForCausalLM", {"hidden_size": "64"}, "must be an integer between 1 and"),
    ("LlamaForCausalLM", {"hidden_size": True}, "must be an integer"),
    ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "must be an integer between 1 and 1024"),
    ("LlamaForCausalLM", {"rms_norm_eps": float("nan")}, "must be a finite number"),
    ("LlamaForCausalLM", {"rms_norm_eps": 10**400}, "must be a finite number"),
    ("LlamaForCausalLM", {"rope_theta": 10**400}, "rope_theta as a number above 0"),
    (
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "linear", "factor": 10**400}},
        "needs factor as a number above 0",
    ),
    ("LlamaForCausalLM", {"rms_norm_eps": "1e-6"}, "must be a number above 0"),
    ("LlamaForCausalLM", {"attention_bias": "yes"}, "must be true or false"),
    ("LlamaForCausalLM", {"torch_dtype": "int8"}, "torch_dtype = int8"),
    ("LlamaForCausalLM", {"head_dim": 15}, "an even number"),
    ("MistralForCausalLM", {"attention_bias": True}, "attention_bias"),
    ("MistralForCausalLM", {"sliding_window": 0}, "must be an integer between 1"),
    ("Qwen2ForCausalLM", {"use_qk_norm": True}, "use_qk_norm"),
    ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "sliding_window is not set"),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "each of the 4 layers"),
    ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"] * 4}, "must be a list of"),
    ("Qwen3ForCausalLM", {"num_experts": 8}, "num_experts = 8"),
    ("Qwen3MoeForCausalLM", {**EXPERTS, "num_experts_per_tok": 9}, "at most 8, the number of"),
    ("Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 1 << 15}, "an integer between 1 and 16384"),
    ("Qwen3MoeForCausalLM", {**EXPERTS, "mlp_only_layers": "all"}, "must be a list of layers"),
    ("Qwen3MoeForCausalLM", {"num_experts": 8}, "num_experts_per_tok = (absent) is needed"),
    ("MixtralForCausalLM", {"num_key_value_heads": 2}, "num_experts = (absent) is needed"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "each of the 4 layers"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, "x", 1]}, "list of integers"),
]


@pytest.mark.parametrize(("architecture", "config", "message"), QUIRKS)
def test_refused(build: Any, architecture: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        build(architecture, **config)
    assert message in caught.value.message
    assert "config.json" in caught.value.message


def test_gated_residuals_are_refused_by_name(registry: Registry) -> None:
    name = "Qwen4ExpForCausalLM"
    config = {"architectures": [name], "text_config": {"hc_count": 4}}
    with pytest.raises(UnsupportedModelError, match=f"'{name}'.* joins .* by gated residuals"):
        registry.model_for(BASE | config)
    with pytest.raises(UnsupportedModelError, match=r"known\)\. A plugin can add it"):
        registry.model_for({"architectures": [name]})


@pytest.mark.parametrize(
    "config",
    [
        {"pretraining_tp": 2},
        {"sliding_window": None},
        {"attention_dropout": 0.1},
        {"layer_types": ["full_attention"] * 4},
        {"num_experts": 1},
        {"unknown_to_us": "x"},
    ],
)
def test_accepted(build: Any, config: dict[str, Any]) -> None:
    """Values that do not change the result."""
    assert build("LlamaForCausalLM", **config).spec == build("LlamaForCausalLM").spec


def test_patterns_of_layers_may_be_of_any_kind_of_number(build: Any) -> None:
    """Published files have whole numbers; programs that rewrite them, truths or floats."""

    def made(zero: object, one: object) -> Any:
        pattern = {"hybrid_layer_pattern": [zero, one] * 2, "moe_layer_freq": [zero, one] * 2}
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        heads = {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}
        return build("MiMoV2FlashForCausalLM", **pattern, **experts, **heads)

    assert made(0, 1).spec == made(False, True).spec == made(0.0, 1.0).spec


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
KEYS = (
    *BASE, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "hidden_act", "dtype", "torch_dtype", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "no_rope_layers", "no_rope_layer_interval", "num_experts",
)  # fmt: skip
ROPE_KEYS = (
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor", "low_freq_factor",
    "high_freq_factor", "rope_theta", "partial_rotary_factor",
)  # fmt: skip
rope_values = st.dictionaries(st.sampled_from(ROPE_KEYS), st.floats() | json_values, max_size=8)


@given(
    architecture=st.sampled_from(SERVED),
    changes=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=4),
    kind=st.sampled_from(sorted(SCALINGS)),
    rope=st.none() | rope_values,
)
def test_any_config_is_served_or_refused(
    architecture: str, changes: dict[str, Any], kind: str, rope: dict[str, Any] | None
) -> None:
    config = {**BASE, "architectures": [architecture], **changes}
    if rope is not None:
        config["rope_scaling"] = {"rope_type": kind, **rope}
    try:
        model = load_registry_once().model_for(config).load()(config)
    except UnsupportedModelError:
        return
    assert model.weights()
    assert all(np.isfinite(table).all() for table in model.constants(16).values())


def windows(model: Decoder) -> list[int | None]:
    return [entry.window for entry in model.shape.kv_specs]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("deepseek-ai--DeepSeek-V3", "num_nextn_predict_layers"),
        ("zai-org--GLM-5", "num_nextn_predict_layers"),
        ("Qwen--Qwen3.5-27B", "mtp_num_hidden_layers"),
        ("XiaomiMiMo--MiMo-7B-Base", "num_nextn_predict_layers"),
    ],
)
def test_layers_of_prediction_are_passed_over_with_a_line(
    registry: Registry, name: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((COPIES / f"{name}.json").read_text())
    inner = config.get("text_config", config)
    count = inner["num_hidden_layers"]
    with caplog.at_level("INFO", "vllmx.models"):
        model = registry.model_for(config).load()(config)
    line = f"the checkpoint has layers of multi-token prediction: {inner[key]}"
    assert caplog.messages.count(line) == 1
    assert len(model.spec.layers) == count
    caplog.clear()
    inner[key] = 0
    with caplog.at_level("INFO", "vllmx.models"):
        registry.model_for(config).load()(config)
    assert "multi-token" not in caplog.text


def test_windows(build: Any) -> None:
    assert windows(build("MistralForCausalLM", num_key_value_heads=2)) == [4096] * 4
    assert (
        windows(build("MistralForCausalLM", num_key_value_heads=2, sliding_window=None))
        == [None] * 4
    )
    assert windows(build("Qwen2ForCausalLM", sliding_window=7)) == [None] * 4
    upper = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}
    assert windows(build("Qwen2ForCausalLM", **upper)) == [None, None, None, 7]
    assert windows(build("Qwen3ForCausalLM", **upper)) == [None, None, None, 7]
    smol = {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [0, 1, 1, 0]}
    assert windows(build("SmolLM3ForCausalLM", **smol)) == [7, None, None, 7]


def test_smollm3_layers_without_rotation(build: Any) -> None:
    layers = build("SmolLM3ForCausalLM").spec.layers
    assert [layer.mixer.rope is not None for layer in layers] == [True, True, True, False]
    assert layers[0].mixer.rope.theta == 2_000_000.0


def test_the_share_of_rotated_dimensions_is_not_rounded_down(build: Any) -> None:
    config = {"n_embd": 176, "n_head": 2, "n_layer": 1, "rotary_dim": 30}
    (layer,) = build("GPTJForCausalLM", **config).spec.layers
    assert layer.mixer.rope.rotary_dim == 30  # of 88: 88 * (30 / 88) is less


def test_a_table_for_each_layer_type(build: Any) -> None:
    model = build(
        "Qwen3ForCausalLM",
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_sliding_window=True,
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert [layer.mixer.rope.theta for layer in model.spec.layers] == [1e4, 1e6, 1e4, 1e6]
    tables = model.constants(32)
    assert {table.shape for table in tables.values()} == {(32, 128)}
    assert len(tables) == 2
    assert model.shape.max_model_len == 8 * 32768
