"""T5 and mT5 through the whole engine, against transformers' greedy answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.t5.modeling_t5 import T5Attention
from vllmx_core.errors import InvalidRequestError, TemplateError, UnsupportedModelError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.beams import BeamSearchParams
from vllmx_engine.llm import LLM
from vllmx_models.blocks.position_bias import LearnedBias
from vllmx_models.families.t5 import t5
from vllmx_models.formats.gguf.quantize.convert import quantize

from .t5_models import END, LENGTH, START, VOCAB, greedy, logits, make, save, save_gguf

LONG = 140
"""Answers beyond the distances that have buckets of their own."""
LENGTHS = {1: 12, 7: LONG, LENGTH - 1: 12, 41: 30, 64: 12, 130: 12}
"""Tokens of an answer by those of its prompt, without the end."""


class Models:
    """A family's model, its folder, and prompts with their answers."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = make(family)
        self.folder = str(save(self.model, folder))
        rng = np.random.default_rng(3)
        self.prompts = [[*rng.integers(2, VOCAB, n).tolist(), END] for n in LENGTHS]
        self.answers = [
            greedy(self.model, prompt, count)
            for prompt, count in zip(self.prompts, LENGTHS.values(), strict=True)
        ]


@pytest.fixture(scope="module", params=["t5", "v1_1", "mt5"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(request.param, tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save(make(), tmp_path_factory.mktemp("t5"))
    with LLM(str(folder), backend="numpy", dtype="float32") as made:
        yield made


@pytest.mark.parametrize("backend", ["numpy", "cpu", "torch"])
def test_ids_are_transformers(models: Models, backend: str) -> None:
    """Prompts of many lengths side by side, more than the store of features holds, twice."""
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for count in LENGTHS.values()
    ]
    options: dict[str, Any] = {"dtype": "float32", "encoder_cache_memory": 1}
    with LLM(models.folder, backend=backend, block_size=16, **options) as llm:
        for _ in range(2):
            prompts = [{"prompt_token_ids": prompt} for prompt in models.prompts]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == models.answers
            assert [one.prompt_token_ids for one in outputs] == models.prompts
    assert any(len(set(answer)) > 5 for answer in models.answers)


def test_preempted_answers_read_their_prompts(models: Models) -> None:
    """Answers go on from cached blocks, far behind the length of their short prompts, whose keys
    and values made room for others meanwhile."""
    prompts = [[one, END] for one in range(2, 10)]
    params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    found, preemptions = [], []
    for blocks in (22, 200):
        options: dict[str, Any] = {"num_kv_blocks": blocks, "encoder_cache_memory": 1}
        with LLM(models.folder, backend="cpu", dtype="float32", block_size=16, **options) as llm:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(asked, params, use_tqdm=False)
            found.append([one.outputs[0].token_ids for one in outputs])
            preemptions.append(llm._engine._core.stats().num_preemptions)
    assert found[0] == found[1]
    assert preemptions[0] > preemptions[1] == 0
    assert list(found[0][5]) == greedy(models.model, prompts[5], LONG)


def test_gguf_files(models: Models, tmp_path: Path) -> None:
    file = save_gguf(models.model, tmp_path / "t5.gguf")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(file), backend="numpy", dtype="float32") as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in models.prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = [list(one.outputs[0].token_ids) for one in outputs]
        assert found == [answer[:12] for answer in models.answers]
        assert llm.generate(["w5 w6"], params)[0].prompt_token_ids == [5, 6, END]
    with pytest.raises(UnsupportedModelError):
        quantize(load_registry(), Path(models.folder), tmp_path / "q.gguf", "q8_0", threads=1)


def test_texts_end_by_themselves(llm: LLM) -> None:
    """The tokenizer ends the prompt; the answer's text begins anew."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    output = llm.generate(["w5 w6 w7"], params, use_tqdm=False)[0]
    ids = [5, 6, 7, END]
    assert output.prompt_token_ids == ids
    answer = greedy(make(), ids, 4)
    assert output.outputs[0].text == " ".join(f"w{one}" for one in answer if one > END)
    some = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, logprobs=0)
    choices = llm.generate(["w5 w6 w7"], some, use_tqdm=False)[0].outputs
    assert len({tuple(one.token_ids) for one in choices}) == 3
    for one in choices:
        found = logits(make(), ids, one.token_ids[:-1]).log_softmax(-1)
        want = sum(float(row[token]) for row, token in zip(found, one.token_ids, strict=False))
        assert one.cumulative_logprob == pytest.approx(want, abs=1e-3)


def test_what_cannot_be_asked_is_refused(llm: LLM) -> None:
    def answered(prompt: Any, **params: Any) -> None:
        llm.generate([prompt], SamplingParams(**params), use_tqdm=False)

    long = {"prompt_token_ids": [5] * (LENGTH + 1)}
    answered(long, max_tokens=1, truncate_prompt_tokens=LENGTH)
    answered(long, max_tokens=1, truncate_prompt_tokens=-1)
    for prompt, params, message in (
        (long, {}, f"{LENGTH + 1} tokens, but the encoder reads {LENGTH}: shorten it"),
        ("w5 " * (LENGTH + 1), {}, f"but the encoder reads {LENGTH}"),
        (long, {"truncate_prompt_tokens": LENGTH + 1}, "truncate_prompt_tokens"),
        ({"prompt_token_ids": []}, {}, "no tokens"),
        ({"prompt_token_ids": [VOCAB]}, {}, f"token id {VOCAB}"),
        ("w5", {"prompt_logprobs": 1}, "prompt_logprobs are those of a decoder"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            answered(prompt, **params)
    with pytest.raises(InvalidRequestError, match="beam search follows the prompt"):
        llm.beam_search(["w5"], BeamSearchParams(beam_width=2, max_tokens=3))
    with pytest.raises(TemplateError, match="chat template"):
        llm.chat([{"role": "user", "content": "w5"}], use_tqdm=False)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (64, 1000)])
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_transformers(buckets: int, farthest: int, causal: bool) -> None:
    import torch

    distances = torch.arange(-300 if causal else -299, 1 if causal else 300)
    want = T5Attention._relative_position_bucket(distances, not causal, buckets, farthest)
    bias = LearnedBias("x", 301, buckets, farthest, causal)
    assert [bias._bucket(one) for one in distances.tolist()] == want.tolist()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("d_kv", 0), ("num_heads", None), ("feed_forward_proj", "gated-sin"),
        ("relative_attention_num_buckets", 6), ("relative_attention_max_distance", 16),
        ("decoder_start_token_id", VOCAB), ("n_positions", 1 << 20), ("scale_decoder_outputs", 1),
    ],
)  # fmt: skip
def test_configs_that_are_wrong(key: str, value: Any) -> None:
    config = make().config.to_dict()
    assert t5(config).shape.features.decoder_start == START
    with pytest.raises(UnsupportedModelError, match=key):
        t5({**config, key: value})
