"""Dense families beyond Llama's against Hugging Face transformers, as in
`test_parity_transformers`: norms around, behind and beside blocks, soft-caps, multipliers, packed
matrices, partial and interleaved rotations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import UnsupportedOpError

pytest.importorskip("torch")
pytest.importorskip("transformers")

from . import test_parity_transformers as parity
from .test_parity_transformers import WINDOW, Case, rope

GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 20}
GEMMA3: dict[str, Any] = {**GEMMA, "sliding_window": WINDOW, "num_hidden_layers": 4}
BOTH = ["sliding_attention", "full_attention"]
SHORT: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 8.0, 8.0, 9.0],
    "original_max_position_embeddings": parity.LENGTH,
    "partial_rotary_factor": 0.75,
}
CASES = [
    Case("gemma-bf16-mqa", "gemma", {"head_dim": 16, "num_key_value_heads": 1}, "bfloat16"),
    Case("gemma2-no-caps", "gemma2",
         {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
          "layer_types": [*BOTH, "full_attention"]}),
    Case("gemma3-scaled", "gemma3_text",
         {**GEMMA3, "layer_types": [*BOTH, *BOTH], "final_logit_softcapping": 20.0,
          "rope_parameters": {
              "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
              "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    Case("gemma3n", "gemma3n_text",
         {"head_dim": 12, "sliding_window": parity.WINDOW, "num_hidden_layers": 5,
          "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention",
                                                      "full_attention"],
          "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
          "vocab_size_per_layer_input": 61, "intermediate_size": [72, 56, 72, 72, 72],
          "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0, 0.3]}),
    Case("gemma4-shared", "gemma4_text",
         {"head_dim": 12, "global_head_dim": 20, "sliding_window": WINDOW, "num_hidden_layers": 5,
          "layer_types": [*BOTH, *BOTH, "full_attention"], "num_kv_shared_layers": 2,
          "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}),
    Case("gemma4-keys-as-values", "gemma4_text",
         {"head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW,
          "layer_types": [*BOTH, "full_attention"], "hidden_size_per_layer_input": 0,
          "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
          "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20}, "bfloat16"),
    Case("olmo3-yarn", "olmo3",
         {"sliding_window": WINDOW, "layer_types": [*BOTH, "sliding_attention"],
          "rope_parameters": {
              "full_attention": {**parity.YARN, "rope_theta": 5e5},
              "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    Case("phi4-mini", "phi3", {**rope(**SHORT), "hidden_size": 64}, max_model_len=parity.LENGTH),
    Case("stablelm2-12b", "stablelm",
         {**rope(partial_rotary_factor=0.5), "use_parallel_residual": True, "qk_layernorm": True}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_ids(
    case: Case, build: Callable[[Case], tuple[Path, Any]], open_runner: Callable[..., Any]
) -> None:
    try:
        parity.test_logits_and_greedy_ids(case, build, open_runner)
    except UnsupportedOpError as error:
        pytest.skip(error.message)
