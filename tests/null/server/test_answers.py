"""Shapes and numbers of answers: choices, usage, logprobs, ids, and the metrics behind them."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Served

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_choices_of_several_prompts(served: Served) -> None:
    body = {"prompt": ["a", "b", [99]], "n": 2, "max_tokens": 5, "seed": 3, "temperature": 1}
    whole = await served.complete(**body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 30
    texts = dict.fromkeys(range(6), "")
    for event in (await served.events("/v1/completions", **body))[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [texts[index] for index in range(6)] == [c["text"] for c in whole["choices"]]


async def test_best_of_pays_for_what_it_drops(served: Served) -> None:
    answer = await served.complete(n=1, best_of=3, max_tokens=4, temperature=1, seed=1)
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_in_a_stream(served: Served, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "abc"} if "chat" not in path else {"messages": MESSAGES}
    body = {**prompt, "max_tokens": 6, "n": 2}
    plain = await served.events(path, **body)
    assert all("usage" not in event for event in plain[:-1])
    last = await served.events(path, **body, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in last[:-2])
    assert last[-2]["choices"] == []
    assert last[-2]["usage"]["completion_tokens"] == 12
    always = await served.events(path, **body, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in always[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    heads = {(event["id"][:4], event["object"], event["model"]) for event in last[:-1]}
    assert len(heads) == 1


async def test_token_ids(served: Served) -> None:
    body = {"max_tokens": 5, "n": 2, "return_token_ids": True, "temperature": 1, "seed": 5}
    whole = (await served.complete("xyz", **body))["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [[120, 121, 122]] * 2
    found: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    for event in (await served.events("/v1/completions", prompt="xyz", **body))[:-1]:
        for choice in event["choices"]:
            found[choice["index"]] += choice["token_ids"]
            prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert [found[0], found[1]] == [choice["token_ids"] for choice in whole]
    assert prompts == [[120, 121, 122]] * 2
    events = await served.events("/v1/chat/completions", messages=MESSAGES, **body)
    answer = (await served.post("/v1/chat/completions", messages=MESSAGES, **body)).json()
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]


async def test_logprobs_of_completions(served: Served) -> None:
    fixed: dict[str, Any] = {"max_tokens": 6, "logprobs": 3, "temperature": 0}
    answer = await served.complete("abcd", echo=True, **fixed)
    choice = answer["choices"][0]
    rows = choice["logprobs"]
    assert {len(rows[name]) for name in rows} == {10}
    assert rows["token_logprobs"][0] is None
    assert rows["top_logprobs"][0] is None
    assert rows["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert choice["text"].startswith("abcd")
    streamed = await served.events("/v1/completions", prompt="abcd", **fixed)
    parts = [event["choices"][0]["logprobs"] for event in streamed[:-1]]
    tokens = [token for part in parts for token in part["tokens"]]
    assert tokens == rows["tokens"][4:]
    offsets = [offset + 4 for part in parts for offset in part["text_offset"]]
    assert offsets == rows["text_offset"][4:]


async def test_logprobs_of_chats(served: Served) -> None:
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    body |= {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    answer = (await served.post("/v1/chat/completions", **body)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert {len(entry["top_logprobs"]) for entry in content} == {2}
    events = await served.events("/v1/chat/completions", **body)
    streamed = [
        entry
        for event in events[1:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    bare = (await served.post("/v1/chat/completions", **{**body, "top_logprobs": None})).json()
    assert all(e["top_logprobs"] == [] for e in bare["choices"][0]["logprobs"]["content"])
    for none in ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None, "top_logprobs": 0}):
        answer = (await served.post("/v1/chat/completions", **{**body, **none})).json()
        assert answer["choices"][0]["logprobs"] is None


async def test_prompt_logprobs(served: Served) -> None:
    choice = (await served.complete("abc", max_tokens=1, prompt_logprobs=2))["choices"][0]
    rows = choice["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == 3
    assert str(ord("b")) in rows[1]
    assert set(rows[1][str(ord("b"))]) == {"logprob", "rank", "decoded_token"}
    body = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0}
    answer = (await served.post("/v1/chat/completions", **body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_stop_reasons(served: Served) -> None:
    text = (await served.complete("abc", max_tokens=40, temperature=0))["choices"][0]["text"]
    ids = await served.complete("abc", max_tokens=40, temperature=0, return_token_ids=True)
    third = ids["choices"][0]["token_ids"][2]
    assert text
    by_id = await served.complete("abc", max_tokens=40, temperature=0, stop_token_ids=[third])
    assert by_id["choices"][0]["finish_reason"] == "stop"
    assert by_id["choices"][0]["stop_reason"] == third
    word = next(char for char in text if char.isascii() and char.isprintable())
    by_text = await served.complete("abc", max_tokens=40, temperature=0, stop=word)
    assert by_text["choices"][0]["stop_reason"] == word
    assert by_text["choices"][0]["text"] == text[: text.index(word)]
    by_length = await served.complete("abc", max_tokens=2, temperature=0)
    assert by_length["choices"][0]["finish_reason"] == "length"
    assert by_length["choices"][0]["stop_reason"] is None


async def test_max_completion_tokens_wins(served: Served) -> None:
    for fields, count in (
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 6}, 6),
    ):
        answer = await served.post("/v1/chat/completions", messages=MESSAGES, **fields)
        assert answer.json()["usage"]["completion_tokens"] == count
    answer = await served.post("/v1/chat/completions", messages=MESSAGES)
    assert answer.json()["usage"]["total_tokens"] == 512, "as many as the context holds"


async def test_scoring_alone_generates_nothing(served: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "return_token_ids": True}
    answer = await served.complete(**body, logprobs=1)
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["token_ids"] == []
    assert answer["usage"]["completion_tokens"] == 0
    events = await served.events("/v1/completions", **body)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abc"


async def test_tokenize_and_back(served: Served) -> None:
    answer = (await served.post("/tokenize", prompt="h\u00e9", return_token_strs=True)).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 3
    assert answer["max_model_len"] == 512
    entries = [served.llm.tokenizer.id_to_token(token) for token in answer["tokens"]]
    assert answer["token_strs"] == entries == ["h", "\u00c3", "\u00a9"], "parts of one character"
    back = (await served.post("/detokenize", tokens=answer["tokens"])).json()
    assert back == {"prompt": "h\u00e9"}
    chat = (await served.post("/tokenize", messages=MESSAGES)).json()
    usage = (await served.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1)).json()
    assert chat["count"] == usage["usage"]["prompt_tokens"]
    for body in ({"tokens": [1, 999]}, {"tokens": [-1]}, {"tokens": ["a"]}, {}):
        assert (await served.post("/detokenize", **body)).status_code == 400
    deep: Any = []
    for _ in range(40):
        deep = [deep]
    refused = await served.post("/tokenize", messages=MESSAGES, chat_template_kwargs={"a": deep})
    assert refused.status_code == 400


async def test_metrics_count_what_was_generated(served: Served) -> None:
    await served.complete("abcd", max_tokens=7, n=2)
    await served.events("/v1/completions", prompt="abc", max_tokens=5)
    await served.events("/v1/chat/completions", messages=MESSAGES, max_tokens=3)
    await served.post("/v1/completions", prompt="")
    await served.client.get("/made/up")
    await served.becomes_idle()
    found = await served.metrics()
    prompt = 4 + 3 + (await served.post("/tokenize", messages=MESSAGES)).json()["count"]
    assert found["vllmx:generation_tokens_total"] == 22
    assert found["vllmx:prompt_tokens_total"] in (prompt, prompt + 4)  # the second choice's prefix
    assert found["vllmx:request_generation_tokens_sum"] == 22
    assert found["vllmx:request_success_total"] == 4
    assert found["vllmx:time_to_first_token_seconds_count"] == 4
    assert found["vllmx:inter_token_latency_seconds_count"] == 22 - 4
    assert found["vllmx:e2e_request_latency_seconds_count"] == 4
    assert found["vllmx:request_params_n_sum"] == 4
    assert found["vllmx:request_params_n_count"] == 3
    assert found["vllmx:num_requests_running"] == 0
    assert found["vllmx:num_requests_waiting"] == 0
    assert found["vllmx:kv_cache_usage_perc"] == 0
    assert found["vllmx:cache_config_info"] == 1
    assert found["process_resident_memory_bytes"] > 1e6
    text = (await served.client.get("/metrics")).text
    assert 'http_requests_total{handler="other",method="GET",status="4xx"} 1.0' in text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0' in text
    assert "/made/up" not in text
    assert 'block_size="16"' in text


async def test_health_models_and_version(served: Served) -> None:
    assert (await served.client.get("/health")).json() == {"status": "ready"}
    (card,) = (await served.client.get("/v1/models")).json()["data"]
    assert card["id"] == "fake"
    assert card["max_model_len"] == 512
    assert (await served.client.get("/v1/models/fake")).json() == card
    assert set((await served.client.get("/version")).json()) == {"version"}
    served.state.admission.draining = True
    response = await served.client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "draining"})
    assert (await served.client.get("/health/live")).status_code == 200
    refused = await served.post("/v1/completions", prompt="a")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
