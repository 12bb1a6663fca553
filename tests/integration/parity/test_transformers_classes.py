"""transformers' causal classes by `--model-impl transformers`: which give the greedy ids of the
class alone, from tiny random checkpoints, and why the others do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.plugins.specs import BackendSpec

from .conftest import registry
from .test_model_impl import PROMPTS, Saved, generate, open_llm, save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if registry().find(BackendSpec, "torch") is None:
    pytest.skip("vllmx-torch is not installed", allow_module_level=True)
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES,
)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "n_words": 61,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "n_embed": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "dim": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_inner": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dff": 64,
    "feed_forward_size": 64,
    "dim_ff": 64,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 64,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "dim_head": 8,
    "rotary_dim": 4,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "seq_length": 128,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 11,
    "is_decoder": True,
    "layer_types": None,
    "mlp_layer_types": None,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_d_ssm": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
HYBRID = ["linear_attention", "full_attention"] * 2
LONG = {"max_position_embeddings": 128}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "layer_group_size": 2,
        "model_max_length": 128,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_expert_group": 1,
        "num_experts_per_token": 2,
        "max_position_embeddings": 128,
    },
    "bloom": {"seq_length": 128},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "cpmant": LONG,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "layer_types": HYBRID,
        "num_key_value_heads": 4,
        "shared_intermediate_size": 16,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "head_dim": 16,
        "num_key_value_heads": 4,
        "shared_experts_intermediate_size": 16,
        "per_layer_config": {},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "per_layer_config": {},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 11},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        "layer_types": HYBRID,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts_per_token": 2,
        **LONG,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "hc_count": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "ple_embed_dim": 32,
    },
    "recurrent_gemma": {
        "num_attention_heads": 4,
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "attention_window_size": 11,
        **LONG,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "hash_seed": 0},
    "whisper": {"max_target_positions": 128},
    "xlnet": LONG,
    "xlstm": {"num_blocks": 4, "num_heads": 4, "qk_dim_factor": 1.0, "embedding_dim": 32, **LONG},
    "youtu": {"pad_token_id": None},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "hybrid_layer_ids": [1, 3],
        "adapter_rank": 8,
        "kv_channels": 8,
        "num_query_groups": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
SEEDS = {
    "laguna": 1,
    "olmo": 1,
    "camembert": 1,
    "roberta-prelayernorm": 1,
    "xlm-roberta": 1,
    "xlm-roberta-xl": 1,
}


def sizes_of(kind: str) -> dict[str, Any]:
    known = transformers.AutoConfig.for_model(kind).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = 4
    for key, value in known.items():
        if isinstance(value, dict) and "model_type" in value and key != "text_config":
            sizes[key] = {one: SIZES[one] for one in value if one in SIZES} | {
                "model_type": value["model_type"]
            }
        if key == "text_config":
            sizes[key] = sizes_of(value["model_type"]) | {"model_type": value["model_type"]}
    return sizes | OWN.get(kind, {})


def tiny(kind: str) -> Any:
    return transformers.AutoConfig.for_model(kind, **sizes_of(kind))


def saved(kind: str, folder: Path) -> Saved:
    config = tiny(kind)
    made = save_model(config, folder / "model", SEEDS.get(kind, 0))
    config.architectures = made.oracle.config.architectures
    config.save_pretrained(folder / "model")  # a whole config, where the model took its text part
    return made


NOT_BUILT = {
    "blt": "its tables of bytes are 96 million numbers",
    "dots3_note": "the layers of its defaults do not fit a tiny model; dots3_note_text runs",
    "gemma3n": "needs timm, for images; gemma3n_text runs",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model",
    "musicgen": "writes several codebooks of audio",
    "musicgen_melody": "writes several codebooks of audio",
    "xlnet": "has no position limit, and its config refuses one",
    "xlstm": "transformers' own code fails on tiny heads",
}
"""Types that are not tried, and why."""
REFUSED = {
    "cpmant": "does not continue a prompt",
    "prophetnet": "does not continue a prompt",
    "xlm": "looks forward as well as back",
}
"""Types that a load refuses, and the words by which it does."""
SAMPLE = (
    "bart", "bert", "deepseek_v2", "deepseek_v4", "falcon_h1", "gemma3", "gpt_oss", "hy_v4",
    "llama4", "mpt", "openai-gpt", "qwen2_moe", "qwen3_5", "roberta", "rwkv", "zamba2",
)  # fmt: skip
"""The types that run in the suite; `nox -s classes` runs all others too."""
EVERY = [kind for kind in CLASSES if kind not in NOT_BUILT | REFUSED]


@pytest.mark.parametrize("kind", EVERY if os.environ.get("VLLMX_EVERY_CLASS") else SAMPLE)
def test_greedy_ids(kind: str, tmp_path: Path) -> None:
    oracle = saved(kind, tmp_path)
    with open_llm(oracle, num_kv_blocks=256, max_num_seqs=3) as llm:
        found, _ = generate(llm, 20)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        assert len(ids) == 20
        oracle.check_greedy(prompt, ids)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]):
        open_llm(saved(kind, tmp_path), num_kv_blocks=256)
