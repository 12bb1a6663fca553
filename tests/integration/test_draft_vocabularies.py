"""Draft models whose vocabulary is padded, cut or another one."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER
from vllmx_models.formats.gguf.quantize.convert import quantize

VOCAB_SIZE = 4096
EMBEDDING = "model.embed_tokens.weight"


def draft_model(folder: Path, rows: int, tokenizer: str | None = "") -> Path:
    """The demo model with `rows` rows of its embedding; the new ones are like the first, so that
    the model draws them. `tokenizer`: "other" for one with other ids; None: no tokenizer."""
    weights = safetensors.torch.load_file(MODEL_FOLDER / "model.safetensors")
    table = weights[EMBEDDING]
    more = table[: max(0, rows - VOCAB_SIZE)]
    weights[EMBEDDING] = torch.cat([table[:rows], more])
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    if tokenizer is not None:
        known = json.loads((MODEL_FOLDER / "tokenizer.json").read_text())
        vocabulary = known["model"]["vocab"]
        ids = list(vocabulary.values())
        if tokenizer:  # turn the ids of the merged tokens around
            ids[300:] = reversed(ids[300:])
        known["model"]["vocab"] = dict(zip(vocabulary, ids, strict=True))
        (folder / "tokenizer.json").write_text(json.dumps(known))
    return folder


def answers(**config: Any) -> tuple[list[Any], Any]:
    prompts = ["Once upon a time", "Tom and Lily went to", [5, 4095, 4000, 1200, 7], "The cat"]
    params = [
        SamplingParams(max_tokens=30, seed=n, temperature=t, logprobs=1)
        for n, t in enumerate((0.0, 0.7, 0.9, 1.2))
    ]
    with LLM("demo", backend="cpu", max_model_len=128, num_kv_blocks=80, **config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        choices = [output.outputs[0] for output in outputs]
        stats = llm.stats()
    return [(choice.token_ids, choice.logprobs) for choice in choices], stats


@cache
def plain() -> list[Any]:
    return answers()[0]


@pytest.mark.parametrize("rows", [VOCAB_SIZE + 64, 3500])
def test_only_ids_of_both_are_drafted(tmp_path: Path, rows: int) -> None:
    path = draft_model(tmp_path, rows)
    found, stats = answers(speculate=f"model:{path}", speculate_tokens="4")
    assert found == plain()
    assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 0


def test_ids_that_the_draft_model_lacks_are_read_by_the_target_alone(tmp_path: Path) -> None:
    path = draft_model(tmp_path, 3500)
    config = {"backend": "numpy", "dtype": "float32", "num_kv_blocks": 20, "max_model_len": 64}
    with LLM("demo", speculate=f"model:{path}", speculate_tokens="3", **config) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        llm.generate([[4095, 4000, 3499, 5, 300, 301]], params, use_tqdm=False)
        assert llm.stats().num_accepted_tokens > 0


def test_tokens_of_a_gguf_file_are_compared_too(tmp_path: Path) -> None:
    padded = draft_model(tmp_path, VOCAB_SIZE + 32)
    path = tmp_path / "draft.gguf"
    quantize(load_registry(), padded, path, "q8_0", threads=2)
    found, stats = answers(speculate=f"model:{path}", speculate_tokens="4")
    assert found == plain()
    assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("rows", "tokenizer", "error"),
    [
        (VOCAB_SIZE, "other", "ids of both stand for other tokens, such as"),
        (VOCAB_SIZE + 32, None, "4128 tokens, that of the model 4096, and without the tokenizers"),
    ],
)
def test_other_vocabularies_are_refused(
    tmp_path: Path, rows: int, tokenizer: str | None, error: str
) -> None:
    path = draft_model(tmp_path, rows, tokenizer)
    with pytest.raises(ConfigError, match=error) as caught:
        LLM("demo", backend="cpu", speculate=f"model:{path}")
    assert caught.value.param == "speculate"


def test_equal_sizes_need_no_tokenizer(tmp_path: Path) -> None:
    path = draft_model(tmp_path, VOCAB_SIZE, None)
    LLM("demo", backend="cpu", speculate=f"model:{path}", num_kv_blocks=20).close()


def test_a_tokenizer_that_was_copied_is_compared(tmp_path: Path) -> None:
    """--tokenizer names the target's tokens."""
    path = draft_model(tmp_path, VOCAB_SIZE, "other")
    other = tmp_path / "tokenizer"
    other.mkdir()
    shutil.copy(path / "tokenizer.json", other)
    config = {"tokenizer": str(other), "speculate": f"model:{path}", "num_kv_blocks": 20}
    LLM("demo", backend="cpu", **config).close()
