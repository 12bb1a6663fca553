"""EXAONE 4.0 and 4.5's text (Exaone4ForCausalLM, arXiv:2507.11407) and K-EXAONE
(ExaoneMoeForCausalLM): norms on query and key heads, and, in larger models, three layers with a
window for each one without, which rotates nothing. EXAONE 4 has its norms behind the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.norms import POST, PRE, LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    sliding_layers,
)
from vllmx_models.configs.moe import EXPERT_KEYS, with_dense_layers
from vllmx_models.families.deepseek import (
    DEEPSEEK_EXPERTS,
    expert_states,
    shared_experts,
    sigmoid_router,
)
from vllmx_models.families.dots1 import deepseek_keys
from vllmx_models.families.olmo import POST_TENSORS
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
    decoder_config,
    sigmoid_experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

DEFAULT_POSITIONS = 2048
_PATTERN = "attention.sliding_window_pattern"
MOE_DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
"""The defaults of transformers for absent keys."""


def exaone4(config: Mapping[str, Any]) -> Decoder:
    """All layers rotate where none has a window."""
    read = ConfigReader(config, "Exaone4ForCausalLM")
    read.refuse_quirks("layer_types", "sliding_window")
    return Decoder(_spec(read, dense_mlp(read), POST))


def exaone_moe(config: Mapping[str, Any]) -> Decoder:
    """K-EXAONE: norms before the blocks, and DeepSeek V3's experts."""
    read = ConfigReader(deepseek_keys({**MOE_DEFAULTS, **config}), "ExaoneMoeForCausalLM")
    read.refuse_quirks("layer_types", "sliding_window", *EXPERT_KEYS)
    moe = shared_experts(read, sigmoid_router)
    moe = replace(moe, router=replace(moe.router, choice_bias="e_score_correction_bias"))
    spec = _spec(read, moe, PRE)
    return Decoder(replace(spec, layers=with_dense_layers(read, spec.layers)))


def _spec(read: ConfigReader, feed_forward: FeedForward, norms: LayerNorms) -> DecoderSpec:
    config, count, window = read.config, num_layers(read), None
    if read.has("sliding_window") or "sliding_window" not in config:
        window = read.integer("sliding_window", 4096, high=1 << 31)
    sliding = _sliding(read, count, window is not None)
    head, norm = head_size(read), Norm(read.number("rms_norm_eps", 1e-5))
    mixer = attention_mixer(read, head, qk_norm=norm)
    ropes = layer_ropes(read, head, [False] * count, default_positions=DEFAULT_POSITIONS)
    if window is not None:
        ropes = [rope if slides else None for rope, slides in zip(ropes, sliding, strict=True)]
    layers = layer_specs(read, mixer, feed_forward, ropes, sliding, window, norms)
    return decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS, norm=norm)


def _sliding(read: ConfigReader, count: int, windowed: bool) -> list[bool]:
    """`layer_types`, else a pattern such as 4 or "LLLG"."""
    pattern: Any = read.config.get("sliding_window_pattern", 4) if windowed else None
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        kinds = [pattern[layer % len(pattern)] == "L" for layer in range(count)]
    elif pattern is None or (type(pattern) is int and pattern > 0):
        kinds = [pattern is not None and (layer + 1) % pattern != 0 for layer in range(count)]
    else:
        raise read.error("sliding_window_pattern", "must be a number of layers, or L and G")
    return sliding_layers(read, kinds)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files of 64 layers have a window and may leave the pattern out."""
    return _with_window(header, decoder_config(header, "attention.sliding_window", _PATTERN))


def _moe_config(header: GGUFHeader) -> dict[str, Any]:
    found = sigmoid_experts_config(header, "attention.sliding_window", _PATTERN, renormalised=True)
    return _with_window(header, {**found, "num_shared_experts": found["n_shared_experts"]})


def _with_window(header: GGUFHeader, config: dict[str, Any]) -> dict[str, Any]:
    count, window = (
        config["num_hidden_layers"],
        header.integer("attention.sliding_window", 0, low=0),
    )
    if not window:
        return {**config, "sliding_window": None}
    found = {**config, "sliding_window": window}
    if not header.has(_PATTERN):
        return found
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        **found,
        "layer_types": [
            kinds[one] for one in header.flags(_PATTERN, header.integer("block_count"))[:count]
        ],
    }


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    mixers = [mixer for mixer in spec.mixers if isinstance(mixer, AttentionMixer)]
    slides = [mixer.window is not None for mixer in mixers]
    return {_PATTERN: np.array(slides)} if any(slides) else {}


def _moe_states(spec: DecoderSpec) -> dict[str, Any]:
    return {**_states(spec), **expert_states(spec)}


GGUF = GGUFArchitecture("Exaone4ForCausalLM", POST_TENSORS, config=_gguf_config, states=_states)
MOE_GGUF = GGUFArchitecture(
    "ExaoneMoeForCausalLM",
    {
        **DECODER_TENSORS,
        **HEAD_NORM_TENSORS,
        **DEEPSEEK_EXPERTS,
        "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.e_score_correction_bias",
    },
    config=_moe_config,
    states=_moe_states,
)
