"""The text of multimodal classes that vllmx has no file for, over transformers' list of classes:
logits and greedy ids of tiny random models, read from the files that transformers saves."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.model import Model
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.plugins.specs import ModelSpec
from vllmx_core.plugins.text_part import TextWeights, text_config
from vllmx_core.reference.backend import ReferenceBackend, ReferenceLoadedModel
from vllmx_core.weights.part import WeightSource
from vllmx_testing.plans import Driver, Row, make_plan
from vllmx_testing.synthetic import ArraySource

REGISTRY: Registry = load_registry()
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "layer_types": ["full_attention"] * 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
}
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts")
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TEXTS: dict[str, dict[str, Any]] = {
    # the logits of transformers' outer class leave the scale out; vLLM's do not
    "cohere2": {"layer_types": None, "logit_scale": 1.0, "sliding_window": 9},
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 22, "q_lora_rank": 20, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "head_dim": None,
    },
    "glm4v_moe_text": {
        "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    },
    "glm4v_text": {"head_dim": 12, "rope_parameters": {**SECTIONS, "mrope_section": [2, 2, 2]}},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"], "head_dim": None},
    "llama4_text": {
        "num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 40,
        "attention_chunk_size": 7, "layer_types": None,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4,
        "mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 2, "layer_types": None,
        "num_hidden_layers": None,
    },
    "qwen2_vl_text": {"head_dim": 12, "rope_parameters": {**SECTIONS, "mrope_section": [2, 2, 2]}},
    "qwen3_5_text": LINEAR,
}  # fmt: skip
"""What the small config of a text model has besides."""
OUTER: dict[str, dict[str, Any]] = {"aya_vision": {"vision_config.num_attention_heads": 16}}
NOT_BUILT = {
    "blip-2": "its class runs with an image alone",
    "instructblip": "its class runs with an image alone",
    "instructblipvideo": "its class runs with a video alone",
    "fast_vlm": "needs timm",
    "fun_asr_nano": "its adaptor's size must be the text's",
    "gemma3n": "needs timm",
    "granite4_vision": "has no config by default",
    "perception_lm": "needs timm",
    "qwen3_omni_moe": "its talker has no config by default",
}
"""Classes that this test cannot make small."""
NOT_READ = {"nemo_speechlm": "saved under names that NemotronHForCausalLM does not have"}


def served() -> dict[str, str]:
    """Model type -> class, of transformers' multimodal classes whose text alone is served."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto as auto

    names = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = {**names, **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    found = {}
    for model_type, listed in names.items():
        name = listed if isinstance(listed, str) else listed[0]
        config = transformers.AutoConfig.for_model(model_type)
        text = config.get_text_config()
        outer = {"architectures": [name], "model_type": model_type}
        try:
            inner = {"text_config": {"model_type": text.model_type}}
            if text is not config and text_config(REGISTRY, {**outer, **inner}) is not None:
                found[model_type] = name
        except UnsupportedModelError:
            assert model_type == "paligemma"
    return found


def test_text_of_every_class_equals_transformers(tmp_path: Path) -> None:
    todo = sorted(served().items())
    assert len(todo) > 30
    wrong = {}
    for model_type, name in todo:
        if model_type in NOT_BUILT or model_type in NOT_READ:
            continue
        problem = _compare(model_type, name, tmp_path / model_type)
        if problem:
            wrong[model_type] = problem
    assert not wrong


def _compare(model_type: str, name: str, folder: Path) -> str:
    """Saves a small random model and reads it back; "" if its text is that of transformers."""
    import torch

    torch.set_num_threads(1)  # these matrices are too small for more
    twin = _small(model_type, name)
    twin.save_pretrained(folder)
    checkpoint = open_checkpoint(REGISTRY, folder)
    model = build_model(REGISTRY, checkpoint)
    options = LoadOptions(dtype="f32", max_model_len=64, max_num_seqs=2, num_kv_blocks=8)
    prompt = [1 + 7 * i % 59 for i in range(11)]
    with closing(checkpoint.weights), closing(_load(model, checkpoint.weights, options)) as loaded:
        ids = Driver(loaded).generate([prompt], 30)[0]
        text = [*prompt, *ids[:-1]]
        state = 1 if model.shape.states else None
        plan = make_plan([Row(text, 0, [2, 0, 1], "all", state)], options.block_size)
        found = loaded.logits(plan)
    with torch.no_grad():
        expected = getattr(twin, "thinker", twin)(torch.tensor([text])).logits[0].numpy()
    error = np.abs(found - expected).max() / np.abs(expected).max()
    if not error < 2e-5:
        return f"relative error {error:.1e}"
    wanted = expected[len(prompt) - 1 :].argmax(-1).tolist()
    return "" if ids == wanted else f"{ids} for {wanted}"


def _load(model: Model, weights: WeightSource, options: LoadOptions) -> ReferenceLoadedModel:
    return ReferenceBackend().load(model, weights, options)


def _small(model_type: str, name: str) -> Any:
    """A model of transformers with a small text model and placeholders for its other parts."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(model_type)
    old = config.get_text_config()
    text = type(old)(**_small_text(old))
    _replace(config, old, text)
    for path, value in OUTER.get(model_type, {}).items():
        holder, _, key = path.rpartition(".")
        setattr(getattr(config, holder) if holder else config, key, value)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    inner = next(
        path
        for path, module in model.named_modules()
        if getattr(module, "config", None) is text and hasattr(module, "layers")
    )
    _keep(model, inner)
    model.to_empty(device="cpu").float().eval().set_attn_implementation("eager")
    torch.manual_seed(0)
    model.init_weights()  # and tables of rotations
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    return model


def _small_text(old: Any) -> dict[str, Any]:
    known = {key: value for key, value in SMALL.items() if key not in EXPERTS or hasattr(old, key)}
    sections = "mrope_section" in (getattr(old, "rope_parameters", None) or {})
    if sections or old.model_type.startswith(("qwen2_vl", "qwen2_5", "qwen3_omni", "glm")):
        known["rope_parameters"] = SECTIONS
    known |= TEXTS.get(old.model_type, {})
    return {key: value for key, value in known.items() if value is not None or "token" in key}


def _replace(config: Any, old: Any, new: Any) -> None:
    """Puts the small text config in its place, and one layer into configs of other parts."""
    for key in getattr(config, "sub_configs", {}):
        part = getattr(config, key, None)
        if part is old:
            setattr(config, key, new)
        elif part is not None:
            _replace(part, old, new)
            for layers in ("num_hidden_layers", "depth", "num_layers", "encoder_layers"):
                if isinstance(getattr(part, layers, None), int):
                    setattr(part, layers, 1)


def _keep(module: Any, inner: str, prefix: str = "") -> None:
    """Replaces all modules by placeholders but for the text model and the head."""
    import torch

    class Gone(torch.nn.Identity):
        device, dtype = torch.device("cpu"), torch.float32

    for name, _ in list(module.named_children()):
        path = f"{prefix}{name}"
        if inner.startswith(f"{path}."):
            _keep(getattr(module, name), inner, f"{path}.")
        elif path != inner and "lm_head" not in path:
            setattr(module, name, Gone())


LLAVA: dict[str, Any] = {
    "architectures": ["VipLlavaForConditionalGeneration"],
    "model_type": "vipllava",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32064,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
    "vision_config": {"model_type": "clip_vision_model"},
}
"""As llava-1.5-7b-hf is published, under another name: the text's config omits the defaults of its
class."""


def test_defaults_of_the_text_class_fill_what_its_config_omits() -> None:
    found = text_config(REGISTRY, LLAVA)
    assert found is not None
    assert found["num_hidden_layers"] == 32
    assert found["vocab_size"] == 32064
    assert REGISTRY.model_for(found).load()(found).shape.max_model_len == 4096
    whole = LLAVA | {"architectures": ["LlavaForConditionalGeneration"]}
    shape = REGISTRY.model_for(whole).load()(whole).shape
    assert (shape.max_model_len, len(shape.caches), shape.vocab_size) == (4096, 32, 32064)


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for spec in REGISTRY.all(ModelSpec):
        for model_type, defaults in spec.text_types.items():
            if model_type == "qwen2_vl":  # the form without text_config
                continue
            config = transformers.AutoConfig.for_model(model_type)
            own = config.to_dict() | dict(config.rope_parameters)
            own = {key: _same(value) for key, value in own.items()}
            known = {key: value for key, value in defaults.items() if key in own}
            assert known == {key: own[key] for key in known}, model_type


def test_a_served_class_is_left_alone() -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}
    assert text_config(REGISTRY, config) is None


def test_a_prompt_with_attention_both_ways_is_refused() -> None:
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "text_config": {"model_type": "gemma"},
    }
    with pytest.raises(UnsupportedModelError, match="both directions"):
        text_config(REGISTRY, config)


def names(*prefixes: str) -> ArraySource:
    ends = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight")
    found = {f"{prefix}{end}": np.zeros(1, np.float32) for prefix in prefixes for end in ends}
    return ArraySource(found | {"visual.layers.0.weight": np.zeros(1, np.float32)})


def test_names_of_other_parts_are_not_seen() -> None:
    source = TextWeights(names("thinker.model.", "talker.model."))
    assert sorted(source.names()) == [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]
    assert source.part("model.embed_tokens.weight").name == "thinker.model.embed_tokens.weight"


@pytest.mark.parametrize("prefixes", [(), ("a.", "b.")])
def test_a_text_model_that_cannot_be_found_is_refused(prefixes: tuple[str, ...]) -> None:
    with pytest.raises(WeightFormatError, match="cannot be found"):
        TextWeights(names(*prefixes))


def _same(value: Any) -> Any:
    """One value of a list for each layer, if they are all the same."""
    return (
        value[0] if isinstance(value, list) and value and value == value[:1] * len(value) else value
    )
