"""Requests of all kinds, with images and without, equal those of a run without drafts to the last
bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import save_file
from vllmx_core.model import OWN_TENSOR
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.chat_images import image_input
from vllmx_engine.client.inline import InlineEngine
from vllmx_engine.client.request import Request
from vllmx_engine.core.drafters import Guess
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.speculation import Drafting
from vllmx_engine.wire.images import PreparedImage
from vllmx_engine.wire.messages import CoreStats
from vllmx_models.families.gemma4_assistant import gemma4_assistant
from vllmx_testing.model_suite import random_weights

from tests.usable_backends import backend_spec

from .image_models import FAMILIES, LEVELS, Family, grey, save
from .test_image_engine import NEVER, config, prompt

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "stop_token_ids": (20, 40, 60)},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 9, "n": 2},
    {"temperature": 1.5, "min_p": 0.02, "logprobs": 0},
    {
        "temperature": 0.3,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "stop": ("w2", "w50"),
    },
    {"temperature": 0.2, "presence_penalty": 1.0, "min_tokens": 12, "stop_token_ids": (11, 33)},
    {"temperature": 0.5, "allowed_token_ids": tuple(range(12, 30)), "logprobs": 3},
)
PROMPTS = ((), ((4, 6, 0), (8, 2, 1)), ((8, 8, 2),), ((2, 4, 3),))
"""The images of each prompt."""
KINDS = ("qwen3_vl", "gemma4", "qwen3_5_moe")
"""Attention alone, windows and images seen both ways, recurrent layers."""


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Family, Path]:
    backend_spec("cpu")
    family = FAMILIES[request.param]
    return family, save(family.make(), tmp_path_factory.mktemp("images"))


def request_for(
    engine: InlineEngine, family: Family, shapes: Any, params: SamplingParams
) -> Request:
    images = [family.image(*shape) for shape in shapes]
    ids, starts = prompt(images)
    ids = [*ids[:-1], 12, 13, 14, 15, 12, 13, 14, 15, 12, 13] if not shapes else ids
    made = engine.builder.build(ids, params)
    prepared = [PreparedImage.of(grey(rows), LEVELS, grid, len(rows) // 4) for rows, grid in images]
    inputs = [image_input(start, one) for start, one in zip(starts, prepared, strict=True)]
    made.core[:] = [msgspec.structs.replace(one, images=inputs) for one in made.core]
    return made


class Known:
    """Drafts answers that it saw end, with every seventh token wrong."""

    def __init__(self) -> None:
        self._answers: dict[Any, list[int]] = {}

    def guess(self, sequence: Sequence, most: int) -> Guess:
        """See `Drafter`."""
        answer = self._answers.get(_key(sequence), [])[len(sequence.tokens) - sequence.num_prompt :]
        ids = [5 if token % 7 == 0 else token for token in answer[:most]]
        return Guess(ids)

    def ended(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._answers[_key(sequence)] = sequence.tokens[sequence.num_prompt :].tolist()


def _key(sequence: Sequence) -> tuple[bytes, int]:
    return sequence.request.prompt, sequence.request.seed


def answers(
    served: tuple[Family, Path], known: Known | None = None, **options: Any
) -> tuple[list[Any], CoreStats]:
    """Ids, ends and log-probabilities of 64 requests, and the counters behind them."""
    family, folder = served
    sizes = {"backend": "cpu", "num_kv_blocks": 120, "max_num_seqs": 6}
    engine = InlineEngine(config(folder, **sizes | options))
    if known is not None:
        engine._core.draft_with(Drafting(known, 3))
    try:
        states = []
        for number in range(64):
            fields, shapes = PARAMS[number % 8], PROMPTS[number // 8 % 4]
            params = SamplingParams(max_tokens=20, seed=number, logit_bias=NEVER, **fields)
            states.append(engine.submit(request_for(engine, family, shapes, params)))
        engine.run(states)
        found = [
            (choice.token_ids, choice.finish_reason, choice.logprobs)
            for state in states
            for choice in state.output().outputs
        ]
        assert not any(state.error for state in states)
        return found, engine._core.stats()
    finally:
        engine.close()


SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_num_batched_tokens": 40},
    {"num_kv_blocks": 40, "max_num_seqs": 8},
)
"""Chunks that cut prompts, and too few blocks for all rows."""


def test_answers_do_not_depend_on_drafts(served: tuple[Family, Path]) -> None:
    known = Known()
    plain, stats = answers(served, known)
    assert stats.num_draft_tokens == 0
    assert {reason for _, reason, _ in plain} == {"stop", "length"}
    for options in SCHEDULES:
        found, stats = answers(served, known, **options)
        assert found == plain
        assert 100 < stats.num_accepted_tokens < stats.num_draft_tokens
        drafting = {"speculate": "ngram", "speculate_tokens": "3"}
        assert answers(served, **drafting, **options)[0] == plain


@pytest.mark.parametrize("served", ["qwen3_vl", "gemma4"], indirect=True)
def test_a_twin_changes_no_answer(served: tuple[Family, Path]) -> None:
    plain, _ = answers(served)
    for options in SCHEDULES:
        found, stats = answers(served, speculate="twin", speculate_tokens="3", **options)
        assert found == plain
        assert 100 < stats.num_accepted_tokens < stats.num_draft_tokens


def assistant_of(folder: Path, target: Path) -> Path:
    """A random assistant of a Gemma 4 with images."""
    theirs = json.loads((target / "config.json").read_text())
    text = {key: one for key, one in theirs["text_config"].items() if key != "per_layer_config"}
    size = text["hidden_size"]
    text |= {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 16}
    text |= {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "global_head_dim": 24}
    text |= {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0}
    config = {"architectures": ["Gemma4AssistantForCausalLM"], "text_config": text}
    config |= {"model_type": "gemma4_assistant", "backbone_hidden_size": size}
    source = random_weights(gemma4_assistant({**config, "target_config": theirs}), 1)
    own = [name for name in source.names() if "language_model" not in name]  # not the target's
    names = {name: name.removeprefix(OWN_TENSOR) for name in own}
    tensors = {ours: source.part(name).dequantize() for name, ours in names.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("served", ["gemma4"], indirect=True)
def test_an_assistant_changes_no_answer(served: tuple[Family, Path], tmp_path: Path) -> None:
    plain, _ = answers(served)
    drafting = {"speculate": f"model:{assistant_of(tmp_path, served[1])}", "speculate_tokens": "3"}
    for options in SCHEDULES:
        found, stats = answers(served, **drafting, **options)
        assert found == plain
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
