"""A model of compressed attention through the engine: cached prefixes, preemption, the published
names with FP8 blocks and MXFP4 experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.plugins.registry import load_registry
from vllmx_testing.model_suite import random_weights

from . import quantizers
from .test_latent_models import VOCAB, backend, load, logprobs, write

__all__ = ["backend"]
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": VOCAB,
    "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "num_attention_heads": 4,
    "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64,
    "sliding_window": 24, "index_n_heads": 32, "index_head_dim": 32, "index_topk": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2, "hc_sinkhorn_iters": 3,
    "max_position_embeddings": 1024, "torch_dtype": "float32", "scoring_func": "sqrtsoftplus",
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 256},
}  # fmt: skip
PROMPT = [int(token) for token in np.random.default_rng(1).integers(10, VOCAB, 200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def tensors() -> dict[str, Any]:
    source = random_weights(load_registry().model_for(CONFIG).load()(CONFIG))
    parts = {name: source.part(name) for name in source.names()}
    found = {name: part.dequantize() for name, part in parts.items()}
    table, embed = "layers.0.ffn.gate.tid2eid", "embed.weight"
    return found | {table: found[table].astype(np.int64), embed: 20 * found[embed]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("compressed") / "model", tensors(), CONFIG)


@pytest.fixture(scope="module")
def roomy(folder: Path, backend: str) -> Iterator[LLM]:
    with load(folder, backend, num_kv_blocks=64, enable_prefix_caching=False) as llm:
        yield llm


def test_a_cached_prefix_changes_nothing(folder: Path, backend: str, roomy: LLM) -> None:
    """The second prompt continues a snapshot of the first, inside of a long window."""
    prompts = [PROMPT[:147], [*PROMPT[:144], 7, 8, 9]]
    expected = [roomy.generate([prompt], GREEDY)[0].outputs for prompt in prompts]
    assert [output.outputs for output in roomy.generate(prompts, GREEDY)] == expected
    with load(folder, backend, num_kv_blocks=64) as llm:
        one, other = (llm.generate([prompt], GREEDY)[0] for prompt in prompts)
    assert [one.outputs, other.outputs] == expected
    assert other.num_cached_tokens == 144


def test_preempted_rows_answer_as_if_alone(folder: Path, backend: str, roomy: LLM) -> None:
    prompts = [PROMPT[start : start + 20] for start in range(0, 120, 30)]
    expected = roomy.generate(prompts, GREEDY)
    with load(folder, backend, num_kv_blocks=8, max_model_len=64, max_num_seqs=4) as llm:
        found = llm.generate(prompts, GREEDY)
        assert llm._engine._core.stats().num_preemptions > 0
    assert [output.outputs for output in found] == [output.outputs for output in expected]


def test_fp8_blocks_beside_mxfp4_experts(tmp_path: Path, backend: str) -> None:
    """The names and types of DeepSeek's files; the same values in float32 are the judge."""
    stored, plain = tensors(), {}
    for name, values in list(stored.items()):
        plain[name] = values
        module = name.removesuffix("weight")
        if ".experts." in name:
            parts, plain[name] = quantizers.mxfp4(values)
        elif ".attn.w" in name or ".shared_experts." in name:
            parts, plain[name] = quantizers.fp8(values, block=(32, 128), name="scale")
        else:
            continue
        del stored[name]
        stored |= {module + key: array for key, array in parts.items()}
    scheme = {"quant_method": "fp8", "weight_block_size": [32, 128], "scale_fmt": "ue8m0"}
    config = CONFIG | {"expert_dtype": "fp4", "quantization_config": scheme}
    found = logprobs(write(tmp_path / "quantised", stored, config), backend)
    wanted = logprobs(write(tmp_path / "plain", plain, CONFIG), backend)
    assert found.keys() == wanted.keys()
    assert max(abs(found[token] - wanted[token]) for token in found) < 1e-3
