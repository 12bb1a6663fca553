"""Architectures with experts against Hugging Face transformers, as in `test_parity_transformers`.

Files name experts otherwise than transformers' own modules do: everything goes through
`save_pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.arrays import NUMPY, Arrays
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.ops.route import RouteSpec, of_best_groups, route, route_scores

pytest.importorskip("torch")
pytest.importorskip("transformers")

from . import test_parity_transformers as parity
from .test_parity_transformers import Case

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 20}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": parity.WINDOW,
    "swiglu_limit": 1.5,
}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
CASES = [
    Case("qwen3-moe", "qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}, seed=1),
    Case("qwen3-moe-bf16-shards", "qwen3_moe", {**EXPERTS, "head_dim": 16}, "bfloat16", True),
    Case("qwen3-moe-all-chosen", "qwen3_moe",
         {**EXPERTS, "num_experts": 3, "num_experts_per_tok": 3, "use_sliding_window": True,
          "sliding_window": parity.WINDOW, "attention_bias": True}, seed=1),
    Case("qwen3-moe-mlp-layers", "qwen3_moe",
         {**EXPERTS, "num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2},
         seed=1),
    Case("qwen2-moe", "qwen2_moe",
         {**SHARED, "use_sliding_window": True, "sliding_window": parity.WINDOW,
          "max_window_layers": 2, "norm_topk_prob": True, "qkv_bias": False}),
    Case("mixtral", "mixtral",
         {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": parity.WINDOW},
         seed=1),
    Case("gpt-oss", "gpt_oss", GPT_OSS),
    Case("olmoe", "olmoe", {"num_experts": 6, "num_experts_per_tok": 3}, seed=1),
    Case("glm4-moe", "glm4_moe",
         {**GROUPED, "use_qk_norm": True, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
          "n_group": 4, "topk_group": 2, "attention_bias": True}),
    Case("granitemoe", "granitemoe",
         {"num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
          "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    Case("mimo-v2-flash", "mimo_v2_flash",
         {**GROUPED, "v_head_dim": 8, "sliding_window": parity.WINDOW, "n_group": 4,
          "topk_group": 2, "routed_scaling_factor": 2.5, "rope_parameters": {
              kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
              for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))}}),
    Case("minimax-m2", "minimax_m2",
         {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 16,
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                              "partial_rotary_factor": 0.5}}),
]  # fmt: skip


def spied(gaps: list[float]) -> Callable[..., Any]:
    """The oracle's `route`, which also notes how near each choice of experts was to another."""

    def route_(
        logits: Any,
        spec: RouteSpec,
        bias: Any = None,
        factor: Any = None,
        xp: Arrays = NUMPY,
        named: Any = None,
    ) -> Any:
        ids, weights = route(logits, spec, bias, factor, xp, named)
        if xp is not NUMPY:
            return ids, weights
        scores = route_scores(logits, spec) + (0 if bias is None else bias)
        if spec.groups > 1:
            scores = of_best_groups(scores, spec)
        best = -np.sort(-scores, axis=1)
        if spec.chosen < scores.shape[1]:
            gaps.append(float((best[:, spec.chosen - 1] - best[:, spec.chosen]).min()))
        return ids, weights

    return route_


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_ids(
    case: Case,
    build: Callable[[Case], tuple[Path, Any]],
    open_runner: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No choice of experts may be near a tie, where rounding would choose others; the oracle, being
    one of the backends, tells."""
    gaps: list[float] = []
    monkeypatch.setattr("vllmx_core.ops.route.route", spied(gaps))
    try:
        parity.test_logits_and_greedy_ids(case, build, open_runner)
    except UnsupportedOpError as error:
        pytest.skip(error.message)
    assert min(gaps, default=1.0) > 1e-4
