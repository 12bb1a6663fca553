"""ModernBERT (ModernBertModel and its classifier): pre-norm, RoPE, and a window in two of three
layers (arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from vllmx_core.ops.pool import PoolKind

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    dense_mlp,
    head_size,
    layer_ropes,
    num_layers,
    sliding_layers,
)
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.encoder_models import encoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import LayerSpec
from vllmx_models.trunks.encoder import Encoder, EncoderNames, EncoderSpec, embedder
from vllmx_models.trunks.pooling_heads import ClassHead, num_labels

DEFAULT_POSITIONS = 8192
GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0
_NAMES = EncoderNames(
    words="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layers="layers",
    norm="final_norm",
    prefixes=("model.",),
)
_NORMS = LayerNorms("attn_norm", None, "mlp_norm", None)


def modernbert_classifier(config: Mapping[str, Any]) -> Encoder:
    """A classifier on the first token or the mean of all."""
    read = ConfigReader(config, "ModernBertForSequenceClassification")
    spec, kind = _spec(read), config.get("classifier_pooling") or "cls"
    if kind not in ("cls", "mean"):
        raise read.error("classifier_pooling", "must be cls or mean")
    head = ClassHead(
        num_labels(read),
        "head.dense",
        "classifier",
        cast("PoolKind", kind),
        read.activation("classifier_activation", "gelu"),
        dense_bias=read.flag("classifier_bias", False),
        norm=spec.norm,
        norm_name="head.norm",
    )
    return Encoder(spec, head)


def _spec(read: ConfigReader) -> EncoderSpec:
    read.refuse_quirks("attention_bias", "mlp_bias", "layer_types", "position_embedding_type")
    positions = read.integer("max_position_embeddings", DEFAULT_POSITIONS)
    every = read.integer("global_attn_every_n_layers", 3)
    sliding = sliding_layers(read, [layer % every != 0 for layer in range(num_layers(read))])
    bias, size = read.flag("attention_bias", False), head_size(read)
    mixer = attention_mixer(
        read,
        size,
        qkv_bias=bias,
        o_bias=bias,
        both_ways=True,
        names=AttentionNames("attn", qkv="Wqkv", o="Wo"),
    )
    mlp = dense_mlp(
        read,
        read.activation("hidden_activation", "gelu"),
        bias=read.flag("mlp_bias", False),
        names=MLPNames("mlp", gate_up="Wi", down="Wo"),
    )
    window = read.integer("local_attention", 128) // 2 + 1
    ropes = layer_ropes(_by_type(read), size, sliding, default_positions=positions)
    layers = [
        LayerSpec(replace(mixer, rope=rope, window=window if slides else None), mlp, _NORMS)
        for rope, slides in zip(ropes, sliding, strict=True)
    ]
    layers[0] = replace(layers[0], norms=replace(_NORMS, before_mixer=None))
    return EncoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        layers=tuple(layers),
        max_model_len=positions,
        dtype=read.dtype(),
        norm=Norm(read.number("norm_eps", 1e-5), "layer", bias=read.flag("norm_bias", False)),
        names=_NAMES,
    )


def _by_type(read: ConfigReader) -> ConfigReader:
    """Returns a config with one RoPE for each layer type, the current form."""
    given = read.config.get("rope_parameters")
    if isinstance(given, Mapping) and given:
        return read
    by_type = {
        "full_attention": {"rope_theta": read.number("global_rope_theta", GLOBAL_THETA)},
        "sliding_attention": {"rope_theta": read.number("local_rope_theta", LOCAL_THETA)},
    }
    return ConfigReader({**read.config, "rope_parameters": by_type}, read.architecture)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    window = "attention.sliding_window"
    return {
        **encoder_config(header, window, f"{window}_pattern", "rope.freq_base_swa"),
        "local_attention": header.integer(window),
        "global_attn_every_n_layers": header.integer(f"{window}_pattern", 3),
        "global_rope_theta": header.number("rope.freq_base", GLOBAL_THETA),
        "local_rope_theta": header.number("rope.freq_base_swa", LOCAL_THETA),
        "norm_bias": "output_norm.bias" in header.tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


modernbert = embedder(_spec, "ModernBert")
GGUF = GGUFArchitecture(
    "ModernBertModel",
    {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "blk.{}.attn_norm": "layers.{}.attn_norm",
        "blk.{}.attn_qkv": "layers.{}.attn.Wqkv",
        "blk.{}.attn_output": "layers.{}.attn.Wo",
        "blk.{}.ffn_norm": "layers.{}.mlp_norm",
        "blk.{}.ffn_up": "layers.{}.mlp.Wi",
        "blk.{}.ffn_down": "layers.{}.mlp.Wo",
        "output_norm": "final_norm",
    },
    config=_gguf_config,
)
