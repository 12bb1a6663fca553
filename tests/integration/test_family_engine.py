"""Families of experts, latents and windows under the scheduler: 64 greedy ids of each request are
those that it gets alone, whatever its chunks, mates, cached prefixes and preemptions are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import BackendUnavailableError
from vllmx_core.registry import load_registry

from .test_quantised_experts import write

BLOCK, CHUNK, WINDOW = 16, 32, 21
NARROW = 5
"""A window within a block."""
SMALL: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "rope_theta": 1e4, "torch_dtype": "float32",
    "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "head_dim": None,
}  # fmt: skip
BOTH = ["sliding_attention", "full_attention"]
GEMMA4 = {
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": [*BOTH, *BOTH],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "sliding_window": NARROW,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "sliding_window": WINDOW,
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 6, "n_shared_experts": 1,
        "use_qk_norm": True,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 5, "rotary_dim": 8,
    },
    "deepseek-v2": LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy",
    },
    "glm-4.7-flash": LATENT | {"architectures": ["Glm4MoeLiteForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": WINDOW},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "sliding_window": WINDOW, "num_hidden_layers": 6,
        "sliding_window_pattern": 3,
    },
    "gemma4-shared": GEMMA4 | {
        "architectures": ["Gemma4ForCausalLM"], "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 4096,
    },
    "gemma4-experts": GEMMA4 | {
        "architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
        "num_experts": 5, "top_k_experts": 2,
    },
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(10, 4000, length)]
    for seed, length in enumerate((7, 70, 1, 45))
]


@pytest.fixture(autouse=True)
def _backend() -> None:
    try:
        load_registry().choose_backend("cpu")
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def load(folder: Path, **config: Any) -> LLM:
    return LLM(
        str(folder), backend="cpu", dtype="float32", block_size=BLOCK, num_threads=1, **config
    )


def answers(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    cached = [output.num_cached_tokens for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs], cached


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_scheduler_does_changes_nothing(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", SMALL | FAMILIES[name])
    whole = {"num_kv_blocks": 64, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
    with load(folder, max_num_seqs=1, **whole) as llm:
        alone = [answers(llm, [prompt])[0][0] for prompt in PROMPTS]
        little = 14 + 4 * len(llm._engine._core.limits.windows)  # a row's, and not those of all
    assert all(len(ids) == 64 for ids in alone)
    with load(folder, max_num_seqs=4, num_kv_blocks=256, max_num_batched_tokens=CHUNK) as llm:
        assert answers(llm, PROMPTS)[0] == alone
        again, cached = answers(llm, PROMPTS)
        assert again == alone
        assert cached == [0, 64, 0, 32]
    with load(folder, max_num_seqs=4, num_kv_blocks=little, max_num_batched_tokens=CHUNK) as llm:
        assert answers(llm, PROMPTS)[0] == alone
        assert llm._engine._core.stats().num_preemptions > 0 or name == "mixtral"  # a window's few
