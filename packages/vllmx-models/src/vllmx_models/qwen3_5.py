"""Qwen3.5 and 3.6, dense and with experts, and the text of their models with images
(Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM and the ...ForConditionalGeneration): Qwen3-Next with
projections that lie apart."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.moe import EitherExperts
from vllmx_models.blocks.recurrent import DeltaNames
from vllmx_models.config import ConfigReader
from vllmx_models.decoder import Decoder, ModelNames
from vllmx_models.decoder_config import dense_mlp, num_layers
from vllmx_models.gguf.architecture import (
    DECODER_TENSORS,
    EXPERT_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.gguf.hyperparameters import GGUFHeader
from vllmx_models.qwen3_next import DEFAULTS, HONOURED, gated_moe, qwen_hybrid
from vllmx_models.text_config import has_text_config, text_config

logger = logging.getLogger("vllmx.models")
NAMES = ModelNames(also=("model.", "model.language_model."))
"""Published files have the text beside the part for images, in a module of its own."""


def qwen3_5(config: Mapping[str, Any]) -> Decoder:
    """A dense feed-forward in each layer."""
    read = _read(config, "Qwen3_5ForCausalLM")
    return qwen_hybrid(read, [dense_mlp(read)] * num_layers(read), DeltaNames(), names=NAMES)


qwen3_5_text = qwen3_5
"""The text model alone."""


def qwen3_5_moe(config: Mapping[str, Any]) -> Decoder:
    """Experts in each layer, as one tensor or as one for each."""
    read = _read(config, "Qwen3_5MoeForCausalLM")
    moe = gated_moe(read, tensors=EitherExperts())
    return qwen_hybrid(read, [moe] * num_layers(read), DeltaNames(), names=NAMES)


qwen3_5_moe_text = qwen3_5_moe
"""The text model alone."""


def _read(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    if has_text_config(config):
        logger.info("%s: text is served, the part of the model for images is not", architecture)
    read = ConfigReader(_of_text({**DEFAULTS, **text_config(config, {})}), architecture)
    read.refuse_quirks(*HONOURED)
    if not read.flag("attn_output_gate", True):
        raise read.error("attn_output_gate", "is not known here: true")
    return read


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what the rotation says of images: the three positions of a token of text are one."""
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return config
    kept = {key: value for key, value in given.items() if not key.startswith("mrope_")}
    return {**config, "rope_parameters": kept}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Heads lie so that head h reads key head h % Hk."""
    config = decoder_config(header, "expert_count", "rope.dimension_sections")
    heads, size = header.integer("ssm.time_step_rank"), config["head_dim"]
    experts = experts_config(header) if header.has("expert_count") else {}
    return {
        **config,
        **experts,
        "partial_rotary_factor": header.integer("rope.dimension_count", size) / size,
        "full_attention_interval": header.integer("full_attention_interval", 4),
        "linear_num_value_heads": heads,
        "linear_num_key_heads": header.integer("ssm.group_count"),
        "linear_key_head_dim": header.integer("ssm.state_size"),
        "linear_value_head_dim": header.integer("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": header.integer("ssm.conv_kernel"),
        "vllmx_tiled_heads": True,
    }


_LINEAR = "model.layers.{}.linear_attn"
_SHARED = "model.layers.{}.mlp.shared_expert"
_TENSORS = {
    **{name: ours for name, ours in DECODER_TENSORS.items() if name != "blk.{}.ffn_norm"},
    **HEAD_NORM_TENSORS,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_qkv": f"{_LINEAR}.in_proj_qkv",
    "blk.{}.attn_gate": f"{_LINEAR}.in_proj_z",
    "blk.{}.ssm_alpha": f"{_LINEAR}.in_proj_a",
    "blk.{}.ssm_beta": f"{_LINEAR}.in_proj_b",
    "blk.{}.ssm_conv1d": f"{_LINEAR}.conv1d",
    "blk.{}.ssm_a": f"{_LINEAR}.A_log",
    "blk.{}.ssm_dt.bias": f"{_LINEAR}.dt_bias",
    "blk.{}.ssm_norm": f"{_LINEAR}.norm",
    "blk.{}.ssm_out": f"{_LINEAR}.out_proj",
}
GGUF = GGUFArchitecture(
    "Qwen3_5ForCausalLM",
    _TENSORS,
    config=_gguf_config,
    norm_offset=1.0,
    plain_norms=("blk.{}.ssm_norm",),
    decays=("blk.{}.ssm_a",),
)
GGUF_MOE = replace(
    GGUF,
    architecture="Qwen3_5MoeForCausalLM",
    tensors={
        **_TENSORS,
        **EXPERT_TENSORS,
        "blk.{}.ffn_gate_inp_shexp": f"{_SHARED}_gate",
        "blk.{}.ffn_gate_shexp": f"{_SHARED}.gate_proj",
        "blk.{}.ffn_up_shexp": f"{_SHARED}.up_proj",
        "blk.{}.ffn_down_shexp": f"{_SHARED}.down_proj",
    },
    config=_gguf_config,
)
