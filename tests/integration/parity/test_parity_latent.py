"""Architectures with latent attention against Hugging Face transformers, which makes keys and
values of every latent, as in `test_parity_transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import UnsupportedOpError

pytest.importorskip("torch")
pytest.importorskip("transformers")

from . import test_parity_transformers as parity
from .test_parity_moe import spied
from .test_parity_transformers import YARN, Case, rope

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 12,
    "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
INDEXED = LATENT | {"index_topk": 9, "index_head_dim": 16, "index_n_heads": 32}
SHARED = INDEXED | {"indexer_types": ["full", "shared", "full"]}
CASES = [
    Case("deepseek-v2-dense", "deepseek_v2",
         LATENT | {"q_lora_rank": None, "first_k_dense_replace": 3, "attention_bias": True}),
    Case("deepseek-v2", "deepseek_v2", LATENT | {"routed_scaling_factor": 2.0}, seed=1),
    Case("deepseek-v2-groups", "deepseek_v2",
         LATENT | GROUPS | {"topk_method": "group_limited_greedy", "q_lora_rank": None}),
    Case("deepseek-v3", "deepseek_v3", LATENT | GROUPS | {"rms_norm_eps": 0.1}),
    Case("deepseek-v3-halves", "deepseek_v3",
         LATENT | {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True},
         seed=1),
    Case("deepseek-v3-yarn", "deepseek_v3",
         LATENT | rope(**YARN, mscale=0.7, mscale_all_dim=1.3), old_style=True),
    Case("deepseek-v3-bf16-shards", "deepseek_v3", LATENT, "bfloat16", True),
    Case("glm4-moe-lite", "glm4_moe_lite", LATENT | {"n_shared_experts": 2}),
    Case("deepseek-v32", "deepseek_v32", INDEXED, seed=1),
    Case("deepseek-v32-all", "deepseek_v32", INDEXED | {"index_topk": parity.LENGTH}),
    Case("glm-moe-dsa", "glm_moe_dsa", INDEXED, seed=2),
    Case("glm-moe-dsa-shared", "glm_moe_dsa", SHARED, seed=2),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_ids(
    case: Case,
    build: Callable[[Case], tuple[Path, Any]],
    open_runner: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No choice of experts near a tie, as in `test_parity_moe`."""
    gaps: list[float] = []
    monkeypatch.setattr("vllmx_core.ops.route.route", spied(gaps))
    try:
        parity.test_logits_and_greedy_ids(case, build, open_runner)
    except UnsupportedOpError as error:
        pytest.skip(error.message)
    assert min(gaps, default=1.0) > 1e-4
