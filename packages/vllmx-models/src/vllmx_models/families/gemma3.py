"""Gemma 3 (Gemma3ForCausalLM and Gemma3ForConditionalGeneration): five layers with a window and a
rotation of their own for each one without, norms on query and key heads. The tokens of an image
see each other both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import FeatureSpec, Model

from vllmx_models.blocks.norms import SANDWICH
from vllmx_models.blocks.vit import vit_sizes
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    rms,
    scaled_where_full,
    sliding_pattern,
)
from vllmx_models.configs.text import inside_images, text_config
from vllmx_models.families.gemma import HEAD_SIZE, gemma_activation, gemma_config, query_scalar
from vllmx_models.formats.gguf.architecture import (
    HEAD_NORM_TENSORS,
    SANDWICH_TENSORS,
    GGUFArchitecture,
)
from vllmx_models.formats.gguf.encoder_models import text_modules
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.towers.siglip import GemmaTower
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, ModelNames

EMBEDDER = "gemma-embedding"
"""GGUF's name of EmbeddingGemma."""
DEFAULT_POSITIONS = 131072
DEFAULT_WINDOW = 4096
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Defaults of keys that multimodal configs omit."""


def gemma3_text(config: Mapping[str, Any]) -> Decoder:
    """The text model."""
    return gemma3(config)


def gemma3(config: Mapping[str, Any]) -> Decoder:
    """The text model, with SigLIP's vision tower if the config has one."""
    read = ConfigReader(text_config(config, _DEFAULTS), "Gemma3ForCausalLM")
    decoder = _decoder(read, inside_images(config))
    if config.get("vision_config") is None:
        return decoder
    features = FeatureSpec(1, decoder.spec.hidden_size, spans=True)
    return Decoder(replace(decoder.spec, features=features), _tower(config, features.width))


def _tower(config: Mapping[str, Any], width: int) -> GemmaTower:
    outer = ConfigReader(config, "Gemma3ForConditionalGeneration")
    sizes = vit_sizes(outer.part("vision_config"), 768, heads=12, patch=16)
    tokens, side = outer.integer("mm_tokens_per_image", 256), sizes["side"]
    tall = round(tokens**0.5)
    if tall * tall != tokens or side % tall:
        raise outer.error("mm_tokens_per_image", f"must be a square that divides {side} x {side}")
    return GemmaTower(merge=side // tall, out_size=width, **sizes)


def gemma3_embedder(config: Mapping[str, Any]) -> Model:
    """EmbeddingGemma: bidirectional attention and mean pooling."""
    read = ConfigReader(config, "Gemma3TextModel")
    both_ways = read.flag("use_bidirectional_attention", False)
    decoder = _decoder(read, ModelNames(), both_ways=both_ways)
    pooling = {"kind": "pooling", "pooling": "mean" if both_ways else "last"}
    return decoder.answering("vectors", {"modules": [pooling], **config})


def _decoder(read: ConfigReader, names: ModelNames, *, both_ways: bool = False) -> Decoder:
    """The scaling of the rotation is for layers without a window, which reaches half as far each
    way where it reaches both ways."""
    read.refuse_quirks(
        *(("use_bidirectional_attention",) if both_ways else ()),
        "attention_bias",
        "layer_types",
        "sliding_window",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    )
    bias, head = read.flag("attention_bias", False), head_size(read, HEAD_SIZE)
    sliding = sliding_pattern(read, read.integer("sliding_window_pattern", 6))
    norm = rms(read, offset=1.0)
    mixer = attention_mixer(
        read,
        head,
        default_kv_heads=4,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm,
        scale=read.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=read.optional("attn_logit_softcapping", 0),
        both_ways=both_ways,
        spans=True,
    )
    if both_ways and mixer.softcap is not None:
        raise read.error("attn_logit_softcapping", "must be null where tokens see both ways")
    mlp = dense_mlp(read, gemma_activation(read))
    by_type = scaled_where_full(read, 1_000_000.0, 10_000.0)
    ropes = layer_ropes(by_type, head, sliding, default_positions=DEFAULT_POSITIONS)
    window = read.integer("sliding_window", DEFAULT_WINDOW, high=1 << 31)
    if both_ways:
        window = window // 2 + 1
    return Decoder(
        decoder_spec(
            read,
            layer_specs(read, mixer, mlp, ropes, sliding, window, SANDWICH),
            default_positions=DEFAULT_POSITIONS,
            context=read.integer("max_position_embeddings", DEFAULT_POSITIONS),
            default_tied=True,
            norm=norm,
            embedding_scale=read.integer("hidden_size") ** 0.5,
            logit_softcap=read.optional("final_logit_softcapping", 0),
            names=names,
        )
    )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    cap = "final_logit_softcapping"
    config = gemma_config(
        header,
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        cap,
        "rope.freq_base_swa",
        *(("attention.causal",) if header.architecture == EMBEDDER else ()),
    )
    return {
        **config,
        "sliding_window": header.integer("attention.sliding_window", DEFAULT_WINDOW),
        "sliding_window_pattern": header.integer("attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": query_scalar(config, 62),
        "rope_theta": header.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": header.number("rope.freq_base_swa", 10_000.0),
        cap: header.number(cap) if header.has(cap) else None,
    }


def _embedder_config(header: GGUFHeader) -> dict[str, Any]:
    if header.flag("attention.causal", True):
        raise header.error("attention.causal", "must be false: tokens see each other both ways")
    config = {**_gguf_config(header), **text_modules(header), "use_bidirectional_attention": True}
    dense = [
        _dense(header, number) for number in (2, 3) if f"dense_{number}.weight" in header.tensors
    ]
    if dense:
        given = config.get(
            "modules", [{"kind": "pooling", "pooling": "mean"}, {"kind": "normalize"}]
        )
        config["modules"] = [*given[:-1], *dense, given[-1]]
    return config


def _dense(header: GGUFHeader, number: int) -> dict[str, Any]:
    rows, cols = header.tensors[f"dense_{number}.weight"].shape
    folder, bias = f"{number}_Dense", f"dense_{number}.bias" in header.tensors
    sizes = {"in": cols, "out": rows, "bias": bias}
    return {"kind": "dense", "folder": folder, **sizes, "activation": "identity"}


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    local = spec.mixers[0].rope
    cap = {} if spec.logit_softcap is None else {"final_logit_softcapping": spec.logit_softcap}
    return cap if local is None else {"rope.freq_base_swa": local.theta, **cap}


GGUF = GGUFArchitecture(
    "Gemma3ForCausalLM",
    {**SANDWICH_TENSORS, **HEAD_NORM_TENSORS},
    config=_gguf_config,
    norm_offset=1.0,
    states=_states,
)
EMBEDDER_GGUF = GGUFArchitecture(
    "Gemma3TextModel",
    {**GGUF.tensors, "dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"},
    config=_embedder_config,
    norm_offset=1.0,
)
