"""Trained models against the greedy ids and logits that were stored with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
DEMO_REFERENCE = ROOT / "tests" / "data" / "demo" / "reference_greedy.json"
STORIES = ROOT.parent / "shared" / "models" / "stories260K"
LONGEST = 237  # prompt of the demo cases


@pytest.mark.parametrize("chunk", [1, 7, LONGEST])
def test_demo_model(open_runner: Callable[..., Any], chunk: int) -> None:
    from vllmx_demo.source import demo_model

    cases = json.loads(DEMO_REFERENCE.read_text())["cases"]
    assert max(len(case["prompt_ids"]) for case in cases) == LONGEST
    if chunk == 1:  # token by token is slow; the long prompts are chunked below
        cases = [case for case in cases if len(case["prompt_ids"]) < 20]
    runner = open_runner(demo_model("demo", None, False), 320, max_num_seqs=len(cases))
    found = runner.greedy([case["prompt_ids"] for case in cases], 64, chunk)
    assert found == [case["greedy_ids"] for case in cases]


@pytest.fixture
def stories(open_runner: Callable[..., Any]) -> Any:
    if not STORIES.is_dir():
        pytest.skip("../shared/models/stories260K is absent (its licence forbids a copy here)")
    return open_runner(STORIES, 512)


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_stories_greedy(stories: Any, chunk: int) -> None:
    """The story is told from the first token, and again from the middle with a prompt that is
    chunked."""
    reference = json.loads((STORIES / "reference_greedy.json").read_text())
    prompt, ids = reference["prompt_ids"], reference["greedy_ids"]
    assert len(ids) == 256
    if chunk == 1:
        assert stories.greedy([prompt], 256, chunk) == [ids]
    assert stories.greedy([prompt + ids[:128]], 128, chunk) == [ids[128:]]


def test_stories_logits(stories: Any) -> None:
    with np.load(STORIES / "reference_logits.npz") as reference:
        tokens, logits = reference["input_ids"], reference["logits"].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = stories.log_softmax(tokens.tolist(), 16)
    assert (np.isfinite(found).sum(-1) == 64).all()
    error = np.nanmax(np.abs(found - expected)) / np.abs(logits).max()
    print(f"relative error {error:.2e}")  # pytest -rP shows it
    assert error < 2e-5
