"""Families of experts, latents, windows and norms of their own under the scheduler: 64 greedy ids
of each request are those of transformers, whatever its chunks, mates, cached prefixes and
preemptions are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, SamplingParams

from tests.usable_backends import backend_spec

from .test_quantised_experts import write

BLOCK, CHUNK, WINDOW = 16, 32, 21
NARROW = 5
"""A window within a block."""
ONE_WINDOW = ("mixtral", "phi3", "phi-moe")
"""Families all of whose layers have it: a row's blocks are few."""
SMALL: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "rope_theta": 1e4, "torch_dtype": "float32",
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "pad_token_id": 0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "head_dim": None,
}  # fmt: skip
INDEXED = LATENT | {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 32}
BOTH = ["sliding_attention", "full_attention"]
ROTATION = {"rope_type": "default", "rope_theta": 1e4}
HALF = {"rope_theta": None, "rope_parameters": ROTATION | {"partial_rotary_factor": 0.5}}
EXPERTS = {"num_experts": 5}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
GEMMA4 = {
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": [*BOTH, *BOTH],
}
GPT2: dict[str, Any] = {
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 256,
    "head_dim": None,
    "num_key_value_heads": None,
    "intermediate_size": None,
}
"""Sizes by GPT-2's names of keys; heads are equal."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2-moe": EXPERTS | {
        "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 20,
    },
    "qwen3-moe": EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]},
    "olmoe": EXPERTS | {"architectures": ["OlmoeForCausalLM"], "head_dim": None},
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
    "mimo-v2-flash": {
        "architectures": ["MiMoV2FlashForCausalLM"], "num_hidden_layers": 4, "head_dim": 16,
        "v_head_dim": 8, "sliding_window": WINDOW, "n_routed_experts": 6, "rope_theta": None,
        "partial_rotary_factor": 0.5, "layer_types": [*BOTH, *BOTH], "rope_parameters":
            dict.fromkeys(BOTH, ROTATION | {"partial_rotary_factor": 0.5}),
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 5, "rotary_dim": 8,
    },
    "deepseek-v2": LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy",
    },
    "deepseek-v3": LATENT | {"architectures": ["DeepseekV3ForCausalLM"]},
    "deepseek-v3.2": INDEXED | {"architectures": ["DeepseekV32ForCausalLM"]},
    "glm-4.7-flash": LATENT | {"architectures": ["Glm4MoeLiteForCausalLM"]},
    "glm-5": INDEXED | {"architectures": ["GlmMoeDsaForCausalLM"]},
    "gemma": {"architectures": ["GemmaForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": WINDOW},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "sliding_window": WINDOW, "num_hidden_layers": 6,
        "sliding_window_pattern": 3,
    },
    "gemma3n": {
        "architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": [*BOTH, *BOTH], "sliding_window": WINDOW, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.7, 0.5, 0.0, 0.0], "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 3000, "altup_num_inputs": 3, "rope_theta": None,
        "rope_parameters": dict.fromkeys(BOTH, ROTATION),
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
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "head_dim": None, "sliding_window": WINDOW,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "head_dim": None},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"], "head_dim": None, "sliding_window": WINDOW,
        "layer_types": [*BOTH, "sliding_attention"], "rope_theta": None,
        "rope_parameters": dict.fromkeys(BOTH, ROTATION),
    },
    "granite": MULTIPLIERS | {"architectures": ["GraniteForCausalLM"], "head_dim": None},
    "granite-moe": MULTIPLIERS | {
        "architectures": ["GraniteMoeForCausalLM"], "head_dim": None, "num_local_experts": 5,
    },
    "cohere": {"architectures": ["CohereForCausalLM"], "head_dim": None, "use_qk_norm": True},
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"], "sliding_window": WINDOW, "num_hidden_layers": 4,
    },
    "stablelm": HALF | {
        "architectures": ["StableLmForCausalLM"], "head_dim": None, "qk_layernorm": True,
        "use_parallel_residual": True,
    },
    "glm4": {"architectures": ["Glm4ForCausalLM"]},
    "gpt2": GPT2 | {"architectures": ["GPT2LMHeadModel"]},
    "opt": GPT2 | {"architectures": ["OPTForCausalLM"], "ffn_dim": 64, "word_embed_proj_dim": 48},
    "gpt-neo": GPT2 | {
        "architectures": ["GPTNeoForCausalLM"], "num_heads": 4, "num_layers": 3,
        "window_size": WINDOW, "attention_types": [[["global", "local"], 1], [["local"], 1]],
        "attention_layers": ["global", "local", "local"],
    },
    "gpt-neox": GPT2 | HALF | {"architectures": ["GPTNeoXForCausalLM"], "intermediate_size": 64},
    "gptj": GPT2 | {"architectures": ["GPTJForCausalLM"], "rotary_dim": 8},
    "falcon": GPT2 | {"architectures": ["FalconForCausalLM"]},
    "phi-moe": {
        "architectures": ["PhimoeForCausalLM"], "head_dim": None, "num_local_experts": 5,
        "router_jitter_noise": 0.3, "sliding_window": WINDOW,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64, "num_hidden_layers": 4,
        "attention_chunk_size": WINDOW, "floor_scale": 9, "attn_scale": 0.7,
    },
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(10, 4000, length)]
    for seed, length in enumerate((7, 70, 1, 45))
]


@pytest.fixture(autouse=True)
def _backend() -> None:
    backend_spec("cpu")


def load(folder: Path, **config: Any) -> LLM:
    return LLM(
        str(folder), backend="cpu", dtype="float32", block_size=BLOCK, num_threads=1, **config
    )


def answers(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    cached = [output.num_cached_tokens for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs], cached


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    given = SMALL | FAMILIES[request.param]
    config = {key: value for key, value in given.items() if value is not None}
    return request.param, write(tmp_path_factory.mktemp(request.param) / "m", config)


@pytest.fixture(scope="module")
def alone(family: tuple[str, Path]) -> list[list[int]]:
    """What each prompt gives on its own, computed as a whole."""
    whole = {"num_kv_blocks": 64, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
    with load(family[1], max_num_seqs=1, **whole) as llm:
        return [answers(llm, [prompt])[0][0] for prompt in PROMPTS]


def test_what_the_scheduler_does_changes_nothing(
    family: tuple[str, Path], alone: list[list[int]]
) -> None:
    name, folder = family
    assert all(len(ids) == 64 for ids in alone)
    with load(folder, max_num_seqs=4, num_kv_blocks=256, max_num_batched_tokens=CHUNK) as llm:
        assert answers(llm, PROMPTS)[0] == alone
        again, cached = answers(llm, PROMPTS)
        assert again == alone
        assert cached == [0, 64, 0, 32]
        little = 14 + 4 * len(llm._engine._core.limits.windows)  # a row's, and not those of all
    for chunk in (1, 7):
        whole = {"num_kv_blocks": 256, "max_num_batched_tokens": chunk}
        with load(folder, max_num_seqs=4, enable_prefix_caching=False, **whole) as llm:
            assert answers(llm, PROMPTS)[0] == alone
    with load(folder, max_num_seqs=4, num_kv_blocks=little, max_num_batched_tokens=CHUNK) as llm:
        assert answers(llm, PROMPTS)[0] == alone
        assert llm._engine._core.stats().num_preemptions > 0 or name in ONE_WINDOW


def test_transformers_takes_the_same_ids(family: tuple[str, Path], alone: list[list[int]]) -> None:
    """After each prompt and what was answered so far, wherever no other id is as near."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    (architecture,) = FAMILIES[family[0]]["architectures"]
    twin = getattr(transformers, architecture).from_pretrained(
        family[1], dtype=torch.float32, attn_implementation="eager"
    )
    checked = 0
    for prompt, ids in zip(PROMPTS, alone, strict=True):
        with torch.no_grad():
            logits = twin(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :].numpy()
        best = np.sort(logits, axis=-1)
        clear = best[:, -1] - best[:, -2] > 1e-4 * np.abs(logits).max()
        np.testing.assert_array_equal(logits.argmax(-1)[clear], np.array(ids)[clear])
        checked += clear.sum()
    assert checked > 200


@pytest.mark.parametrize("family", ["gpt-oss", "gemma3", "llama4"], indirect=True)
def test_a_twin_drafts_on_the_pages_of_windows(
    family: tuple[str, Path], alone: list[list[int]]
) -> None:
    """It is nearly the model, and so are its drafts."""
    whole = {"num_kv_blocks": 256, "speculate": "twin", "speculate_tokens": "3"}
    with load(family[1], max_num_seqs=4, **whole) as llm:
        assert answers(llm, PROMPTS)[0] == alone
        stats = llm.stats()
    assert stats.num_accepted_tokens > 0.6 * stats.num_draft_tokens > 60
