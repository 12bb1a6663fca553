"""`--expert-parallel`: ranks have some experts each, and compute what one rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadedModel
from vllmx_core.errors import ConfigError, UnsupportedOpError
from vllmx_core.model import Array, Ops, Weight
from vllmx_core.ops.experts import Experts, ExpertsSpec
from vllmx_core.ops.route import RouteSpec
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.recorded.recording import prepare, record
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.map import name_in
from vllmx_testing.harness import VOCAB
from vllmx_testing.op_case import Case
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.ranks import RankThreads, ThreadCommunicator
from vllmx_testing.synthetic import ArraySource, Builder
from vllmx_tp import communicator
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

from tests.usable_backends import backend_spec

from .served_models import EXPERTS, SMALL
from .test_sharding import CONFIGS, LLAMA, check, of, options

MOE: dict[str, dict[str, Any]] = {
    "gpt-oss": CONFIGS["experts with biases and sinks"],
    "a shared expert": CONFIGS["a shared expert"],
    "qwen3": LLAMA | EXPERTS | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 20,
        "norm_topk_prob": True,
    },
    "groups and shared experts": SMALL | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64,
        "num_hidden_layers": 2, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 12, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_intermediate_size": 20, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", MOE)
def test_ranks_together_equal_one(name: str, count: int) -> None:
    check(*of(MOE[name]), count, whole_experts=True)


@pytest.mark.parametrize("name", ["gpt-oss", "groups and shared experts"])
def test_answers_are_added_token_by_token(name: str) -> None:
    ranks = check(*of(MOE[name]), 4, whole_experts=True, in_place_ranks=2)
    assert ("sum_rows", (9, 64)) in ranks.calls


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_backends_that_add_token_by_token(backend: str) -> None:
    """Three ranks, of which a token asks two, or one twice; more tokens than fit into a buffer,
    one token, of whom two ranks add none."""
    if backend == "torch":
        pytest.importorskip("torch")
    width, experts = 24, 5
    builder = Builder(VOCAB)
    builder.linear("router", experts, width)
    builder.stack("gate_up", experts, (20, 20), width, (0, 1)).stack("down", experts, (width,), 20)

    def middle(ops: Ops, w: Mapping[str, Weight], x: Array) -> Array:
        ids, weights = ops.route(ops.linear(x, w["router"]), RouteSpec(2))
        return ops.experts(x, ids, weights, w["gate_up"], w["down"], ExpertsSpec())

    case = Case.between("experts", width, middle, lambda _: None)
    case.build(builder)
    model, source = builder.build(1, case.body), ArraySource(builder.arrays)
    steps = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]]
    plans = [make_plan([Row(text, 0, [0, 1], "all")], 16) for text in steps]
    reference = ReferenceBackend().load(model, source, options())
    expected = np.concatenate([reference.logits(plan) for plan in plans])
    region = Region.create(3)

    def load(end: ThreadCommunicator) -> LoadedModel:
        mine = sharded(model, source, 64, end.rank, 3, whole_experts=True, in_place_ranks=1)
        meeting = SharedMemoryCommunicator(region, end.rank) if backend == "cpu" else end
        limits = replace(options(num_threads=1, communicator=meeting), dtype="f32")
        limits = replace(limits, kv_cache_dtype="auto")
        made = load_registry().get(BackendSpec, backend).load()()
        return made.load(mine, source, limits)

    def logits(loaded: LoadedModel) -> F32:
        found = []
        for plan in plans:
            whole = np.arange(plan.num_logit_rows, dtype=np.int32)
            rows = sampling_rows(len(whole), num_logprobs=[0] * len(whole), whole=whole)
            found.append(loaded.step(plan, rows).result().logits)
        return np.concatenate(found)

    ranks = RankThreads(3, load)
    region.close()
    found = ranks.each(logits)
    for one in found:
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        np.testing.assert_array_equal(one, found[0])
    ranks.each(lambda one: one.close())
    ranks.close()


def test_rows_that_ranks_hold_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces have three rows; what nobody holds is zero, what somebody has and does not hold is not
    heard."""
    monkeypatch.setattr(communicator, "BUFFER_BYTES", 3 * 4 * 5)
    random = np.random.default_rng(0)
    parts = random.standard_normal((3, 8, 5)).astype(np.float32)
    held = random.random((8, 3)) < 0.5
    region = Region.create(3)
    ranks = RankThreads(3, lambda end: SharedMemoryCommunicator(region, end.rank))
    expected = np.einsum("rte,tr->te", parts, held)
    for found in ranks.each(lambda one: one.sum_rows(parts[one.rank], held)):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    ranks.close()
    region.close()


def test_process_groups_add_rows_that_ranks_hold() -> None:
    torch = pytest.importorskip("torch")
    from vllmx_torch.ranks import ProcessGroupRanks

    random = np.random.default_rng(0)
    parts = random.standard_normal((3, 8, 5)).astype(np.float32)
    held = random.random((8, 3)) < 0.5
    ranks = RankThreads(3, lambda end: (end.rank, ProcessGroupRanks.meet(end, "gloo")))
    expected = np.einsum("rte,tr->te", parts, held)
    for found in ranks.each(
        lambda one: one[1].sum_rows(torch.from_numpy(parts[one[0]]), torch.from_numpy(held))
    ):
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    ranks.close()


def test_a_backend_that_does_not_add_token_by_token_says_so() -> None:
    model, source = of(MOE["qwen3"])
    mine = sharded(model, source, 64, 0, 2, whole_experts=True, in_place_ranks=1)
    spec = backend_spec("metal")
    with pytest.raises(UnsupportedOpError, match=r"needs the op 'combine' .* choose --backend cpu"):
        prepare(mine, 64, "metal", spec.load()().supports)


def test_each_expert_is_read_by_one_rank() -> None:
    model, source = of(MOE["qwen3"])
    tensors: list[set[str]] = []
    for rank in range(4):
        mine = sharded(model, source, 64, rank, 4, whole_experts=True)
        stacks = [spec for spec in mine.weights() if spec.kind == "stack"]
        tensors.append({name_in(source, part) for spec in stacks for part in spec.parts})
        ops = [op for op in record(mine, 64).steps.ops if isinstance(op, Experts)]
        held = [(0, 1), (1, 2), (3, 1), (4, 2)][rank]
        assert [(op.first, op.gate_up.count) for op in ops] == [held, held]
    everything = {
        name_in(source, part)
        for spec in model.weights()
        if spec.kind == "stack"
        for part in spec.parts
    }
    assert set().union(*tensors) == everything
    assert sum(map(len, tensors)) == len(everything)


def test_what_cannot_be_divided() -> None:
    model, source = of(CONFIGS["8 kv heads"])
    with pytest.raises(ConfigError, match="this one has none: leave it out"):
        sharded(model, source, 64, 0, 2, whole_experts=True)
    model, source = of(MOE["gpt-oss"] | {"num_local_experts": 3})
    with pytest.raises(ConfigError, match=r"3 experts of .* at most .* choose .* 1 or 2$"):
        sharded(model, source, 64, 0, 4, whole_experts=True)
