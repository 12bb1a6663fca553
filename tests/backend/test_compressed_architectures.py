"""The conformance suite on architectures with compressed attention and hyper-connections."""

from __future__ import annotations

from typing import Any

import numpy as np

from .served_models import SMALL, Served


class TestDeepseekV4(Served):
    """Layers of each kind, more entries than are picked, and windows that block size, chunks and
    each other do not divide. Many heads of the indexer: of few heads all scores of several entries
    are often 0, and then transformers picks any of them."""

    config = SMALL | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["moe", "hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "head_dim": 24,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 20,
        "o_groups": 2,
        "o_lora_rank": 12,
        "sliding_window": 7,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "index_topk": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "intermediate_size": 20,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 3,
        "swiglu_limit": 0.7,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    bad_configs = (
        {"num_key_value_heads": 2},
        {"o_groups": 3},
        {"layer_types": ["full_attention"] * 3},
        {"compress_ratios": [4, 128, 8], "layer_types": None},
        {"hidden_act": "gelu"},
        {"norm_topk_prob": False},
        {"scoring_func": "relu"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 0}},
    )

    def transformers_model(self) -> Any:
        model = super().transformers_model()
        random = np.random.default_rng(0)
        for name, buffer in model.named_buffers():  # parts of the checkpoint, which start at zero
            shape = tuple(buffer.shape)
            if name.endswith("tid2eid"):
                buffer.copy_(buffer.new_tensor(random.integers(0, 6, shape)))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(buffer.new_tensor(0.3 * random.standard_normal(shape)))
        return model
