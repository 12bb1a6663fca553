"""How an architecture looks in a GGUF file.

An architecture's own file states it once, beside its config reader:

    GGUF = GGUFArchitecture("Qwen3ForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS})

and its `ModelSpec` names it (`gguf="package.module:GGUF"`, `gguf_names=("qwen3",)`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllmx_models.gguf.hyperparameters import GGUFHeader
from vllmx_models.gguf.rope import ROPE_TENSORS, rope_config

DECODER_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
"""Names of the common decoder, without ".weight" and ".bias"; {} is the layer."""
HEAD_NORM_TENSORS: Mapping[str, str] = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
INTERLEAVED: Mapping[str, Literal["heads", "kv_heads"]] = {
    "blk.{}.attn_q": "heads",
    "blk.{}.attn_k": "kv_heads",
}
"""The rows of these are stored for RoPE over neighbouring pairs, as llama.cpp rotates a "llama"."""


def decoder_config(header: GGUFHeader, *honoured: str) -> dict[str, Any]:
    """The keys of config.json that every decoder has; `honoured` as in `refuse_quirks`."""
    header.refuse_quirks(*honoured)
    hidden, heads = header.integer("embedding_length"), header.integer("attention.head_count")
    head_size = header.integer("attention.key_length", max(hidden // heads, 1))
    if header.integer("attention.value_length", head_size) != head_size:
        raise header.error("attention.value_length", f"must be the key length, {head_size}")
    return {
        "hidden_size": hidden,
        "intermediate_size": header.integer("feed_forward_length"),
        "num_hidden_layers": header.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": header.integer("context_length"),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        **rope_config(header, head_size),
    }


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """The GGUF form of one architecture."""

    architecture: str
    """Of config.json's `architectures`; `config` may name another one."""
    tensors: Mapping[str, str] = field(default_factory=lambda: DECODER_TENSORS)
    """Name in the file -> name in the original checkpoint; see `DECODER_TENSORS`."""
    interleaved: Mapping[str, Literal["heads", "kv_heads"]] = field(default_factory=dict)
    """Names in the file whose rows are brought back to the original's order, head by head."""
    config: Callable[[GGUFHeader], dict[str, Any]] = decoder_config
    """Metadata -> config.json. Vocabulary, ties, dtype and `architectures` are added to it."""
    unused: tuple[str, ...] = ROPE_TENSORS
    """Whole names of tensors that `config` reads, or nobody."""
