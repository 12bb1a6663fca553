"""Command R and R+, Aya (CohereForCausalLM): attention and MLP side by side, behind one norm."""

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


def cohere(config: Mapping[str, Any]) -> Decoder:
    """Command R+ norms query and key heads, each by a weight of its own."""
    read = ConfigReader(config, "CohereForCausalLM")
    read.refuse_quirks("attention_bias", "use_qk_norm", "logit_scale")
    bias, head, norm = read.flag("attention_bias", False), head_size(read), cohere_norm(read)
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
    return cohere_decoder(read, layers)


def cohere_norm(read: ConfigReader) -> Norm:
    """A layer norm without a bias."""
    return Norm(read.number("layer_norm_eps", 1e-5), "layer")


def cohere_decoder(read: ConfigReader, layers: tuple[LayerSpec, ...]) -> Decoder:
    """What both generations share around their layers."""
    return Decoder(
        decoder_spec(
            read,
            layers,
            default_positions=DEFAULT_POSITIONS,
            default_tied=True,
            norm=cohere_norm(read),
            logit_scale=read.number("logit_scale", 0.0625),
        )
    )


COHERE_TENSORS: Mapping[str, str] = {
    name: module for name, module in DECODER_TENSORS.items() if name != "blk.{}.ffn_norm"
}


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    return {
        **decoder_config(header, "logit_scale"),
        "logit_scale": header.number("logit_scale", 0.0625),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def cohere_states(spec: DecoderSpec) -> Mapping[str, Any]:
    """The metadata that only these architectures have."""
    return {"logit_scale": spec.logit_scale}


GGUF = GGUFArchitecture(
    "CohereForCausalLM",
    {**COHERE_TENSORS, **HEAD_NORM_TENSORS},
    config=_gguf_config,
    states=cohere_states,
)
