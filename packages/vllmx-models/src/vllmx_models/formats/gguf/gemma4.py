"""Gemma 4 in GGUF files: arrays with sizes of each layer, and partial RoPE as a divisor for each
frequency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllmx_core.errors import UnsupportedModelError

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.dense_and_experts import DenseAndExperts
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.blocks.per_layer import PerLayerInput
from vllmx_models.formats.gguf.architecture import (
    HEAD_NORM_TENSORS,
    SANDWICH_TENSORS,
    GGUFArchitecture,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.rope import FREQS
from vllmx_models.trunks.decoder import DecoderSpec

_LAYER = "model.layers.{}"
PER_LAYER_TENSORS: Mapping[str, str] = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "blk.{}.inp_gate": f"{_LAYER}.per_layer_input_gate",
    "blk.{}.proj": f"{_LAYER}.per_layer_projection",
    "blk.{}.post_norm": f"{_LAYER}.post_per_layer_input_norm",
}
"""The tensors of per-layer embeddings."""
_TENSORS: Mapping[str, str] = {
    **SANDWICH_TENSORS,
    **HEAD_NORM_TENSORS,
    **PER_LAYER_TENSORS,
    "blk.{}.layer_output_scale.weight": f"{_LAYER}.layer_scalar",
    "blk.{}.ffn_gate_inp.weight": f"{_LAYER}.router.proj.weight",
    "blk.{}.ffn_gate_inp.scale": f"{_LAYER}.router.scale",
    "blk.{}.ffn_down_exps.scale": f"{_LAYER}.router.per_expert_scale",
    "blk.{}.ffn_gate_up_exps.weight": f"{_LAYER}.experts.gate_up_proj",
    "blk.{}.ffn_down_exps.weight": f"{_LAYER}.experts.down_proj",
    "blk.{}.post_ffw_norm_1": f"{_LAYER}.post_feedforward_layernorm_1",
    "blk.{}.pre_ffw_norm_2": f"{_LAYER}.pre_feedforward_layernorm_2",
    "blk.{}.post_ffw_norm_2": f"{_LAYER}.post_feedforward_layernorm_2",
}
_KINDS = {True: "sliding_attention", False: "full_attention"}
_STILL = 1e20
"""Frequencies with a larger divisor do not rotate."""


def _config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    cap = "final_logit_softcapping"
    header.refuse_quirks(
        *honoured,
        "attention.shared_kv_layers",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "expert_count",
        cap,
    )
    count = header.integer("block_count")
    slides = header.flags("attention.sliding_window_pattern", count)
    shared = header.integer("attention.shared_kv_layers", 0, low=0, high=count)
    widths = header.integers("feed_forward_length", count)
    return {
        "hidden_size": header.integer("embedding_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": shared > 0 and widths[-1] == 2 * widths[0],
        "num_hidden_layers": count,
        "num_attention_heads": header.integer("attention.head_count"),
        "max_position_embeddings": header.integer("context_length"),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "layer_types": [_KINDS[one] for one in slides],
        "sliding_window": header.integer("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        cap: header.number(cap) if header.has(cap) else None,
        **_heads(header, slides),
        **_inputs(header),
        **_experts(header),
        "rope_parameters": _ropes(header),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id", 0),
    }


def _assistant_config(header: GGUFHeader) -> dict[str, Any]:
    """All layers of an assistant share keys and values, and it has no token embeddings by layer."""
    size = "embedding_length_out"
    config = _config(header, "nextn_predict_layers", size)
    return config | {"backbone_hidden_size": header.integer(size), "use_double_wide_mlp": False}


def _states(spec: DecoderSpec) -> Mapping[str, Any]:
    """Writes values that differ between layers as arrays, and equal ones as one number."""
    mixers = [layer.mixer for layer in spec.layers]
    heads = [mixer for mixer in mixers if isinstance(mixer, AttentionMixer)]
    slides = [mixer.window is not None for mixer in heads]
    whole, local = heads[slides.index(False)], heads[slides.index(True) if any(slides) else 0]
    inputs = spec.layers[0].extra
    cap = spec.logit_softcap
    size = inputs.size if isinstance(inputs, PerLayerInput) else 0
    return {
        "attention.head_count_kv": _one_or_all([mixer.num_kv_heads for mixer in heads]),
        "attention.key_length": whole.head_size,
        "attention.value_length": whole.head_size,
        "attention.key_length_swa": local.head_size,
        "attention.value_length_swa": local.head_size,
        "attention.shared_kv_layers": sum(mixer.shared_with is not None for mixer in heads),
        "attention.sliding_window": local.window or 0,
        "attention.sliding_window_pattern": np.array(slides),
        "embedding_length_per_layer_input": size,
        "feed_forward_length": _one_or_all([_width(layer.feed_forward) for layer in spec.layers]),
        **({} if cap is None else {"final_logit_softcapping": cap}),
        **_local_rope(local),
    }


def _local_rope(mixer: AttentionMixer) -> dict[str, Any]:
    rope = mixer.rope
    if rope is None:
        return {}
    return {"rope.freq_base_swa": float(rope.theta), "rope.dimension_count_swa": rope.rotary_dim}


def _width(feed_forward: FeedForward | None) -> int:
    dense = feed_forward.dense if isinstance(feed_forward, DenseAndExperts) else feed_forward
    return dense.intermediate_size if isinstance(dense, DenseMLP) else 0


def _one_or_all(values: list[int]) -> Any:
    """An array unless all values are equal."""
    return values[0] if len(set(values)) == 1 else np.array(values, np.uint32)


def _heads(header: GGUFHeader, slides: list[bool]) -> dict[str, Any]:
    """Heads of layers with and without a window; a layer without values uses its keys."""
    kv_heads = header.integers("attention.head_count_kv", len(slides))
    whole = slides.index(False) if False in slides else 0
    local = slides.index(True) if True in slides else whole
    return {
        "head_dim": header.integer("attention.key_length_swa"),
        "global_head_dim": header.integer("attention.key_length"),
        "num_key_value_heads": kv_heads[local],
        "num_global_key_value_heads": kv_heads[whole],
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in header.tensors,
    }


def _inputs(header: GGUFHeader) -> dict[str, Any]:
    size = header.integer("embedding_length_per_layer_input", 0, low=0)
    table = header.tensors.get("per_layer_token_embd.weight")
    rows = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": size, **rows}


def _experts(header: GGUFHeader) -> dict[str, Any]:
    if not header.integer("expert_count", 0, low=0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": header.integer("expert_count"),
        "top_k_experts": header.integer("expert_used_count"),
        "moe_intermediate_size": header.integer("expert_feed_forward_length"),
    }


def _ropes(header: GGUFHeader) -> dict[str, Any]:
    divisors = header.vector(FREQS) if FREQS in header.tensors else np.ones(1, np.float32)
    turned = int((divisors == 1).sum())
    if (divisors[:turned] != 1).any() or (divisors[turned:] < _STILL).any():
        raise UnsupportedModelError(
            f"{header.path}: {FREQS} has divisors other than 1 before those of frequencies that do"
            " not turn, which is not known of Gemma 4"
        )
    whole = {
        "rope_type": "proportional",
        "partial_rotary_factor": turned / len(divisors),
        "rope_theta": header.number("rope.freq_base", 1_000_000.0),
    }
    local = {"rope_type": "default", "rope_theta": header.number("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": whole, "sliding_attention": local}


ASSISTANT = GGUFArchitecture(
    "Gemma4AssistantForCausalLM",
    {
        **_TENSORS,
        "nextn.pre_projection": "pre_projection",
        "nextn.post_projection": "post_projection",
    },
    config=_assistant_config,
)
GGUF = GGUFArchitecture("Gemma4ForCausalLM", _TENSORS, config=_config, states=_states)
