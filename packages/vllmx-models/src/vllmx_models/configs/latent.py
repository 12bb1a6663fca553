"""Config keys of latent attention, shared by DeepSeek, GLM-5 and Kimi."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.indexer import TokenIndexer
from vllmx_models.blocks.latent import LatentMixer
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.rope import Rope, read_rope
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import decoder_spec
from vllmx_models.trunks.decoder import DecoderSpec, LayerSpec


def latent_decoder(
    read: ConfigReader, feed_forwards: tuple[FeedForward, ...], **options: Any
) -> DecoderSpec:
    """A decoder with the same latent mixer in each layer, but that with sparse attention some
    layers share the picks of an earlier indexer; `options` are `LatentMixer`'s."""
    mixer = replace(latent_mixer(read), **options)
    mixers = [mixer] * len(feed_forwards)
    if read.has("index_topk"):
        indexed = replace(mixer, indexer=token_indexer(read, mixer))
        shared = replace(mixer, shares_picks=True)
        mixers = [indexed if own else shared for own in own_indexers(read, len(feed_forwards))]
    layers = tuple(map(LayerSpec, mixers, feed_forwards))
    return decoder_spec(read, layers, default_positions=read.integer("max_position_embeddings"))


def token_indexer(read: ConfigReader, mixer: LatentMixer) -> TokenIndexer:
    """The indexer of layers that have their own."""
    if mixer.q_rank is None:
        raise read.error("q_lora_rank", "is needed: the indexer of sparse attention reads it")
    rotary = mixer.rope.rotary_dim
    size = read.integer("index_head_dim", high=4096)
    if size < rotary:
        raise read.error("index_head_dim", f"must be at least qk_rope_head_dim, {rotary}")
    return TokenIndexer(
        read.integer("index_n_heads", high=1 << 16),
        size,
        read.integer("index_topk", high=1 << 20),
        read.flag("indexer_rope_interleave", False),
    )


def own_indexers(read: ConfigReader, count: int) -> list[bool]:
    """True for each layer with its own indexer: by `indexer_types`, else by `index_topk_pattern`,
    else by `index_topk_freq` and `index_skip_topk_offset`; the others use the picks of the last
    layer before them that has one."""
    kinds, key = read.config.get("indexer_types"), "indexer_types"
    if kinds is None:
        kinds, key = read.config.get("index_topk_pattern"), "index_topk_pattern"
    if kinds is None:
        every = read.integer("index_topk_freq", 1, high=1 << 16)
        first = read.integer("index_skip_topk_offset", 2, low=0, high=1 << 16)
        return [max(layer - first + 1, 0) % every == 0 for layer in range(count)]
    known = {"full": True, "F": True, "shared": False, "S": False}
    if not isinstance(kinds, str | list) or any(kind not in known for kind in kinds):
        raise read.error(key, "must have full (F) or shared (S) for each layer")
    found = [known[kind] for kind in kinds]
    if len(found) < count or not found[0]:
        raise read.error(key, f"must have an entry for each of {count} layers, the first full")
    return found[:count]


def latent_mixer(read: ConfigReader) -> LatentMixer:
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
