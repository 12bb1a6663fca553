"""The official openai client against a real server: what applications see."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from .conftest import MakeFake, RunningServer

HELLO = [{"role": "user", "content": "Hello!"}]
STORY = [{"role": "user", "content": "Tell me a story about a fox and a lamp."}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_answers_from_the_real_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=HELLO, temperature=0)
    assert answer.choices[0].message.content == "Hello! How can I help you today?"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_what_clients_send_by_default_changes_nothing(client: openai.OpenAI) -> None:
    """All that frameworks add to a plain request, through the client's own types."""
    plain = client.chat.completions.create(model="demo", messages=HELLO, temperature=0)
    full = client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, n=1, tools=[], tool_choice="auto",
        response_format={"type": "text"}, modalities=["text"], store=False, metadata={"a": "b"},
        user="u", parallel_tool_calls=True, service_tier="auto", logit_bias={}, stop=[],
        presence_penalty=0, frequency_penalty=0, logprobs=False, verbosity="medium",
        functions=[], function_call="auto", stream=False, seed=None, top_p=None,
    )  # fmt: skip
    assert full.choices[0].message.content == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="modalities"):
        client.chat.completions.create(model="demo", messages=HELLO, modalities=["audio"])


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "seed": 11}])
def test_streamed_equals_not_streamed(client: openai.OpenAI, options: dict[str, float]) -> None:
    whole = client.chat.completions.create(model="demo", messages=STORY, max_tokens=60, **options)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=STORY,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    finals = [
        c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
    ]
    assert finals == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_text_completion_streamed_with_n_and_logprobs(client: openai.OpenAI) -> None:
    options = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "seed": 5, "n": 3}
    whole = client.completions.create(**options, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[choice.index] for choice in whole.choices] == [c.text for c in whole.choices]
    assert len(set(texts.values())) > 1, "three choices of one seed must not be the same draw"
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
        for chosen, top in zip(
            choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
        ):
            assert chosen <= max(top.values()) + 1e-6
            assert 2 <= len(top) <= 3
        offsets = choice.logprobs.text_offset or []
        assert offsets == sorted(offsets)


def test_several_prompts_in_one_call(client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The sun was", "My name is"]
    together = client.completions.create(
        model="demo", prompt=prompts, max_tokens=8, temperature=0, n=1
    )
    alone = [
        client.completions.create(model="demo", prompt=p, max_tokens=8, temperature=0)
        for p in prompts
    ]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    assert together.usage is not None
    assert together.usage.completion_tokens == 24


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert bytes(entry.bytes or []).decode("utf-8", "replace") == entry.token


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == "Once upon a time"
    assert choice.logprobs is not None
    assert (choice.logprobs.token_logprobs or [0])[0] is None
    assert "".join(choice.logprobs.tokens or []) == "Once upon a time"
    assert all(value < 0 for value in (choice.logprobs.token_logprobs or [])[1:])


def test_stop_string_never_leaks(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=HELLO, temperature=0)
    text = whole.choices[0].message.content or ""
    stop = text[9:14]  # crosses tokens
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model="demo", messages=HELLO, temperature=0, stop=[stop], stream=True
        )
    ]
    assert "".join(pieces) == text[: text.index(stop)]


def test_64_at_once_equal_one_at_a_time(client: openai.OpenAI) -> None:
    prompts = [f"Once upon a time there was number {i % 16}" for i in range(64)]

    def complete(index: int) -> str:
        seeded = index % 2
        answer = client.completions.create(
            model="demo",
            prompt=prompts[index],
            max_tokens=16,
            temperature=0.8 if seeded else 0,
            seed=index,
        )
        return answer.choices[0].text

    alone = [complete(i) for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        together = list(pool.map(complete, range(64)))
    assert together == alone


def test_errors_have_openais_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature must be between") as info:
        client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)
    assert info.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="demo", prompt="word " * 5000, max_tokens=5)


def test_an_answer_is_sent_back_and_a_conversation_goes_on(client: openai.OpenAI) -> None:
    """The message as the client's own type, and as the dictionary that it dumps."""
    first = client.chat.completions.create(model="demo", messages=HELLO, temperature=0)
    message = first.choices[0].message
    assert first.system_fingerprint
    plain = {"role": "assistant", "content": message.content}
    answers = set()
    for turn in (message, message.model_dump(), plain):
        answer = client.chat.completions.create(
            model="demo", messages=[*HELLO, turn, *HELLO], temperature=0, max_tokens=12
        )
        answers.add(answer.choices[0].message.content)
    assert len(answers) == 1


def test_comments_are_no_part_of_an_answer(fake_server: MakeFake) -> None:
    """The model needs longer for each token than the server is silent."""
    with fake_server("--sse-ping-interval", "0.005") as running:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="none") as client:
            options = {"model": "fake", "prompt": "ab", "max_tokens": 8, "seed": 3}
            chunks = list(client.completions.create(**options, stream=True))
            whole = client.completions.create(**options)
        assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
        raw = running.post("/v1/completions", {**options, "stream": True}).text
        assert ": ping\n\n" in raw
        (card,) = running.get("/v1/models").json()["data"]
        assert card["root"].endswith("/model")


def test_the_root_of_the_demo_model_is_a_path(server: RunningServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert Path(card["root"]).exists()
