"""Prompts with images through the whole engine, against transformers' greedy answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vllmx_core.config import EngineConfig
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.chat_images import image_input
from vllmx_engine.client.inline import InlineEngine
from vllmx_engine.client.request import Request
from vllmx_engine.images.prepared import PreparedImage
from vllmx_engine.llm import LLM

from ..null.images.pictures import (  # noqa: TID252 - no package to name
    data_url,
    picture,
    stored,
)
from .image_models import END, LEVELS, PAD, PROCESSOR, START, grey, image, logits, qwen3_vl, save

ANSWER = 6
BLOCK = 16


@pytest.fixture(scope="module")
def oracle() -> Any:
    return qwen3_vl()


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle, tmp_path_factory.mktemp("qwen3_vl"))


def prompt(images: list[Any], lead: int = 3) -> tuple[list[int], list[int]]:
    """Ids, the first image behind `lead` tokens and its mark, and where the images are."""
    ids, starts = list(range(1, lead + 1)), []
    for patches, _ in images:
        ids.append(START)
        starts.append(len(ids))
        ids += [PAD] * (len(patches) // 4) + [END, 8]
    return [*ids, 11], starts


def wanted(oracle: Any, ids: list[int], images: list[Any]) -> list[int]:
    ids, count = list(ids), len(ids)
    for _ in range(ANSWER):
        ids.append(int(logits(oracle, ids, images)[-1].argmax()))
    return ids[count:]


def request(engine: InlineEngine, ids: list[int], starts: list[int], images: list[Any]) -> Request:
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    made = engine.builder.build(ids, params)
    prepared = [PreparedImage.of(grey(rows), LEVELS, grid, len(rows) // 4) for rows, grid in images]
    inputs = [image_input(start, one) for start, one in zip(starts, prepared, strict=True)]
    core = [msgspec.structs.replace(one, images=inputs) for one in made.core]
    return replace(made, core=core)


def run(engine: InlineEngine, *requests: Request) -> list[Any]:
    states = [engine.submit(one) for one in requests]
    engine.run(states)
    for state in states:
        assert state.error is None, state.error
    return [state.output() for state in states]


class Passes:
    """Counts what a tower is given."""

    def __init__(self, engine: InlineEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images = 0
        model = engine._core._model
        encode = model.encode

        def counted(plan: Any, begin: float = 0.0, end: float = 1.0) -> None:
            self.images += plan.num_rows * (end == 1)
            encode(plan, begin, end) if end - begin < 1 else encode(plan)

        monkeypatch.setattr(model, "encode", counted)


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), dtype="float32", kv_cache_dtype="f32", block_size=BLOCK,
        max_model_len=128, num_kv_blocks=64, num_threads=1, **options,
    )  # fmt: skip


CASES = {
    "two images, one at a block's end": ([image(4, 6, 0), image(8, 2, 1)], 15),
    "an image over blocks": ([image(8, 8, 2)], 3),
    "equal images": ([image(2, 4, 3), image(2, 4, 3)], 4),
}


@pytest.mark.parametrize(
    ("backend", "budget"), [("torch", 64), ("cpu", 64), ("cpu", 5), ("metal", 64)]
)
def test_answers(
    oracle: Any, folder: Path, backend: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "target_step_ms": None}
    engine = InlineEngine(config(folder, backend=backend, **options))
    try:
        passes = Passes(engine, monkeypatch)
        made, answers = [], []
        for images, lead in CASES.values():
            ids, starts = prompt(images, lead)
            made.append((ids, starts, images))
            answers.append(wanted(oracle, ids, images))
        text = prompt([])[0]
        together = [request(engine, *one) for one in made] + [request(engine, text, [], [])]
        found = [output.outputs[0].token_ids for output in run(engine, *together)]
        assert found == [*answers, wanted(oracle, text, [])]
        assert passes.images == 4  # each that is not equal to another, once
        again = run(engine, request(engine, *made[1]))[0]
        assert again.outputs[0].token_ids == answers[1]
        assert again.num_cached_tokens == (len(made[1][0]) - 1) // BLOCK * BLOCK
        assert passes.images == 4
    finally:
        engine.close()


def test_other_images_of_equal_size_are_no_hit(oracle: Any, folder: Path) -> None:
    engine = InlineEngine(config(folder, backend="numpy"))
    try:
        for seed in (5, 6):
            images = [image(4, 8, seed)]
            ids, starts = prompt(images, 19)
            output = run(engine, request(engine, ids, starts, images))[0]
            assert output.num_cached_tokens == (0 if seed == 5 else BLOCK)  # the text before it
            assert output.outputs[0].token_ids == wanted(oracle, ids, images)
    finally:
        engine.close()


@pytest.mark.parametrize("backend", ["torch", "cpu", "metal"])
def test_features_are_made_again_once_others_needed_their_rows(
    oracle: Any, folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"encoder_cache_memory": 0, "enable_prefix_caching": False}
    engine = InlineEngine(config(folder, backend=backend, **options))
    try:
        passes = Passes(engine, monkeypatch)
        assert engine._core._model.info.num_feature_rows == 128
        for seed in (7, 8, 7):
            images = [image(16, 18, seed)]  # 72 tokens
            ids, starts = prompt(images)
            output = run(engine, request(engine, ids, starts, images))[0]
            assert output.outputs[0].token_ids == wanted(oracle, ids, images)
        assert passes.images == 3
        both = [prompt([image(16, 18, seed)]) for seed in (7, 8)]
        made = [
            request(engine, ids, starts, [image(16, 18, seed)])
            for (ids, starts), seed in zip(both, (7, 8), strict=True)
        ]
        for output, (ids, _), seed in zip(run(engine, *made), both, (7, 8), strict=True):
            assert output.outputs[0].token_ids == wanted(oracle, ids, [image(16, 18, seed)])
    finally:
        engine.close()


@pytest.mark.parametrize("wrong", ["start", "count", "grid", "bytes", "levels", "order"])
def test_images_that_do_not_fit_their_prompt(folder: Path, wrong: str) -> None:
    engine = InlineEngine(config(folder, backend="numpy"))
    try:
        images = [image(2, 2, 0), image(2, 2, 1)]
        ids, starts = prompt(images)
        made = request(engine, ids, starts, images)
        first, second = made.core[0].images
        change: dict[str, Any] = {
            "start": {"start": 200}, "count": {"num_tokens": 2}, "grid": {"grid": (1, 2, 3)},
            "bytes": {"patches": first.patches[:-4]}, "levels": {"levels": b""},
            "order": {"start": 50},
        }[wrong]  # fmt: skip
        broken = [msgspec.structs.replace(first, **change), second]
        core = [msgspec.structs.replace(one, images=broken) for one in made.core]
        state = engine.submit(replace(made, core=core))
        engine.run([state])
        assert "image" in str(state.error)
        assert np.isfinite(len(run(engine, made)))
    finally:
        engine.close()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_chat_with_images(oracle: Any, folder: Path, backend: str) -> None:
    """From a data URL to the answer: decoded, prepared, placed, seen."""
    pictures = [picture(40, 24, seed=1), picture(17, 33, seed=2)]
    parts: list[Any] = [{"type": "text", "text": "w5 w6"}]
    for one in pictures:
        parts.append({"type": "image_url", "image_url": {"url": data_url(stored(one))}})
        parts.append({"type": "text", "text": " w7"})
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    given: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "f32", "num_kv_blocks": 32}
    wrong = [{"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"}]}]
    with LLM(str(folder), backend=backend, max_model_len=200, **given) as llm:
        output = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)[0]
        with pytest.raises(InvalidRequestError, match="marks"):
            llm.chat(wrong, params, use_tqdm=False)
    theirs = Qwen2VLImageProcessorPil.from_dict(PROCESSOR)
    images, ids = [], [5, 6]
    for one in pictures:
        seen = theirs(one, return_tensors="np")
        images.append((seen["pixel_values"], tuple(seen["image_grid_thw"][0].tolist())))
        ids += [START, *[PAD] * (len(images[-1][0]) // 4), END, 7]
    ids.append(11)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == wanted(oracle, ids, images)
