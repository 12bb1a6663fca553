"""Core requests, made of a prompt and parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from vllmx_core.errors import ConfigError, ContextLengthError, InvalidRequestError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.request import RequestBuilder, RequestOptions
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.ipc import AddRequest, encode_frame
from vllmx_engine.wire.messages import CoreInfo


@pytest.fixture
def builder(tokenizer: Tokenizer, info: CoreInfo) -> RequestBuilder:
    return RequestBuilder(tokenizer, info)


def test_prompt_forms_are_equal(builder: RequestBuilder) -> None:
    ids = [104, 105]
    forms: list[Any] = [
        "hi",
        ids,
        (104, 105),
        np.array(ids),
        {"prompt": "hi"},
        {"prompt_token_ids": ids},
    ]
    assert [builder.build(form).prompt_ids for form in forms] == [ids] * len(forms)
    assert [builder.build(form).prompt for form in forms] == ["hi", None, None, None, "hi", None]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        ["a"],
        [1.0],
        [True],
        [-1],
        [259],
        {"prompt_token_ids": "abc"},
        {"text": "hi"},
        5,
        [None],
    ],
)
def test_bad_prompts_are_refused(builder: RequestBuilder, prompt: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        builder.build(prompt)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


def test_prompt_must_leave_room(builder: RequestBuilder) -> None:
    assert builder.build([1] * 63).core[0].max_tokens == 1
    with pytest.raises(
        ContextLengthError,
        match=r"prompt is too long: it has 64 tokens.*maximum context length is 64 tokens.*63",
    ):
        builder.build([1] * 64)


@pytest.mark.parametrize(("asked", "resolved"), [(None, 54), (20, 20), (54, 54), (1000, 54)])
def test_max_tokens_is_at_most_the_room(
    builder: RequestBuilder, asked: int | None, resolved: int
) -> None:
    request = builder.build([1] * 10, SamplingParams(max_tokens=asked))
    assert request.core[0].max_tokens == resolved


def test_choices_follow_a_leader(builder: RequestBuilder) -> None:
    params = SamplingParams(n=2, best_of=3, seed=(1 << 64) - 2, prompt_logprobs=1)
    options = RequestOptions(priority=3, client="me", cache_salt="salt")
    core = builder.build("hi", params, options=options).core
    assert [request.leader for request in core] == [None, core[0].request_id, core[0].request_id]
    assert core[0].seed == (1 << 64) - 2
    assert [request.params.prompt_logprobs for request in core] == [1, None, None]
    assert [request.params.logprobs for request in core] == [0, 0, 0]  # to rank them
    assert {(request.priority, request.client, request.cache_salt) for request in core} == {
        (3, "me", "salt")
    }
    assert len({request.request_id for request in core}) == 3


def test_tokens_are_awaited_where_a_text_may_end_the_answer(builder: RequestBuilder) -> None:
    options = RequestOptions(at_end=True)
    for stop, at_end in (((), True), (("END",), False)):
        request = builder.build("hi", SamplingParams(n=2, stop=stop), options=options)
        assert [core.at_end for core in request.core] == [at_end, at_end]


def test_neighbouring_seeds_share_no_choice(builder: RequestBuilder) -> None:
    seeds = [
        core.seed
        for seed in (*range(-40, 40), (1 << 64) - 1 - 50)
        for core in builder.build("hi", SamplingParams(n=16, seed=seed)).core
    ]
    assert len(set(seeds)) == len(seeds) == 81 * 16
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_texts_of_the_parameters_stay_here(builder: RequestBuilder) -> None:
    params = SamplingParams(n=2, stop=("\ud800", "END"), bad_words=("bad",), top_k=3)
    request = builder.build("hi", params)
    assert request.params.stop == ("\ud800", "END")
    for core in request.core:
        encode_frame(AddRequest(core))  # a lone surrogate has no UTF-8
        assert (core.params.stop, core.params.bad_words, core.params.top_k) == ((), (), 3)
        assert core.bad_words_ids


@pytest.mark.parametrize("priority", [1 << 31, -(1 << 31) - 1, 1 << 70, 1.5, True, None])
def test_priorities_have_bounds(priority: Any) -> None:
    with pytest.raises(InvalidRequestError, match="priority must be"):
        RequestOptions(priority)


def test_core_ids_never_repeat(builder: RequestBuilder) -> None:
    first, second = (builder.build("hi", request_id="same") for _ in range(2))
    assert first.request_id == second.request_id == "same"
    assert first.core[0].request_id != second.core[0].request_id


def test_config_seed_repeats_a_run(tokenizer: Tokenizer, info: CoreInfo) -> None:
    def seeds(seed: int | None) -> list[int]:
        builder = RequestBuilder(tokenizer, info, seed)
        return [builder.build("hi").core[0].seed for _ in range(3)]

    assert seeds(5) == seeds(5)
    assert len(set(seeds(5))) == 3
    assert seeds(5) != seeds(6)
    assert seeds(None) != seeds(None)


def test_negative_seeds_wrap(builder: RequestBuilder) -> None:
    assert builder.build("hi", SamplingParams(seed=-1)).core[0].seed == (1 << 64) - 1


def test_stop_ids(tokenizer: Tokenizer, info: CoreInfo) -> None:
    info = msgspec.structs.replace(info, generation_config={"eos_token_id": [7, 8]})
    builder = RequestBuilder(tokenizer, info)
    params = SamplingParams(stop_token_ids=(65,))
    assert builder.build("hi", params).core[0].stop_ids == [7, 8, 256, 65]
    params = SamplingParams(stop_token_ids=(65,), ignore_eos=True)
    assert builder.build("hi", params).core[0].stop_ids == [65]


def test_ids_outside_the_vocabulary_are_refused(builder: RequestBuilder) -> None:
    with pytest.raises(InvalidRequestError, match="259") as caught:
        builder.build("hi", SamplingParams(logit_bias={259: 1.0}))
    assert caught.value.param == "logit_bias"


def test_bad_words_with_and_without_a_space(info: CoreInfo) -> None:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"dog": 0, " dog": 1, "cat": 2, " ": 3}, unk_token="dog")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(" ?dog|cat| "), "isolated"
    )
    builder = RequestBuilder(Tokenizer(backend), info)
    request = builder.build([1], SamplingParams(bad_words=("dog", " cat")))
    assert request.core[0].bad_words_ids == [[0], [1], [2]]
    with pytest.raises(InvalidRequestError, match="not a word"):
        builder.build([1], SamplingParams(bad_words=("  ",)))


def test_a_bad_word_that_has_fewer_tokens_behind_a_space(info: CoreInfo) -> None:
    """Byte-level vocabularies hold " word" oftener than "word"."""
    model = tokenizers.models.WordLevel({"P": 0, "aris": 1, " Paris": 2}, unk_token="P")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(" Paris|P|aris"), "isolated"
    )
    request = RequestBuilder(Tokenizer(backend), info).build(
        [1], SamplingParams(bad_words=("Paris",))
    )
    assert request.core[0].bad_words_ids == [[0, 1], [2]]


def test_defaults_come_from_the_model(tokenizer: Tokenizer, info: CoreInfo) -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 33,
        "do_sample": True,
    }
    builder = RequestBuilder(tokenizer, msgspec.structs.replace(info, generation_config=config))
    assert builder.build("hi").params == SamplingParams(temperature=0.6, top_k=20, max_tokens=33)
    explicit = builder.sampling_params(temperature=0.0, max_tokens=5)
    assert explicit == SamplingParams(temperature=0.0, top_k=20, max_tokens=5)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": "hot"}, {"temperature": -5.0}, {"top_k": [3]}, {"max_new_tokens": 0}],
)
def test_defaults_that_nobody_could_ask_for_are_passed_over(
    tokenizer: Tokenizer, info: CoreInfo, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = {"min_p": 0.1, **wrong}
    builder = RequestBuilder(tokenizer, msgspec.structs.replace(info, generation_config=config))
    assert builder.build("hi").params == SamplingParams(min_p=0.1)
    assert "is left out, the other values are taken" in caplog.text


def test_end_ids_outside_the_vocabulary_do_not_reach_the_core(
    tokenizer: Tokenizer, info: CoreInfo
) -> None:
    config = {"eos_token_id": [-1, 5, 259, 1 << 80]}
    builder = RequestBuilder(tokenizer, msgspec.structs.replace(info, generation_config=config))
    assert builder.build("hi").core[0].stop_ids == sorted({*tokenizer.eos_token_ids, 5})
    wrong = msgspec.structs.replace(info, generation_config={"eos_token_id": ["x"]})
    with pytest.raises(ConfigError, match="eos_token_id"):
        RequestBuilder(tokenizer, wrong)


def test_bos_is_added_once(make_folder: Callable[..., str], info: CoreInfo) -> None:
    folder = Path(make_folder("bos"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"bos_token": "<|user|>", "add_bos_token": True}
    path.write_text(json.dumps(config))
    builder = RequestBuilder(Tokenizer.from_folder(folder), info)
    assert builder.build("hi").prompt_ids == [257, 104, 105]
    assert builder.build("hi", add_special_tokens=False).prompt_ids == [104, 105]
