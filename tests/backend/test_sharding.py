"""Several ranks of a model compute what one computes, on the numpy backend in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.model import KVSpec, Model
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import load_registry
from vllmx_core.reference.backend import ReferenceBackend, ReferenceLoadedModel
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.part import WeightSource
from vllmx_testing.model_suite import ModelSuite, random_weights
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.ranks import RankThreads, ThreadCommunicator

from .served_models import QWEN2_MOE, SMALL
from .test_recurrent_architectures import (
    TestGraniteMoeHybrid as Granite,
)
from .test_recurrent_architectures import TestKimiLinear as KimiLinear
from .test_recurrent_architectures import TestLfm2 as Lfm2
from .test_recurrent_architectures import TestMamba as Mamba
from .test_recurrent_architectures import TestNemotronH as NemotronH
from .test_recurrent_architectures import TestQwen3Next as Qwen3Next
from .test_recurrent_architectures import TestQwen35 as Qwen35

REGISTRY = load_registry()
TEXT = [7, 3, 60, 0, 33, 12, 12, 5, 41, 59, 2, 18, 30, 44]
LLAMA = SMALL | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 8,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
CONFIGS: dict[str, dict[str, Any]] = {
    "8 kv heads": LLAMA | {"num_key_value_heads": 8},
    "2 kv heads, tied": LLAMA | {"tie_word_embeddings": True},
    "1 kv head": LLAMA | {"num_key_value_heads": 1},
    "biases everywhere": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "biases of qkv": QWEN2,
    "norms of heads": LLAMA
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 20},
    "experts with biases and sinks": LLAMA
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 9,
    },
    "values smaller than keys": LLAMA
    | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "head_dim": 12,
        "v_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "layer_types": ["full_attention"] * 2,
    },
    "a shared expert": LLAMA | QWEN2_MOE,
    "a norm across heads": LLAMA | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "fused matrices": LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
}


def options(**more: Any) -> LoadOptions:
    return LoadOptions(
        dtype="f64", kv_cache_dtype="f64", max_model_len=64, num_kv_blocks=8, max_num_seqs=2, **more
    )


def of(config: dict[str, Any]) -> tuple[Model, WeightSource]:
    model: Model = REGISTRY.model_for(config).load()(config)
    return model, random_weights(model)


def ranks_of(
    model: Model, source: WeightSource, count: int, **how: Any
) -> RankThreads[ReferenceLoadedModel]:
    def load(end: ThreadCommunicator) -> ReferenceLoadedModel:
        mine = sharded(model, source, 64, end.rank, count, **how)
        return ReferenceBackend().load(mine, source, options(communicator=end))

    return RankThreads(count, load)


def chunks(loaded: ReferenceLoadedModel) -> F32:
    """(T, V) logits of the text in two steps."""
    state = 0 if loaded.info.num_state_slots else None
    plans = [make_plan([Row(TEXT[:9], 0, [3], "all", state)], 16)]
    plans.append(make_plan([Row(TEXT[9:], 9, [3], "all", state)], 16))
    return np.concatenate([loaded.logits(plan) for plan in plans])


def check(
    model: Model, source: WeightSource, count: int, **how: Any
) -> RankThreads[ReferenceLoadedModel]:
    """Each rank has the logits of one process that has all."""
    expected = chunks(ReferenceBackend().load(model, source, options()))
    ranks = ranks_of(model, source, count, **how)
    for found in ranks.each(chunks):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    ranks.close()
    return ranks


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_together_equal_one(name: str, count: int) -> None:
    model, source = of(CONFIGS[name])
    kv_heads = CONFIGS[name]["num_key_value_heads"]
    if kv_heads < count and count % kv_heads and "across" not in name:
        with pytest.raises(ConfigError, match=r"kv heads cannot .* choose .* 1 or 2 or 4"):
            sharded(model, source, 64, 0, count)
        return
    check(model, source, count)


def test_a_rank_holds_and_reads_its_part_alone() -> None:
    model, source = of(CONFIGS["8 kv heads"])
    whole = ReferenceBackend().load(model, source, options()).info
    ranks = ranks_of(model, source, 2)
    held = [one.info.weight_bytes for one in ranks.ranks]
    tables = sum(2 * table.nbytes for table in model.constants(64).values())
    norms = 8 * 64 * 5
    assert sum(held) == whole.weight_bytes + tables + norms
    assert {one.info.kv_cache_bytes for one in ranks.ranks} == {whole.kv_cache_bytes // 2}
    ranks.close()


def test_two_sums_a_layer_and_one_for_the_embedding() -> None:
    ranks = check(*of(CONFIGS["biases everywhere"]), 2)
    assert ranks.calls[:6] == [*[("all_reduce", (9, 64))] * 5, ("all_gather", (9, 30))]


def test_uneven_heads() -> None:
    model, source = of(LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8})
    check(model, source, 2)
    caches = [
        spec.num_kv_heads
        for rank in range(2)
        for spec in sharded(model, source, 64, rank, 2).shape.caches
        if isinstance(spec, KVSpec)
    ]
    assert caches == [1, 1, 2, 2]


SIX_HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 6}
HYBRIDS: dict[str, tuple[type[ModelSuite], int, dict[str, Any]]] = {
    "Qwen3.5": (Qwen35, 2, {}),
    "Qwen3-Next": (Qwen3Next, 2, {"linear_num_value_heads": 4}),
    "Mamba-2": (NemotronH, 2, {}),
    "Mamba-2 with a bias": (Granite, 2, {"mamba_proj_bias": True}),
    "Kimi Linear, uneven": (KimiLinear, 2, {}),
    "Kimi Linear, a head each": (KimiLinear, 3, SIX_HEADS),
    "LFM2": (Lfm2, 2, {}),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_heads_lie_on_ranks(name: str) -> None:
    """Each rank keeps those of its own heads alone."""
    suite, count, changes = HYBRIDS[name]
    model, source = of(suite.config | changes)
    ranks = check(model, source, count)
    whole = ReferenceBackend().load(model, source, options()).info.state_slot_bytes
    assert sum(one.info.state_slot_bytes for one in ranks.ranks) == whole


@pytest.mark.parametrize(("key_heads", "count"), [(2, 2), (2, 3), (3, 2), (3, 6), (2, 6)])
def test_tiled_heads(key_heads: int, count: int) -> None:
    """Six heads, each of whose key heads belongs to every second or third one: ranks have whole
    tiles, or a part of one."""
    changes = SIX_HEADS | {"linear_num_key_heads": key_heads, "vllmx_tiled_heads": True}
    model, source = of(Qwen35.config | changes)
    check(model, source, count)


def test_layers_of_mamba_1_stay_whole() -> None:
    model, source = of(Mamba.config)
    whole = ReferenceBackend().load(model, source, options()).info.state_slot_bytes
    ranks = check(model, source, 2)
    assert [one.info.state_slot_bytes for one in ranks.ranks] == [whole, whole]


def test_one_norm_over_all_groups_keeps_its_layer_whole() -> None:
    model, source = of(Granite.config | {"mamba_n_groups": 1})
    whole = ReferenceBackend().load(model, source, options()).info.state_slot_bytes
    ranks = check(model, source, 2)
    assert [one.info.state_slot_bytes for one in ranks.ranks] == [whole, whole]
