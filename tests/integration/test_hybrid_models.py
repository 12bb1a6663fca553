"""Qwen3.5 and LFM2 as transformers saves them, through the public interface: ids are those of
transformers, also of rows that lost their blocks, second turns, and beside one that is aborted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, AsyncLLM, EngineConfig, SamplingParams
from vllmx_core.errors import BackendUnavailableError
from vllmx_core.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {
        "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 10,
    },
    "Lfm2ForCausalLM": {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 8,
    },
}  # fmt: skip
LENGTH = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
PROMPTS = [np.random.default_rng(size).integers(3, 4096, size).tolist() for size in (37, 20, 50)]


@dataclass(frozen=True)
class Saved:
    folder: str
    twin: Any

    def greedy(self, prompt: list[int]) -> list[int]:
        """The ids of transformers."""
        with torch.no_grad():
            found = self.twin.generate(
                torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None
            )
        ids: list[int] = found[0, len(prompt) :].tolist()
        return ids


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    try:
        load_registry().choose_backend("cpu")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    kind = getattr(transformers, request.param)
    torch.manual_seed(0)
    twin = kind(kind.config_class(**SMALL, **MODELS[request.param])).eval()
    for parameter in twin.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    folder = tmp_path_factory.mktemp(request.param)
    twin.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL_FOLDER) / name, folder)
    return Saved(str(folder), twin)


@pytest.fixture(scope="module")
def expected(saved: Saved) -> list[list[int]]:
    return [saved.greedy(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llm(saved: Saved) -> Iterator[LLM]:
    """With fewer blocks than three rows come to."""
    with LLM(
        saved.folder, backend="cpu", dtype="float32", num_threads=1, max_model_len=128,
        max_num_seqs=4, num_kv_blocks=12, state_snapshot_tokens=1,
    ) as llm:  # fmt: skip
        yield llm


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_rows_that_lose_their_blocks_answer_as_transformers(
    saved: Saved, llm: LLM, expected: list[list[int]]
) -> None:
    assert answers(llm, PROMPTS) == expected
    assert llm._engine._core.stats().num_preemptions > 0
    assert answers(llm, PROMPTS[::-1]) == expected[::-1]


def test_a_second_turn_finds_the_first_one(
    saved: Saved, llm: LLM, expected: list[list[int]]
) -> None:
    prompt = [*PROMPTS[0], *answers(llm, PROMPTS[:1])[0], 5, 6, 7]
    (output,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY)
    assert list(output.outputs[0].token_ids) == saved.greedy(prompt)
    assert output.num_cached_tokens == (len(prompt) - 4) // 16 * 16
    stats = llm._engine._core.stats()
    assert (stats.num_running, stats.num_used_slots) == (0, 0)


async def test_an_aborted_row_disturbs_nobody(saved: Saved, expected: list[list[int]]) -> None:
    config = EngineConfig(
        model=saved.folder, backend="cpu", dtype="float32", num_threads=1, max_model_len=128,
        max_num_seqs=4, num_kv_blocks=40,
    )  # fmt: skip
    async with await AsyncLLM.start(config, in_process=True) as llm:
        gone = llm.generate({"prompt_token_ids": PROMPTS[1]}, GREEDY)
        await anext(gone)
        await gone.aclose()
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            found = llm.generate({"prompt_token_ids": prompt}, GREEDY)
            assert [one async for out in found for one in out.outputs[0].token_ids] == ids
