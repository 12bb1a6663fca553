"""A model whose layers see a window only: what fell out of it holds no memory."""

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
from vllmx_demo.source import MODEL_FOLDER

from tests.usable_backends import backend_spec

WINDOW, BLOCK, CHUNK, VOCAB, HIDDEN = 21, 16, 32, 4096, 32
HELD = (WINDOW - 1 + CHUNK + BLOCK - 2) // BLOCK + 1
"""Blocks of a window and a chunk, wherever they begin."""
CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW,
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
SIZES = {
    "self_attn.q_proj": (32, HIDDEN),
    "self_attn.k_proj": (16, HIDDEN),
    "self_attn.v_proj": (16, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 32),
    "mlp.gate_proj": (64, HIDDEN),
    "mlp.up_proj": (64, HIDDEN),
    "mlp.down_proj": (HIDDEN, 64),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
PROMPT = [int(token) for token in np.random.default_rng(1).integers(10, VOCAB, 400)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral of random weights."""
    folder = tmp_path_factory.mktemp("window")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL_FOLDER) / name, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in SIZES.items()}
    shapes |= {"embed_tokens": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    rng = np.random.default_rng(0)
    weights = {
        f"model.{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


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
        if llm._engine._core.limits.windows == (None,):
            pytest.skip(f"the {backend} backend keeps the pages of all tokens")
        yield llm


def test_a_long_answer_holds_a_window_and_a_chunk(
    folder: Path, backend: str, roomy: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt and answer are several times as long as all blocks together."""
    (expected,) = roomy.generate([PROMPT], GREEDY)
    with load(folder, backend, num_kv_blocks=2 * HELD, max_num_seqs=2) as llm:
        core = llm._engine._core
        held: list[int] = []
        step = core.step

        def watched() -> list[Any]:
            outputs = step()
            stats = core.stats()
            held.append(stats.num_blocks - stats.num_free_blocks)
            return outputs

        monkeypatch.setattr(core, "step", watched)
        (output,) = llm.generate([PROMPT], GREEDY)
        stats = core.stats()
    assert output.outputs == expected.outputs
    assert len(PROMPT) > 2 * BLOCK * stats.num_blocks
    assert 0 < max(held[len(held) // 2 :]) <= HELD
    assert held[-30] <= (WINDOW - 2) // BLOCK + 3, "decoding needs no room for a chunk"
    assert stats.num_preemptions == 0
    assert stats.num_free_blocks == stats.num_blocks


def test_a_prefix_hit_needs_the_window_alone(folder: Path, backend: str, roomy: LLM) -> None:
    prompts = [PROMPT, [*PROMPT[:300], 7, 8, 9]]
    expected = roomy.generate(prompts, GREEDY)
    with load(folder, backend, num_kv_blocks=200) as llm:
        first, second = (llm.generate([prompt], GREEDY)[0] for prompt in prompts)
        (again,) = llm.generate([PROMPT], GREEDY)
    assert [first.outputs, second.outputs] == [output.outputs for output in expected]
    assert again.outputs == first.outputs
    assert second.num_cached_tokens == 288
    assert again.num_cached_tokens == 384
