"""A model of latent attention through the engine: cached prefixes, preemption, quantised forms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER
from vllmx_testing.model_suite import random_weights

from tests.usable_backends import backend_spec

from . import quantizers

BLOCK, CHUNK, VOCAB = 16, 64, 4096
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": VOCAB,
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "torch_dtype": "float32", "q_lora_rank": 128,
    "kv_lora_rank": 128, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
PROMPT = [int(token) for token in np.random.default_rng(1).integers(10, VOCAB, 300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def tensors(config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    """Random weights; the stream begins with values of the size of what the layers add."""
    source = random_weights(load_registry().model_for(config).load()(config))
    return {
        name: source.part(name).dequantize() * (20 if "embed_tokens" in name else 1)
        for name in source.names()
    }


def write(folder: Path, weights: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("latent") / "model", tensors(), CONFIG)


@pytest.fixture(scope="module", params=["numpy", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    backend_spec(request.param)
    return str(request.param)


def load(folder: Path, backend: str, **config: Any) -> LLM:
    return LLM(
        str(folder),
        backend=backend,
        dtype="float32",
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        **config,
    )


@pytest.fixture(scope="module")
def roomy(folder: Path, backend: str) -> Iterator[LLM]:
    with load(folder, backend, num_kv_blocks=200, enable_prefix_caching=False) as llm:
        yield llm


def test_a_cached_prefix_changes_nothing(folder: Path, backend: str, roomy: LLM) -> None:
    prompts = [PROMPT, [*PROMPT[:200], 7, 8, 9]]
    expected = roomy.generate(prompts, GREEDY)
    with load(folder, backend, num_kv_blocks=200) as llm:
        first, second = (llm.generate([prompt], GREEDY)[0] for prompt in prompts)
        (again,) = llm.generate([PROMPT], GREEDY)
    assert [first.outputs, second.outputs] == [output.outputs for output in expected]
    assert again.outputs == first.outputs
    assert (second.num_cached_tokens, again.num_cached_tokens) == (192, 288)


def test_preempted_rows_answer_as_if_alone(folder: Path, backend: str, roomy: LLM) -> None:
    prompts = [PROMPT[start : start + 20] for start in range(0, 160, 40)]
    expected = roomy.generate(prompts, GREEDY)
    with load(folder, backend, num_kv_blocks=9, max_model_len=128, max_num_seqs=4) as llm:
        found = llm.generate(prompts, GREEDY)
        assert llm._engine._core.stats().num_preemptions > 0
    assert [output.outputs for output in found] == [output.outputs for output in expected]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_latents_in_eight_bits_are_refused(folder: Path, backend: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"latent attention.*choose auto, bf16, f16 or f32"):
        load(folder, backend, kv_cache_dtype=dtype, num_kv_blocks=64)


SPARSE = {
    "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 40, "index_n_heads": 32,
    "index_head_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIG | SPARSE
    return write(tmp_path_factory.mktemp("sparse") / "model", tensors(config), config)


def test_sparse_attention_with_prefixes_and_preemption(sparse: Path, backend: str) -> None:
    """Beyond the tokens that are picked; cached keys of indexers are those of the prefix."""
    prompts = [PROMPT[:200], [*PROMPT[:120], 7, 8, 9], PROMPT[50:80]]
    with load(sparse, backend, num_kv_blocks=200, enable_prefix_caching=False) as llm:
        expected = [llm.generate([prompt], GREEDY)[0].outputs for prompt in prompts]
        assert [output.outputs for output in llm.generate(prompts, GREEDY)] == expected
    with load(sparse, backend, num_kv_blocks=19, max_model_len=256, max_num_seqs=3) as llm:
        one, other = (llm.generate([prompt], GREEDY)[0] for prompt in prompts[:2])
        again = llm.generate(prompts, GREEDY)
        assert llm._engine._core.stats().num_preemptions > 0
    assert [one.outputs, other.outputs] == expected[:2]
    assert other.num_cached_tokens == 112
    assert [output.outputs for output in again] == expected


def test_sparse_attention_is_not_full_attention(sparse: Path, backend: str, tmp_path: Path) -> None:
    full = write(tmp_path / "full", tensors(CONFIG | SPARSE), CONFIG | SPARSE | {"index_topk": 300})
    answers = []
    for folder in (sparse, full):
        with load(folder, backend, num_kv_blocks=64) as llm:
            (output,) = llm.generate([PROMPT], GREEDY)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] != answers[1]


def logprobs(model: Path, backend: str, **options: Any) -> dict[int, float]:
    """The log-probabilities of the 20 likeliest ids after a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    with load(model, backend, num_kv_blocks=64, **options) as llm:
        (output,) = llm.generate([PROMPT[:50]], params)
    assert output.outputs[0].logprobs is not None
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def test_blocks_of_fp8_that_end_inside_of_heads(tmp_path: Path, backend: str) -> None:
    """DeepSeek's checkpoints are stored so; the same values in float32 are the judge."""
    stored, plain = tensors(), {}
    for name, values in list(stored.items()):
        plain[name] = values
        quantised = ".self_attn." in name or ".experts." in name
        if not quantised or values.ndim < 2:
            continue
        parts, plain[name] = quantizers.fp8(values, block=(32, 128), name="weight_scale_inv")
        del stored[name]
        stored |= {name.removesuffix("weight") + key: array for key, array in parts.items()}
    scheme = {"quant_method": "fp8", "weight_block_size": [32, 128], "fmt": "e4m3"}
    fp8 = write(tmp_path / "fp8", stored, CONFIG | {"quantization_config": scheme})
    found = logprobs(fp8, backend)
    wanted = logprobs(write(tmp_path / "plain", plain, CONFIG), backend)
    assert found.keys() == wanted.keys()
    assert max(abs(found[token] - wanted[token]) for token in found) < 1e-3


def test_in_situ_quantisation_answers_alike(folder: Path, backend: str) -> None:
    found, exact = logprobs(folder, backend, isq="q8_0"), logprobs(folder, backend)
    shared = found.keys() & exact.keys()
    assert found != exact
    assert len(shared) >= 10
    assert max(abs(found[token] - exact[token]) for token in shared) < 0.2
