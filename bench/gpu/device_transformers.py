"""Tiny models with random weights: the GPU's logits beside those of Hugging Face transformers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import REHEARSED, opener
from vllmx_core.backend import LoadOptions
from vllmx_cuda.backend import CudaBackend
from vllmx_models.families.llama import llama
from vllmx_models.families.qwen import qwen3
from vllmx_models.formats.safetensors import open_checkpoint
from vllmx_testing.harness import all_logprobs
from vllmx_testing.plans import Row, make_plan

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
CUTS = (0, 10, 19, 20) if REHEARSED else (0, 100, 149, 150)


@pytest.mark.parametrize(("name", "make"), [("Llama", llama), ("Qwen3", qwen3)])
def test_logprobs(name: str, make: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    oracle = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    oracle.save_pretrained(tmp_path)
    tokens = np.random.default_rng(2).integers(0, 97, CUTS[-1]).tolist()
    with torch.no_grad():
        wanted = torch.log_softmax(oracle(torch.tensor([tokens])).logits[0].double(), -1).numpy()
    checkpoint = open_checkpoint(tmp_path)
    limits: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 256}
    loaded = CudaBackend(opener()).load(
        make(checkpoint.config), checkpoint.weights, LoadOptions(dtype="f32", **limits)
    )
    blocks, got = list(range(10)), []
    for begin, end in pairwise(CUTS):
        plan = make_plan([Row(tokens[begin:end], begin, blocks, "all")], 16)
        got.append(all_logprobs(loaded, plan, 97))
    loaded.close()
    np.testing.assert_allclose(np.concatenate(got), wanted, rtol=0, atol=2e-4)
