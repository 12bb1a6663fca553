"""Gemma 3n's text model (Gemma3nForCausalLM): four streams by AltUp, LAuReL beside attention,
per-layer embeddings, sparse gates in the first layers, and last layers that read the pages of
earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from vllmx_models.blocks.altup import AltUp, LaurelMixer, SparseMLP
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.norms import LayerNorms
from vllmx_models.blocks.per_layer import PerLayerInput
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    rms,
    scaled_where_full,
    sliding_pattern,
)
from vllmx_models.configs.text import inside_images, text_config
from vllmx_models.families.gemma import HEAD_SIZE, gemma_activation
from vllmx_models.families.gemma4 import kv_owner
from vllmx_models.trunks.decoder import Decoder, LayerSpec

DEFAULT_POSITIONS = 32768
NORMS = LayerNorms(before_mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm")
"""The norm behind attention is the mixer's."""
_SPARSITY = "activation_sparsity_pattern"
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
}


def gemma3n_text(config: Mapping[str, Any]) -> Decoder:
    """Layers differ in window, width, sparsity and the owner of their pages."""
    read = ConfigReader(text_config(config, _DEFAULTS), "Gemma3nForCausalLM")
    read.refuse_quirks("attention_bias", "layer_types", "sliding_window", "final_logit_softcapping")
    if read.integer("altup_active_idx", 0, low=0) != 0:
        raise read.error("altup_active_idx", "is not known here: the first stream, 0")
    names, norm = inside_images(config), rms(read)
    model = names.embedding.removesuffix(".embed_tokens")
    sliding, activation = sliding_pattern(read, 5), gemma_activation(read)
    owners = len(sliding) - read.integer("num_kv_shared_layers", 15, low=0, high=len(sliding) - 1)
    by_type = scaled_where_full(read, 1_000_000.0, 10_000.0)
    head, bias = head_size(read, HEAD_SIZE), read.flag("attention_bias", False)
    ropes = layer_ropes(by_type, head, sliding, default_positions=DEFAULT_POSITIONS)
    window = read.integer("sliding_window", 512, high=1 << 31)
    inputs = read.integer("hidden_size_per_layer_input", 256)
    vocab = read.integer("vocab_size_per_layer_input", 262144)
    rank, feed_forwards = read.integer("laurel_rank", 64), _feed_forwards(read, len(sliding))
    layers = []
    for layer, slides in enumerate(sliding):
        mixer = attention_mixer(
            read,
            head,
            default_kv_heads=2,
            rope=ropes[layer],
            window=window if slides else None,
            scale=1.0,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=norm,
            v_norm=True,
            shared_with=kv_owner(read, sliding[:owners], slides) if layer >= owners else None,
        )
        given = {name: getattr(mixer, name) for name in mixer.__struct_fields__}
        own = PerLayerInput(
            layer, inputs, vocab, activation, norm, model, read.integer("vocab_size")
        )
        laurel = LaurelMixer(**given, rank=rank, norm=norm)
        layers.append(LayerSpec(laurel, feed_forwards[layer], NORMS, own))
    streams = read.integer("altup_num_inputs", 4, low=2, high=16)
    spec = decoder_spec(
        read,
        tuple(layers),
        default_positions=DEFAULT_POSITIONS,
        default_tied=True,
        norm=norm,
        embedding_scale=read.integer("hidden_size") ** 0.5,
        logit_softcap=read.optional("final_logit_softcapping", 30.0),
        hyper=AltUp(streams, read.flag("altup_correct_scale", True), model),
        names=names,
    )
    return Decoder(spec)


def _feed_forwards(read: ConfigReader, count: int) -> list[FeedForward]:
    """A width and a share of closed gates for each layer, or one width for all."""
    widths, activation = read.config.get("intermediate_size", 16384), gemma_activation(read)
    widths = read.integers("intermediate_size", count) if isinstance(widths, list) else None
    shares: Any = read.config.get(_SPARSITY)
    if shares is None:
        shares = [0.95] * (10 if count > 10 else 0)
        shares += [0.0] * (count - len(shares))
    known = isinstance(shares, list) and len(shares) >= count
    if not known or any(type(one) not in (int, float) or not 0 <= one < 1 for one in shares):
        raise read.error(_SPARSITY, f"must be {count} numbers from 0 to below 1")
    found: list[FeedForward] = []
    for layer in range(count):
        width = widths[layer] if widths else read.integer("intermediate_size")
        deviations = NormalDist().inv_cdf(shares[layer]) if shares[layer] else None
        if deviations is None:
            found.append(DenseMLP(width, activation))
        else:
            found.append(SparseMLP(width, activation, deviations=deviations))
    return found
