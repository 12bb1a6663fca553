"""Config keys of latent attention, shared by DeepSeek, GLM-5 and Kimi."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from vllmx_models.blocks.latent import LatentMixer
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.rope import Rope, read_rope
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import decoder_spec
from vllmx_models.trunks.decoder import DecoderSpec, LayerSpec

logger = logging.getLogger("vllmx.models")


def latent_decoder(read: ConfigReader, feed_forwards: tuple[FeedForward, ...]) -> DecoderSpec:
    """A decoder with the same latent mixer in each layer.

    Sparse attention picks `index_topk` tokens for each query. Up to that context length it equals
    full attention, so the maximum context is limited to it."""
    mixer = latent_mixer(read)
    layers = tuple(LayerSpec(mixer, feed_forward) for feed_forward in feed_forwards)
    spec = decoder_spec(read, layers, default_positions=read.integer("max_position_embeddings"))
    if not read.has("index_topk"):
        return spec
    picked = read.integer("index_topk", high=1 << 31)
    logger.info(
        "%s: sparse attention is served to %d tokens, up to which it reads all of them",
        read.architecture,
        picked,
    )
    return replace(spec, max_model_len=min(spec.max_model_len, picked))


def latent_mixer(read: ConfigReader) -> LatentMixer:
    """The mixer of all layers."""
    heads = read.integer("num_attention_heads", high=1 << 16)
    if read.integer("num_key_value_heads", heads, high=1 << 16) != heads:
        raise read.error("num_key_value_heads", f"must be num_attention_heads, {heads}")
    nope = read.integer("qk_nope_head_dim", high=4096)
    rotary = read.integer("qk_rope_head_dim", high=4096)
    positions = read.integer("max_position_embeddings")
    rope = read_rope(read.config, rotary, max_positions=positions)
    assert rope is not None
    return LatentMixer(
        num_heads=heads,
        rank=read.integer("kv_lora_rank", high=1 << 16),
        nope_size=nope,
        value_size=read.integer("v_head_dim", high=4096),
        rope=rope,
        scale=(nope + rotary) ** -0.5 * softmax_warmth(rope) ** 2,
        q_rank=read.integer("q_lora_rank") if read.has("q_lora_rank") else None,
        interleaved=read.flag("rope_interleave", True),
        bias=read.flag("attention_bias", False),
        cut_heads=read.flag("vllmx_cut_heads", False),
    )


def softmax_warmth(rope: Rope) -> float:
    """YaRN's factor of queries and of keys (`mscale_all_dim`), in addition to the factor in the
    RoPE table."""
    if rope.kind == "default" or not rope.options.get("mscale_all_dim"):
        return 1.0
    factor = rope.number("factor")
    return 1.0 if factor <= 1 else 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0
