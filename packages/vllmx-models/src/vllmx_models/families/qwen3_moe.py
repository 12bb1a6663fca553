"""Qwen3 with experts, such as 30B-A3B and 235B-A22B (Qwen3MoeForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    rms,
    switched_window,
)
from vllmx_models.configs.moe import EXPERT_KEYS
from vllmx_models.families.qwen2 import DEFAULT_POSITIONS
from vllmx_models.families.qwen2_moe import qwen_moe, with_dense
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    EXPERT_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder


def qwen3_moe(config: Mapping[str, Any]) -> Decoder:
    """Qwen3's attention; a window, where one is wanted, is in all layers."""
    read = ConfigReader(config, "Qwen3MoeForCausalLM")
    honoured = ["attention_bias", "sliding_window", "use_sliding_window", *EXPERT_KEYS]
    if config.get("use_qk_norm") is True:  # as Qwen3-Coder's says what Qwen3 always does
        honoured.append("use_qk_norm")
    read.refuse_quirks(*honoured)
    bias = read.flag("attention_bias", False)
    mixer = attention_mixer(read, head_size(read), qk_norm=rms(read), qkv_bias=bias, o_bias=bias)
    window = switched_window(read, 4096)
    sliding = [window is not None] * num_layers(read)
    unwindowed = [False] * len(sliding)  # one rotation for all layers
    ropes = layer_ropes(read, mixer.head_size, unwindowed, default_positions=DEFAULT_POSITIONS)
    layers = layer_specs(read, mixer, qwen_moe(read), ropes, sliding, window)
    return Decoder(
        decoder_spec(read, with_dense(read, layers), default_positions=DEFAULT_POSITIONS)
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """All layers have experts, whose weights add up to one."""
    config = decoder_config(header, "expert_count") | experts_config(header)
    return config | {"norm_topk_prob": True}


GGUF = GGUFArchitecture(
    "Qwen3MoeForCausalLM",
    {**DECODER_TENSORS, **HEAD_NORM_TENSORS, **EXPERT_TENSORS},
    config=_gguf_config,
)
