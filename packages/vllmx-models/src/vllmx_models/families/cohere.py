"""Command R, R+ and Aya (CohereForCausalLM); Command R7B and Command A (Cohere2ForCausalLM).

Unlike Llama, attention and MLP run in parallel on the output of one layer norm without bias, RoPE
rotates neighbouring dimensions, and logits are scaled. In Cohere2 three of four layers have a
sliding window and RoPE; the others have full attention without position embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.norms import PARALLEL, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    sliding_pattern,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec

DEFAULT_POSITIONS = 8192
DEFAULT_THETA = 500_000.0
COHERE2_WINDOW = 4096


def cohere(config: Mapping[str, Any]) -> Decoder:
    """Command R+ normalises query and key heads; every head has its own norm weight."""
    read = ConfigReader(config, "CohereForCausalLM")
    read.refuse_quirks("attention_bias", "use_qk_norm", "logit_scale")
    bias, head, norm = read.flag("attention_bias", False), head_size(read), _norm(read)
    sliding = [False] * num_layers(read)
    mixer = attention_mixer(
        read,
        head,
        qkv_bias=bias,
        o_bias=bias,
        interleaved=True,
        qk_norm=norm if read.flag("use_qk_norm", False) else None,
        norm_weights="each",
    )
    ropes = layer_ropes(
        read, head, sliding, default_positions=DEFAULT_POSITIONS, default_theta=DEFAULT_THETA
    )
    layers = layer_specs(read, mixer, dense_mlp(read), ropes, sliding, None, PARALLEL)
    return _decoder(read, layers)


def _norm(read: ConfigReader) -> Norm:
    """A layer norm without bias."""
    return Norm(read.number("layer_norm_eps", 1e-5), "layer")


def _decoder(read: ConfigReader, layers: tuple[LayerSpec, ...]) -> Decoder:
    """The decoder of both generations around `layers`."""
    return Decoder(
        decoder_spec(
            read,
            layers,
            default_positions=DEFAULT_POSITIONS,
            default_tied=True,
            norm=_norm(read),
            logit_scale=read.number("logit_scale", 0.0625),
        )
    )


_TENSORS: Mapping[str, str] = {
    name: module for name, module in DECODER_TENSORS.items() if name != "blk.{}.ffn_norm"
}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    return {
        **decoder_config(header, "logit_scale"),
        "logit_scale": header.number("logit_scale", 0.0625),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    """GGUF metadata specific to Cohere."""
    return {"logit_scale": spec.logit_scale}


GGUF = GGUFArchitecture(
    "CohereForCausalLM",
    {**_TENSORS, **HEAD_NORM_TENSORS},
    config=_gguf_config,
    states=_states,
)


def cohere2(config: Mapping[str, Any]) -> Decoder:
    """Layers with full attention have no position embedding (NoPE)."""
    read = ConfigReader(config, "Cohere2ForCausalLM")
    read.refuse_quirks("attention_bias", "layer_types", "sliding_window", "logit_scale")
    bias, head = read.flag("attention_bias", False), head_size(read)
    sliding = sliding_pattern(read, read.integer("sliding_window_pattern", 4))
    window = read.integer("sliding_window", COHERE2_WINDOW, high=1 << 31)
    mixer = attention_mixer(read, head, qkv_bias=bias, o_bias=bias, interleaved=True)
    ropes = layer_ropes(read, head, sliding, default_positions=DEFAULT_POSITIONS)
    used = [rope if slides else None for rope, slides in zip(ropes, sliding, strict=True)]
    layers = layer_specs(read, mixer, dense_mlp(read), used, sliding, window, PARALLEL)
    return _decoder(read, layers)


def _cohere2_config(header: GGUFHeader) -> dict[str, Any]:
    """Files do not say which layers have a window: always three of four."""
    return {
        **decoder_config(header, "logit_scale", "attention.sliding_window"),
        "logit_scale": header.number("logit_scale", 0.0625),
        "sliding_window": header.integer("attention.sliding_window", COHERE2_WINDOW),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


COHERE2_GGUF = GGUFArchitecture(
    "Cohere2ForCausalLM", _TENSORS, config=_cohere2_config, states=_states
)
