"""Model types of text models inside multimodal configs, and the defaults that such configs omit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
_M = {"rope_theta": 1_000_000.0}
_GLM = {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}


def _type(*sizes: int, **others: Any) -> Mapping[str, Any]:
    """The defaults of transformers: values of `_KEYS`, and others that differ from the text
    model's own."""
    return {**dict(zip(_KEYS, sizes, strict=True)), **others}


TEXT_TYPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "cohere2": {"cohere2": _type(256000, 8192, 22528, 40, 64, 64, 8192)},
    "gemma3n_text": {"gemma3n_text": _type(262400, 2048, 16384, 35, 8, 2, 32768)},
    "glm4": {
        "glm4v_text": _type(151552, 4096, 13696, 40, 32, 2, 32768, **_GLM),
        "glm_ocr_text": _type(59392, 1024, 4096, 16, 16, 8, 131072, **_GLM, attention_bias=False),
    },
    "glm4_moe": {"glm4v_moe_text": _type(151424, 4096, 10944, 46, 96, 8, 65536)},
    "granite": {"granite": _type(32000, 4096, 11008, 32, 32, 32, 2048)},
    "lfm2": {"lfm2": _type(65536, 2560, 12288, 32, 32, 8, 128000)},
    "llama": {"llama": _type(32000, 4096, 11008, 32, 32, 32, 2048)},
    "llama4": {"llama4_text": _type(202048, 5120, 8192, 48, 40, 8, 131072)},
    "ministral3": {"ministral3": _type(131072, 4096, 14336, 34, 32, 8, 262144)},
    "mistral": {"mistral": _type(32000, 4096, 14336, 32, 32, 8, 131072)},
    "qwen2": {
        "qwen2": _type(151936, 4096, 22016, 32, 32, 32, 32768),
        "qwen2_5_omni_text": _type(152064, 3584, 18944, 28, 28, 4, 32768, **_M),
        "qwen2_vl": _type(152064, 8192, 29568, 80, 64, 8, 32768, rms_norm_eps=1e-5, **_M),
        "qwen2_vl_text": _type(152064, 8192, 29568, 80, 64, 8, 32768, rms_norm_eps=1e-5, **_M),
    },
    "qwen3": {"qwen3": _type(151936, 4096, 22016, 32, 32, 32, 32768)},
    "qwen3_moe": {"qwen3_omni_moe_text": _type(3584, 2048, 18944, 28, 28, 4, 32768, **_M)},
}
"""Model -> model types -> defaults."""
INNER_TEXTS: Mapping[str, str] = {
    "cohere2": "cohere:cohere2",
    "gemma": "gemma:gemma",
    "gemma2": "gemma:gemma2",
    "gpt_oss": "gpt_oss:gpt_oss",
    "granite": "granite:granite",
    "llama": "llama:llama",
    "ministral3": "mistral:ministral3",
    "mistral": "mistral:mistral",
    "mixtral": "mistral:mixtral",
    "phi3": "phi3:phi3",
    "qwen2": "qwen:qwen2",
    "qwen2_moe": "qwen_moe:qwen2_moe",
    "qwen3": "qwen:qwen3",
    "qwen3_moe": "qwen_moe:qwen3_moe",
}
"""Model types of texts that may be behind any tower -> their module of `families` and function."""
TEXT_ARCHITECTURES: Mapping[str, str] = {
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "ministral3",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Model types by architecture, for GGUF files whose text models get a tower of another file."""
