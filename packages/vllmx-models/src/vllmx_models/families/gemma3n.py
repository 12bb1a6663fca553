"""Gemma 3n's text model (Gemma3nForCausalLM): four streams by AltUp, LAuReL next to attention,
per-layer embeddings, sparse gates in the first layers, and last layers that read the pages of
earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

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
from vllmx_models.families.gemma import HEAD_SIZE, gemma_activation, gemma_config
from vllmx_models.families.gemma4 import kv_owner
from vllmx_models.formats.gguf.architecture import (
    HEAD_NORM_TENSORS,
    SANDWICH_TENSORS,
    GGUFArchitecture,
)
from vllmx_models.formats.gguf.gemma4 import PER_LAYER_TENSORS
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, LayerSpec

DEFAULT_POSITIONS = 32768
NORMS = LayerNorms(before_mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm")
"""The norm behind attention is the mixer's."""
_SPARSITY = "activation_sparsity_pattern"


def gemma3n_text(config: Mapping[str, Any]) -> Decoder:
    """Layers differ in window, width, sparsity and the owner of their pages."""
    read = ConfigReader(config, "Gemma3nForCausalLM")
    read.refuse_quirks("attention_bias", "layer_types", "sliding_window", "final_logit_softcapping")
    if read.integer("altup_active_idx", 0, low=0) != 0:
        raise read.error("altup_active_idx", "is not known here: the first stream, 0")
    norm, sliding, activation = rms(read), sliding_pattern(read, 5), gemma_activation(read)
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
        ids = read.integer("vocab_size")
        own = PerLayerInput(layer, inputs, vocab, activation, norm, ids=ids)
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
        hyper=AltUp(streams, read.flag("altup_correct_scale", True)),
    )
    return Decoder(spec)


def _feed_forwards(read: ConfigReader, count: int) -> list[FeedForward]:
    """A width and a share of closed gates for each layer, or one width for all."""
    activation, shares = gemma_activation(read), read.config.get(_SPARSITY)
    if isinstance(read.config.get("intermediate_size"), list):
        widths = read.integers("intermediate_size", count)
    else:
        widths = [read.integer("intermediate_size")] * count
    if shares is None:
        shares = [0.95 if count > 10 and layer < 10 else 0.0 for layer in range(count)]
    known = isinstance(shares, list) and len(shares) >= count
    if not known or any(type(one) not in (int, float) or not 0 <= one < 1 for one in shares):
        raise read.error(_SPARSITY, f"must be {count} numbers from 0 to below 1")
    return [
        SparseMLP(width, activation, deviations=NormalDist().inv_cdf(share))
        if share
        else DenseMLP(width, activation)
        for width, share in zip(widths, shares, strict=False)
    ]


_KINDS = {True: "sliding_attention", False: "full_attention"}
_SHARED, _WIDTHS, _DEVIATIONS = (
    "attention.shared_kv_layers", "feed_forward_length", "activation_sparsity_scale",
)  # fmt: skip


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files have the cutoffs of sparse gates in standard deviations, -inf where gates are dense."""
    name, count, given = header.architecture, header.integer("block_count"), dict(header.metadata)
    shared = given.get(f"{name}.{_SHARED}")
    if isinstance(shared, float) and shared.is_integer():  # as the first converters wrote it
        given[f"{name}.{_SHARED}"] = int(shared)
    header = replace(header, metadata=given)
    widths = header.integers(_WIDTHS, count)
    alike = replace(header, metadata={**given, f"{name}.{_WIDTHS}": widths[0]})
    cap, slides = "final_logit_softcapping", "attention.sliding_window_pattern"
    others = ("altup.num_inputs", "attention.sliding_window", "rope.freq_base_swa")
    config = gemma_config(alike, *others, _SHARED, slides, cap)
    cutoffs = given.get(f"{name}.{_DEVIATIONS}")
    if not isinstance(cutoffs, np.ndarray) or len(cutoffs) != count or cutoffs.dtype.kind != "f":
        raise header.error(_DEVIATIONS, f"must be {count} numbers")
    table = header.tensors.get("per_layer_token_embd.weight")
    return config | {
        "intermediate_size": widths,
        "layer_types": [_KINDS[one] for one in header.flags(slides, count)],
        "sliding_window": header.integer("attention.sliding_window"),
        "num_kv_shared_layers": header.integer(_SHARED, 0, low=0, high=count - 1),
        "rope_local_base_freq": header.number("rope.freq_base_swa", 10_000.0),
        "hidden_size_per_layer_input": header.integer("embedding_length_per_layer_input"),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        "altup_num_inputs": header.integer("altup.num_inputs"),
        "altup_active_idx": header.integer("altup.active_idx", 0, low=0),
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in header.tensors,
        "laurel_rank": _rank(header),
        cap: header.number(cap) if header.has(cap) else 30.0,
        _SPARSITY: [round(NormalDist().cdf(float(one)), 6) for one in cutoffs],
    }


def _rank(header: GGUFHeader) -> int:
    found = header.tensors.get("blk.0.laurel_l.weight")
    return 64 if found is None else found.shape[0]


_LAYER = "model.layers.{}"
GGUF = GGUFArchitecture(
    "Gemma3nForCausalLM",
    {
        **SANDWICH_TENSORS,
        **HEAD_NORM_TENSORS,
        **PER_LAYER_TENSORS,
        "altup_proj.weight": "model.altup_projections",
        "altup_unembd_proj.weight": "model.altup_unembed_projections",
        "blk.{}.altup_correct_coef": f"{_LAYER}.altup.correction_coefs",
        "blk.{}.altup_correct_scale.weight": f"{_LAYER}.altup.correct_output_scale",
        "blk.{}.altup_predict_coef": f"{_LAYER}.altup.prediction_coefs",
        "blk.{}.altup_router": f"{_LAYER}.altup.modality_router",
        "blk.{}.altup_router_norm": f"{_LAYER}.altup.router_norm",
        "blk.{}.laurel_l": f"{_LAYER}.laurel.linear_left",
        "blk.{}.laurel_r": f"{_LAYER}.laurel.linear_right",
        "blk.{}.laurel_post_norm": f"{_LAYER}.laurel.post_laurel_norm",
    },
    config=_gguf_config,
)
