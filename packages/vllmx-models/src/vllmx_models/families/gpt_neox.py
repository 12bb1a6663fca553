"""Decoders with attention and MLP in parallel: GPT-NeoX and Pythia (GPTNeoXForCausalLM,
arXiv:2204.06745), GPT-J (GPTJForCausalLM) and Falcon (FalconForCausalLM, arXiv:2311.16867)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import PARALLEL, PRE, LayerNorms
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import head_size
from vllmx_models.families.gpt2 import FROM_FILE, gpt_decoder, gpt_reader
from vllmx_models.formats.gguf.architecture import GGUFArchitecture, decoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, ModelNames

MLP = MLPNames("mlp", up="dense_h_to_4h", down="dense_4h_to_h")
NEOX = ModelNames("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out")
GPTJ = ModelNames("transformer.wte", "transformer.h", "transformer.ln_f")
FALCON = replace(GPTJ, embedding="transformer.word_embeddings")


def gpt_neox(config: Mapping[str, Any]) -> Decoder:
    """Each block has its own norm; q, k and v of a head are together in one matrix."""
    rope = {"partial_rotary_factor": config.get("rotary_pct", 0.25)}
    rope |= {"rope_theta": config.get("rotary_emb_base", 10000)}
    read = ConfigReader({"hidden_act": "gelu", **rope, **config}, "GPTNeoXForCausalLM")
    read.refuse_quirks("attention_bias", "partial_rotary_factor")
    bias = read.flag("attention_bias", True)
    return gpt_decoder(
        read,
        _packed(read, "attention"),
        NEOX,
        replace(PRE, parallel=read.flag("use_parallel_residual", True)),
        MLP,
        biases=(bias, bias, True),
    )


def gptj(config: Mapping[str, Any]) -> Decoder:
    """One norm for both blocks; neighbouring dimensions are rotated together."""
    read = gpt_reader(config, "GPTJForCausalLM")
    head = head_size(read)
    factor = read.integer("rotary_dim", 64, high=head) / head
    decoder = gpt_decoder(
        ConfigReader({**read.config, "partial_rotary_factor": factor}, "GPTJForCausalLM"),
        AttentionNames("attn", o="out_proj"),
        GPTJ,
        replace(PARALLEL, before_mixer="ln_1"),
        MLPNames(up="fc_in", down="fc_out"),
        biases=(False, False, True),
        interleaved=True,
    )
    return Decoder(replace(decoder.spec, head_bias=True))


def falcon(config: Mapping[str, Any]) -> Decoder:
    """The 7B has one key/value head and one norm; in the new form, each block has a norm, unless
    `num_ln_in_parallel_attn` is 1."""
    activation = config.get("activation", "gelu")
    read = gpt_reader({**config, "hidden_act": activation}, "FalconForCausalLM")
    new, bias = read.flag("new_decoder_architecture", False), read.flag("bias", False)
    heads = 1 if read.flag("multi_query", True) else None
    if new:
        heads = read.integer("num_kv_heads") if read.has("num_kv_heads") else None
    norms = PARALLEL if new or read.flag("parallel_attn", True) else PRE
    if new and read.integer("num_ln_in_parallel_attn", 2) == 2:
        second = "input_layernorm" if read.flag(FROM_FILE, False) else "ln_mlp"
        norms = LayerNorms("ln_attn", before_mlp=second, parallel=True)
    names = _packed(read, "self_attention")
    biases = (bias, bias, bias)
    return gpt_decoder(read, names, FALCON, norms, MLP, biases=biases, kv_heads=heads, tied=True)


def _packed(read: ConfigReader, module: str) -> AttentionNames:
    by_head = not read.flag(FROM_FILE, False)
    return AttentionNames(module, o="dense", qkv="query_key_value", by_head=by_head)


def _neox_config(header: GGUFHeader) -> dict[str, Any]:
    config = decoder_config(header, "use_parallel_residual")
    return config | {
        FROM_FILE: True,
        "hidden_act": "gelu",
        "use_parallel_residual": header.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in header.tensors,
        "rotary_pct": 1.0,
    }


def _falcon_config(header: GGUFHeader) -> dict[str, Any]:
    config = decoder_config(header)
    both = "blk.0.attn_norm_2.weight" in header.tensors
    return config | {
        FROM_FILE: True,
        "new_decoder_architecture": config["num_key_value_heads"] > 1,
        "num_ln_in_parallel_attn": 2 if both else 1,
    }


def _tensors(names: ModelNames, attention: str, norms: Mapping[str, str]) -> dict[str, str]:
    layer = f"{names.layers}.{{}}"
    return {
        "token_embd": names.embedding,
        "output_norm": names.norm,
        "output": names.head,
        **{f"blk.{{}}.{name}": f"{layer}.{module}" for name, module in norms.items()},
        "blk.{}.attn_qkv": f"{layer}.{attention}.query_key_value",
        "blk.{}.attn_output": f"{layer}.{attention}.dense",
        "blk.{}.ffn_up": f"{layer}.mlp.dense_h_to_4h",
        "blk.{}.ffn_down": f"{layer}.mlp.dense_4h_to_h",
    }


_NEOX_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NEOX_GGUF = GGUFArchitecture(
    "GPTNeoXForCausalLM", _tensors(NEOX, "attention", _NEOX_NORMS), config=_neox_config
)
_FALCON_NORMS = {"attn_norm": "input_layernorm", "attn_norm_2": "ln_attn"}
FALCON_GGUF = GGUFArchitecture(
    "FalconForCausalLM", _tensors(FALCON, "self_attention", _FALCON_NORMS), config=_falcon_config
)
