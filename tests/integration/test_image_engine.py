"""Prompts with images through the whole engine, against transformers' greedy answers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vllmx_core.config import EngineConfig
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import heads_of
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.inline import InlineEngine
from vllmx_engine.client.request import Request
from vllmx_engine.core.cost import StepCost
from vllmx_engine.images.processor import image_input
from vllmx_engine.llm import LLM
from vllmx_engine.wire.images import PreparedImage
from vllmx_testing.model_suite import random_weights

from ..null.images.pictures import (  # noqa: TID252 - no package to name
    data_url,
    picture,
    stored,
)
from .image_models import END, FAMILIES, LEVELS, PAD, PROCESSOR, START, VARIANTS, Family, grey, save

ANSWER = 6
BLOCK = 16
NEVER = dict.fromkeys((PAD, 93, 94, 95), -100.0)
"""Tokens of images, videos and sound are text to the engine in an answer, but not to
transformers."""
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logit_bias=NEVER)


OTHER = FAMILIES["qwen3_vl"]
"""For what is alike whatever the model."""


TESTED = ("qwen3_vl", "qwen3_5_moe", "gemma3", "gemma4")


@pytest.fixture(scope="module", params=TESTED)
def family(request: pytest.FixtureRequest) -> Family:
    return (FAMILIES | VARIANTS)[request.param]


@pytest.fixture(scope="module")
def oracle(family: Family) -> Any:
    return family.make()


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def other() -> Any:
    return OTHER.make()


@pytest.fixture(scope="module")
def other_folder(other: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(other, tmp_path_factory.mktemp("other"))


def prompt(images: list[Any], lead: int = 3) -> tuple[list[int], list[int]]:
    """Ids, the first image behind `lead` tokens and its mark, and where the images are."""
    ids, starts = list(range(1, lead + 1)), []
    for patches, _ in images:
        ids.append(START)
        starts.append(len(ids))
        ids += [PAD] * (len(patches) // 4) + [END, 8]
    return [*ids, 11], starts


def check(family: Family, oracle: Any, ids: list[int], images: list[Any], answer: Any) -> None:
    """Each id of an answer is what transformers finds likeliest behind those before it."""
    answer = list(answer)
    found = family.logits(oracle, [*ids, *answer[:-1]], images)[len(ids) - 1 :]
    found[:, list(NEVER)] = -np.inf
    assert found.argmax(axis=1).tolist() == answer


def request(
    engine: InlineEngine, ids: list[int], starts: list[int], images: list[Any], length: int = ANSWER
) -> Request:
    params = replace(GREEDY, max_tokens=length)
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
        model=str(folder),
        dtype="float32",
        kv_cache_dtype="f32",
        block_size=BLOCK,
        num_threads=1,
        state_snapshot_tokens=BLOCK,
        num_state_slots=32,
        **({"num_kv_blocks": 64, "max_model_len": 128} | options),
    )


CASES = {
    "two images, one at a block's end": ([(4, 6, 0), (8, 2, 1)], 15),
    "an image over blocks": ([(8, 8, 2)], 3),
    "equal images": ([(2, 4, 3), (2, 4, 3)], 4),
}


RUNS = [
    *((family, "torch", budget) for family in TESTED for budget in (64, 7)),
    ("qwen3_vl", "cpu", 64),
    ("qwen3_vl", "cpu", 1),
    ("gemma3", "cpu", 7),
    ("gemma4", "cpu", 64),
    ("gemma4, clipped", "cpu", 64),
    ("qwen3_vl", "metal", 64),
    ("qwen3_5_moe", "cpu", 5),
    ("qwen2_5_vl", "torch", 7),
]


@pytest.mark.parametrize(("family", "backend", "budget"), RUNS, indirect=["family"])
def test_answers(
    family: Family,
    oracle: Any,
    folder: Path,
    backend: str,
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = max(budget, family.spans)
    options = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget - family.spans + 1, 4)}
    engine = InlineEngine(config(folder, backend=backend, target_itl="none", **options))
    try:
        passes = Passes(engine, monkeypatch)
        made = []
        for sizes, lead in CASES.values():
            images = [family.image(*size) for size in sizes]
            made.append((*prompt(images, lead), images))
        text, length = prompt([])[0], ANSWER if budget == 64 else 40
        together = [request(engine, *one, length) for one in made]
        found = run(engine, *together, request(engine, text, [], []))
        for output, (ids, _, images) in zip(found, [*made, (text, [], [])], strict=True):
            check(family, oracle, ids, images, output.outputs[0].token_ids)
        assert passes.images == 4  # each that is not equal to another, once
        again = run(engine, request(engine, *made[1], length))[0]
        assert again.outputs[0].token_ids == found[1].outputs[0].token_ids
        assert again.num_cached_tokens == (len(made[1][0]) - 1) // BLOCK * BLOCK
        assert passes.images == 4
    finally:
        engine.close()


def test_preemption(family: Family, oracle: Any, folder: Path) -> None:
    """Three sequences of up to 96 tokens over 12 blocks of 16: one gives way, and is computed
    again with its images."""
    engine = InlineEngine(config(folder, backend="torch", num_kv_blocks=12, max_model_len=96))
    try:
        made = []
        for seed in (3, 4, 5):
            images = [family.image(6, 8, seed)]
            made.append((*prompt(images, seed), images))
        found = run(engine, *(request(engine, *one, 64) for one in made))
        assert engine._core.stats().num_preemptions > 0
        for output, (ids, _, images) in zip(found, made, strict=True):
            check(family, oracle, ids, images, output.outputs[0].token_ids)
    finally:
        engine.close()


def test_an_abort_while_the_tower_runs(
    other: Any, other_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass in parts, whose request goes away after the first: the next one about the same image,
    one about another and one of text are answered as ever, and nothing stays behind."""
    monkeypatch.setattr(StepCost, "tower_share", lambda *_: 0.4)
    engine = InlineEngine(config(other_folder, backend="cpu"))
    try:
        parts: list[tuple[float, float]] = []
        encode = engine._core._model.encode

        def noted(plan: Any, begin: float = 0.0, end: float = 1.0) -> None:
            parts.append((begin, end))
            encode(plan, begin, end)

        monkeypatch.setattr(engine._core._model, "encode", noted)
        made = []
        for seed in (1, 2):
            images = [OTHER.image(6, 8, seed)]
            made.append((*prompt(images), images))
        gone = engine.submit(request(engine, *made[0]))
        engine._step()
        assert parts == [(0.0, 0.4)]
        engine.abort(gone)
        assert gone.output().outputs[0].finish_reason == "abort"
        text = prompt([])[0]
        found = run(engine, *(request(engine, *one) for one in made), request(engine, text, [], []))
        for output, (ids, _, images) in zip(found, [*made, (text, [], [])], strict=True):
            check(OTHER, other, ids, images, output.outputs[0].token_ids)
        stats = engine._core.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        asked = len(parts)
        run(engine, request(engine, *made[0]))
        assert len(parts) == asked  # its features are there
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4"], indirect=True)
def test_ranks_have_the_tower_whole(
    family: Family, oracle: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks answer as transformers does, equal images are seen once, and a pass comes in parts
    while a row decodes beside it; ids of every step are compared between ranks, besides."""
    monkeypatch.setenv("VLLMX_TP_COMPARE", "1")
    monkeypatch.setattr(StepCost, "tower_share", lambda *_: 0.4)  # however little decodes leave
    options = replace(config(folder, backend="cpu"), tensor_parallel_size=2, num_threads=2)
    engine = InlineEngine(options)
    try:
        assert engine.info.takes_images
        passes = Passes(engine, monkeypatch)
        made = []
        for sizes, lead in CASES.values():
            images = [family.image(*size) for size in sizes]
            made.append((*prompt(images, lead), images))
        text = prompt([])[0]
        found = run(
            engine,
            request(engine, text, [], [], 64),
            *(request(engine, *one) for one in made),
        )
        for output, (ids, _, images) in zip(found, [(text, [], []), *made], strict=True):
            check(family, oracle, ids, images, output.outputs[0].token_ids)
        assert passes.images == 4
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_a_step_must_hold_an_image_whose_tokens_see_each_other(
    family: Family, folder: Path
) -> None:
    options = {"max_num_batched_tokens": 9, "max_num_seqs": 2}
    engine = InlineEngine(config(folder, backend="numpy", **options))
    try:
        images = [family.image(6, 6, 0)]
        state = engine.submit(request(engine, *prompt(images), images))
        engine.run([state])
        assert "--max-num-batched-tokens to 10" in str(state.error)
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_drafts_leave_room_for_an_image_whose_tokens_see_each_other(
    family: Family, folder: Path
) -> None:
    sizes = {"max_num_batched_tokens": 17, "max_num_seqs": 8, "num_kv_blocks": 200}
    drafting = {"speculate": "twin", "speculate_tokens": "4"}
    engine = InlineEngine(config(folder, backend="cpu", **sizes, **drafting))
    try:
        texts = [engine.submit(request(engine, [1 + i, 2, 3], [], [], 80)) for i in range(7)]
        for _ in range(10):
            engine._step()
        images = [family.image(6, 6, 1)]
        engine.run([engine.submit(request(engine, *prompt(images), images))])
        assert not any(text.output().outputs[0].finish_reason for text in texts)
        assert engine._core.stats().num_draft_tokens > 100
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen3_5_moe"], indirect=True)
@pytest.mark.parametrize("backend", ["cpu", "torch", "metal"])
def test_heads_draft_behind_images(
    family: Family, oracle: Any, folder: Path, tmp_path: Path, backend: str
) -> None:
    """The rotations of a layer of multi-token prediction have the axes of the others."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    checkpoint = open_checkpoint(load_registry(), folder)
    heads = heads_of(build_model(load_registry(), checkpoint))
    checkpoint.weights.close()
    assert heads is not None
    source = random_weights(heads)
    own = [name for name in source.names() if name.startswith("mtp.")]
    tensors = {name: source.part(name).dequantize() for name in own}
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    drafting = {"speculate": "heads", "speculate_tokens": "3", "max_num_batched_tokens": 17}
    engine = InlineEngine(config(tmp_path, backend=backend, **drafting))
    try:
        images = [family.image(4, 6, 0), family.image(8, 2, 1)]
        ids, starts = prompt(images)
        for output in run(engine, *(request(engine, ids, starts, images) for _ in range(2))):
            check(family, oracle, ids, images, output.outputs[0].token_ids)
        assert engine._core.stats().num_draft_tokens > 0
    finally:
        engine.close()


def test_other_images_of_equal_size_are_no_hit(family: Family, oracle: Any, folder: Path) -> None:
    engine = InlineEngine(config(folder, backend="numpy"))
    hybrid = engine._core._model.info.num_state_slots > 0
    try:
        for seed in (5, 6):
            images = [family.image(4, 8, seed)]
            ids, starts = prompt(images, 19)
            output = run(engine, request(engine, ids, starts, images))[0]
            known = 0 if seed == 5 else BLOCK  # the text before it
            found = output.num_cached_tokens
            assert found == known or (hybrid and found < known)
            check(family, oracle, ids, images, output.outputs[0].token_ids)
    finally:
        engine.close()


@pytest.mark.parametrize("backend", ["torch", "cpu", "metal"])
def test_features_are_made_again_once_others_needed_their_rows(
    other: Any, other_folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"encoder_cache_memory": 0, "enable_prefix_caching": False}
    engine = InlineEngine(config(other_folder, backend=backend, **options))
    try:
        passes = Passes(engine, monkeypatch)
        assert engine._core._model.info.num_feature_rows == 128
        for seed in (7, 8, 7):
            images = [OTHER.image(16, 18, seed)]  # 72 tokens
            ids, starts = prompt(images)
            output = run(engine, request(engine, ids, starts, images))[0]
            check(OTHER, other, ids, images, output.outputs[0].token_ids)
        assert passes.images == 3
        both = [prompt([OTHER.image(16, 18, seed)]) for seed in (7, 8)]
        made = [
            request(engine, ids, starts, [OTHER.image(16, 18, seed)])
            for (ids, starts), seed in zip(both, (7, 8), strict=True)
        ]
        for output, (ids, _), seed in zip(run(engine, *made), both, (7, 8), strict=True):
            check(OTHER, other, ids, [OTHER.image(16, 18, seed)], output.outputs[0].token_ids)
    finally:
        engine.close()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_chat_with_images(other: Any, other_folder: Path, backend: str) -> None:
    """The whole way is tested, from a data URL to the answer: decoded, prepared, placed, seen."""
    pictures = [picture(40, 24, seed=1), picture(17, 33, seed=2)]
    parts: list[Any] = [{"type": "text", "text": "w5 w6"}]
    for one in pictures:
        parts.append({"type": "image_url", "image_url": {"url": data_url(stored(one))}})
        parts.append({"type": "text", "text": " w7"})
    given: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "f32", "num_kv_blocks": 32}
    wrong = [{"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"}]}]
    with LLM(str(other_folder), backend=backend, max_model_len=200, **given) as llm:
        output = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)[0]
        # Escaped, the mark is a word of this tokenizer's vocabulary, which has the same id.
        with pytest.raises(InvalidRequestError, match="the token that stands for images"):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    given |= {"special_tokens_in_text": "keep"}
    llm = LLM(str(other_folder), backend=backend, max_model_len=200, **given)
    with llm, pytest.raises(InvalidRequestError, match="marks"):
        llm.chat(wrong, GREEDY, use_tqdm=False)
    theirs = Qwen2VLImageProcessorPil.from_dict(PROCESSOR)
    images, ids = [], [5, 6]
    for one in pictures:
        seen = theirs(one, return_tensors="np")
        images.append((seen["pixel_values"], tuple(seen["image_grid_thw"][0].tolist())))
        ids += [START, *[PAD] * (len(images[-1][0]) // 4), END, 7]
    ids.append(11)
    assert output.prompt_token_ids == ids
    check(OTHER, other, ids, images, output.outputs[0].token_ids)
