"""The comparison of speculation: what follows in its texts is known, and drafts from the prompt are
wrong at the edits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress
from vllmx import LLM, SamplingParams
from vllmx_engine.core.drafters import match_ends

from tests.bench_scripts import bench_modules


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with bench_modules(monkeypatch) as load:
        yield load


def test_a_model_with_a_chain_counts(bench: Any, tmp_path: Path) -> None:
    shape = bench("model_shapes").SHAPES["qwen3-tiny-chain"]
    with Progress(disable=True) as progress:
        bench("random_model").write_model(tmp_path, shape, 0, False, progress)
    prompt = bench("speculate").edited_file(5, 60, 12, shape.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(str(tmp_path), backend="numpy", max_model_len=256, speculate="ngram") as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert llm.stats().num_accepted_tokens > 20
    first = prompt[-1]
    assert list(output.outputs[0].token_ids) == list(range(first + 1, first + 61))


@pytest.mark.parametrize("seed", range(8))
def test_a_file_is_the_answer_with_edits(bench: Any, seed: int) -> None:
    prompt = bench("speculate").edited_file(seed, 400, 24, 2048)
    file, first = prompt[8 : -1 - 16], prompt[-1]
    kept = sorted({*file} & {*range(first, first + 400)})
    assert file[0] == first
    assert 0.8 * 400 < len(kept) < 400
    assert prompt[:8] == prompt[-9:-1]  # so that a look-up finds the beginning
    ends = match_ends(bench("speculate").np.array(prompt, "i4"), 2)
    assert ends.tolist() == [9]


def test_what_a_server_says_of_its_drafts(bench: Any) -> None:
    kept_share = bench("speculate").kept_share
    details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}
    assert kept_share({"usage": {"completion_tokens_details": details}}) == 0.75
    assert kept_share({"usage": {}, "timings": {"draft_n": 4, "draft_n_accepted": 1}}) == 0.25
    for none in ({"usage": {}}, {"usage": {"completion_tokens_details": None}, "timings": {}}):
        assert kept_share(none) is None


def test_flags_of_each_engine(bench: Any, tmp_path: Path) -> None:
    speculate = bench("speculate")
    flags = speculate.ngram_flags(16)
    assert [each["off"] for each in flags.values()] == [[], [], []]
    config = json.loads(flags["vllm"]["ngram"][1])
    assert config["num_speculative_tokens"] == 16
    draft = speculate.twin_flags(tmp_path / "q4_k_m.gguf", 4)
    assert str(tmp_path / "q4_k_m.gguf") in draft["llama.cpp"]["q4_k_m, 4"]
    assert draft["vllmx"]["twin, 4"] == ["--speculate", "twin", "--speculate-tokens", "4"]
