"""Every served architecture and variant against Hugging Face transformers, on tiny random models.

The random weights are wide enough that logits differ by whole units and that biases, norms, windows
and rotations all show in them; each case also asserts that transformers' own choice is no near-tie.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-5
PROMPT, NEW = 37, 64
LENGTH = PROMPT + NEW
WINDOW = 11  # shorter than the prompt, no multiple of a block
SMALL: dict[str, Any] = {
    "vocab_size": 61,  # backends give at most 64 log-probabilities a row
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "factor": 4.0,
}


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    shards: bool = False
    old_style: bool = False
    """config.json with rope_theta + rope_scaling instead of rope_parameters."""
    max_model_len: int = 128
    seed: int = 0
    """Chosen so that no greedy choice is a near-tie."""


def rope(theta: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **options}}


CASES = [
    Case("llama", "llama"),
    Case("llama-mha-tied", "llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    Case("llama-mqa", "llama", {"num_key_value_heads": 1}),
    Case("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-head-20", "llama", {"head_dim": 20, "num_attention_heads": 6}),
    Case("llama-gelu", "llama", {"hidden_act": "gelu"}),
    Case("llama-gelu-tanh", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    Case("llama-relu", "llama", {"hidden_act": "relu"}),
    Case("llama-eps", "llama", {"rms_norm_eps": 0.3}),
    Case("llama-theta", "llama", rope(500.0)),
    Case("llama-linear", "llama", rope(rope_type="linear", factor=3.0)),
    Case("llama-dynamic", "llama", rope(rope_type="dynamic", factor=3.0)),
    Case("llama-dynamic-beyond", "llama",
         {**rope(rope_type="dynamic", factor=3.0), "max_position_embeddings": 50},
         max_model_len=LENGTH),
    Case("llama3", "llama", rope(500000.0, **LLAMA3)),
    Case("llama3-old-style", "llama", rope(500000.0, **LLAMA3), old_style=True),
    Case("llama-yarn", "llama", rope(**YARN)),
    Case("llama-longrope-short", "llama",
         rope(**LONG, original_max_position_embeddings=LENGTH), max_model_len=LENGTH),
    Case("llama-longrope-long", "llama", rope(**LONG, original_max_position_embeddings=32), seed=1),
    Case("llama-bf16-shards", "llama", dtype="bfloat16", shards=True),
    Case("llama-f16", "llama", dtype="float16"),
    Case("mistral", "mistral", {"sliding_window": WINDOW}),
    Case("mistral-window-1", "mistral", {"sliding_window": 1}),
    Case("mistral-no-window", "mistral", {"sliding_window": None, "head_dim": 24}),
    Case("qwen2", "qwen2"),
    Case("qwen2-upper-window", "qwen2",
         {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    Case("qwen2-layer-types", "qwen2",
         {"use_sliding_window": True, "sliding_window": WINDOW,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    Case("qwen2-yarn-old-style", "qwen2", rope(1e6, **YARN), old_style=True),
    Case("qwen3", "qwen3", {"head_dim": 20}, seed=1),
    Case("qwen3-tied-128", "qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    Case("qwen3-biases-window", "qwen3",
         {"head_dim": 16, "attention_bias": True, "use_sliding_window": True,
          "sliding_window": WINDOW, "max_window_layers": 2}),
    Case("smollm3", "smollm3", {"num_hidden_layers": 5}),
    Case("smollm3-list", "smollm3",
         {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": False, "mlp_bias": True,
          "attention_bias": True}),
    Case("smollm3-window", "smollm3",
         {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW}),
]  # fmt: skip


def save_random(case: Case, folder: Path) -> Any:
    config = transformers.AutoConfig.for_model(case.kind, **{**SMALL, **case.config})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("correction_bias"):  # chooses experts, of which scores are below 1
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    dtype = getattr(torch, case.dtype)
    model.to(dtype).save_pretrained(folder, max_shard_size="30KB" if case.shards else "1GB")
    if case.old_style:
        rewrite_config(folder / "config.json")
    # loaded anew, because `to` has rounded the rotation's frequencies as well
    return (
        type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    )


def rewrite_config(path: Path) -> None:
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    parameters["type"] = parameters.pop("rope_type")
    config["rope_scaling"] = parameters
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def prompt() -> list[int]:
    ids = np.random.default_rng(5).integers(0, SMALL["vocab_size"], PROMPT)
    return [int(token) for token in ids]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_ids(
    case: Case,
    build: Callable[[Case], tuple[Path, Any]],
    open_runner: Callable[..., Any],
) -> None:
    folder, model = build(case)
    assert (len(list(folder.glob("*.safetensors"))) > 2) == case.shards
    runner = open_runner(folder, case.max_model_len)
    [ids] = runner.greedy([prompt()], NEW, 1)
    for chunk in (7, PROMPT):  # behind other chunks, decoding is the same once it has begun
        assert runner.greedy([prompt()], 8, chunk) == [ids[:8]]
    tokens = prompt() + ids
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double().numpy()  # (T, V)
    best = np.sort(logits[PROMPT - 1 : -1], axis=-1)
    assert (best[:, -1] - best[:, -2]).min() > 1e-4 * np.abs(logits).max()  # no near-tie to flip
    assert logits[PROMPT - 1 : -1].argmax(-1).tolist() == ids
    error = 0.0
    for chunk in (7, LENGTH):
        found = runner.log_softmax(tokens, chunk)
        error = max(error, relative_error(found, logits))
    print(f"relative error {error:.2e}")  # pytest -rP shows it
    assert error < TOLERANCE


def relative_error(log_softmax: Any, logits: Any) -> float:
    """Greatest difference of the logits up to each row's constant, over the greatest logit."""
    peak = logits.max(-1, keepdims=True)
    norm = np.log(np.exp(logits - peak).sum(-1, keepdims=True)) + peak
    return float(np.abs(log_softmax - (logits - norm)).max() / np.abs(logits).max())
