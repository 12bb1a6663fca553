"""Llama 2, 3, 3.1, 3.2, 3.3 and the many models in their layout (LlamaForCausalLM,
arXiv:2302.13971): pre-norm decoders with RMS norms, RoPE, grouped-query attention and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.norms import PRE, LayerNorms, Norm
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
    INTERLEAVED,
    MIXTRAL_TENSORS,
    GGUFArchitecture,
    decoder_config,
    mixtral_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, ModelNames

DEFAULT_POSITIONS = 2048
ATTENTION, MODULES = AttentionNames(), ModelNames()


def llama(config: Mapping[str, Any]) -> Decoder:
    """Grouped-query attention, optional biases, any RoPE scaling."""
    read = ConfigReader(config, "LlamaForCausalLM")
    read.refuse_quirks("attention_bias", "mlp_bias")
    bias = read.flag("attention_bias", False)
    biases = (bias, bias, read.flag("mlp_bias", False))
    return llama_decoder(read, positions=DEFAULT_POSITIONS, biases=biases)


def llama_decoder(
    read: ConfigReader,
    *,
    head: int | None = None,
    kv_heads: int | None = None,
    positions: int,
    theta: float = 10_000.0,
    biases: tuple[bool, bool, bool] = (False, False, False),
    eps: float = 1e-6,
    tied: bool = False,
    interleaved: bool = False,
    sliding: list[bool] | None = None,
    window: int | None = None,
    norms: LayerNorms = PRE,
    norm: Norm | None = None,
    mlp: FeedForward | None = None,
    names: AttentionNames = ATTENTION,
    modules: ModelNames = MODULES,
    rotates: bool = True,
) -> Decoder:
    """Llama's decoder; `biases` are those of q, k and v, of o, and of the MLP."""
    size = head_size(read, head)
    slides = [False] * num_layers(read) if sliding is None else sliding
    mixer = attention_mixer(
        read,
        size,
        default_kv_heads=kv_heads,
        qkv_bias=biases[0],
        o_bias=biases[1],
        interleaved=interleaved,
        names=names,
    )
    # one rotation for all layers
    whole = [False] * len(slides)
    ropes = layer_ropes(read, size, whole, default_positions=positions, default_theta=theta)
    ropes = ropes if rotates else [None] * len(slides)
    feed = dense_mlp(read, bias=biases[2]) if mlp is None else mlp
    layers = layer_specs(read, mixer, feed, ropes, slides, window, norms)
    norm = Norm(read.number("rms_norm_eps", eps)) if norm is None else norm
    spec = decoder_spec(
        read, layers, default_positions=positions, default_tied=tied, norm=norm, names=modules
    )
    return Decoder(spec)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Mistral and Mixtral share the architecture llama in files: experts identify Mixtral, a window
    Mistral."""
    config = decoder_config(header, "attention.sliding_window", "expert_count")
    if header.integer("expert_count", 0, low=0):
        window = header.integer("attention.sliding_window", 0, low=0) or None
        return config | mixtral_config(header) | {"sliding_window": window}
    if header.integer("attention.sliding_window", 0, low=0):
        window = header.integer("attention.sliding_window")
        return config | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config | {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


GGUF = GGUFArchitecture(
    "LlamaForCausalLM", {**DECODER_TENSORS, **MIXTRAL_TENSORS}, INTERLEAVED, _gguf_config
)
