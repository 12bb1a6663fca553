"""`--max-logprobs`, and -1: log-probabilities of the whole vocabulary."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import MakeServer, Served, request_bytes
from .loop_meter import shortest_hold
from .test_loop_held import LIMIT_MS, answer_of

VOCAB = 259
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
ALL = {"max_logprobs": -1}
FAKE = [-rank / 4 for rank in range(1, VOCAB + 1)]
"""What the fake model says, the likeliest first."""


async def chat(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.post("/v1/chat/completions", **CHAT, max_tokens=3, **body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


@pytest.mark.parametrize("top", [-1, 65, 200, 300])
async def test_chats(make_server: MakeServer, top: int) -> None:
    async with make_server(engine=ALL) as served:
        named = {"return_tokens_as_token_ids": True}
        (choice,) = (await chat(served, top_logprobs=top, **named))["choices"]
        few = (await chat(served, top_logprobs=20, seed=1, temperature=0, **named))["choices"]
        for position in choice["logprobs"]["content"]:
            count = VOCAB if top < 0 else min(top, VOCAB)
            likeliest = position["top_logprobs"]
            assert [entry["logprob"] for entry in likeliest] == FAKE[:count]
            assert len({entry["token"] for entry in likeliest}) == count
        assert len(few[0]["logprobs"]["content"][0]["top_logprobs"]) == 20


async def test_completions_and_prompts(make_server: MakeServer) -> None:
    async with make_server(engine=ALL) as served:
        body = {"return_tokens_as_token_ids": True, "max_tokens": 2}
        whole = await served.complete("abc", logprobs=-1, prompt_logprobs=-1, **body)
        part = await served.complete("abc", logprobs=20, prompt_logprobs=20, **body)
        (choice,) = whole["choices"]
        for top in choice["logprobs"]["top_logprobs"]:
            assert sorted(top.values(), reverse=True) == FAKE
        assert choice["prompt_logprobs"][0] is None
        for row, few in zip(
            choice["prompt_logprobs"][1:], part["choices"][0]["prompt_logprobs"][1:], strict=True
        ):
            assert len(row) == VOCAB
            assert {token: row[token] for token in few} == few
            assert sorted(entry["rank"] for entry in row.values()) == list(range(1, VOCAB + 1))


async def test_the_whole_vocabulary_where_it_fits_under_the_limit(make_server: MakeServer) -> None:
    async with make_server(engine={"max_logprobs": 5000}) as served:
        chosen = (await chat(served, top_logprobs=-1))["choices"][0]["logprobs"]["content"]
        assert [len(position["top_logprobs"]) for position in chosen] == [VOCAB] * 3
        named = {"max_tokens": 1, "return_tokens_as_token_ids": True}
        for wanted in (-1, 300, 5000):
            answer = await served.complete("a", logprobs=wanted, prompt_logprobs=wanted, **named)
            assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == VOCAB


async def test_beside_requests_that_want_few(make_server: MakeServer) -> None:
    """Rows of one step, of which some come back whole."""
    async with make_server(engine=ALL) as served:
        names = {"max_tokens": 40, "temperature": 0, "return_tokens_as_token_ids": True}
        alone = [await served.complete("ab", logprobs=k, **names) for k in (3, -1, 0, 100)]
        among = await asyncio.gather(
            *(served.complete("ab", logprobs=k, **names) for k in (3, -1, 0, 100))
        )
        for one, other in zip(alone, among, strict=True):
            assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "completions",
            {"prompt": "a", "logprobs": -1},
            "0 and 20, got -1, for all 259 .*--max-logp",
        ),
        ("completions", {"prompt": "a", "logprobs": 21}, "got 21: .*raise --max-logprobs"),
        ("completions", {"prompt": "a", "prompt_logprobs": 21}, "^prompt_logprobs must be"),
        ("chat/completions", CHAT | {"top_logprobs": -1}, "^top_logprobs must be"),
        ("chat/completions", CHAT | {"top_logprobs": 21}, "^top_logprobs must be"),
    ],
)
async def test_no_more_than_the_flag_allows(
    served: Served, path: str, body: dict[str, Any], words: str
) -> None:
    response = await served.post(f"/v1/{path}", **body)
    assert response.status_code == 400
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(response.json()["error"]["message"])


IDS = [200, 3, 97, 200]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "return_tokens_as_token_ids": True}


async def test_named_ids_are_told_in_place_of_the_likeliest(make_server: MakeServer) -> None:
    """Their values are those that all of the vocabulary has; --max-logprobs is no limit of them."""
    async with make_server(engine=ALL) as served:
        whole = (await served.complete("ab", logprobs=-1, **GREEDY))["choices"][0]["logprobs"]
    async with make_server() as served:
        for count in (0, 5, 1000):
            asked = {"logprobs": count, "logprob_token_ids": IDS, **GREEDY}
            (choice,) = (await served.complete("ab", **asked))["choices"]
            found = choice["logprobs"]
            assert found["tokens"] == whole["tokens"]
            assert found["token_logprobs"] == whole["token_logprobs"]
            for token, top, all_of in zip(
                found["tokens"], found["top_logprobs"], whole["top_logprobs"], strict=True
            ):
                names = {token, "token_id:200", "token_id:3", "token_id:97"}
                assert top == pytest.approx({name: all_of[name] for name in names})
        streamed = await served.events("/v1/completions", prompt="ab", **asked)
        tops = [top for e in streamed[:-1] for top in e["choices"][0]["logprobs"]["top_logprobs"]]
        assert tops == found["top_logprobs"]
        asked = {"logprob_token_ids": IDS, "top_logprobs": 1, **GREEDY}
        chats = (await served.post("/v1/chat/completions", **CHAT, **asked)).json()["choices"]
        for position in chats[0]["logprobs"]["content"]:
            names = [entry["token"] for entry in position["top_logprobs"]]
            assert names == ["token_id:200", "token_id:3", "token_id:97"]
        plain = {"logprobs": 2, "logprob_token_ids": [], **GREEDY}
        (choice,) = (await served.complete("ab", **plain))["choices"]
        assert choice["logprobs"]["top_logprobs"][0].keys() <= whole["top_logprobs"][0].keys()
        assert len(choice["logprobs"]["top_logprobs"][0]) in (2, 3)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", {"prompt": "a", "logprob_token_ids": [1]}, "set logprobs, too"),
        (
            "completions",
            {"prompt": "a", "logprob_token_ids": [1], "logprobs": 1, "echo": True, "max_tokens": 0},
            "generates none",
        ),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [259]}, "0 to 258"),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [-1]}, "between 0"),
        (
            "completions",
            {"prompt": "a", "logprobs": 1, "logprob_token_ids": [1 << 70]},
            "between 0",
        ),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [1] * 1001}, "1000"),
        ("chat/completions", {**CHAT, "logprobs": False, "logprob_token_ids": [1]}, "set logprobs"),
    ],
)
async def test_named_ids_that_are_refused(
    served: Served, path: str, body: dict[str, Any], words: str
) -> None:
    response = await served.post(f"/v1/{path}", **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"].startswith("logprob_token_ids")


async def test_what_a_call_and_a_stream_may_bring(make_server: MakeServer) -> None:
    async with make_server(engine=ALL, max_model_len=10_000) as served:
        response = await served.post("/v1/completions", prompt="a", logprobs=-1, max_tokens=9000)
        assert response.status_code == 400
        assert "9000" not in response.json()["error"]["message"]
        assert str(9000 * (VOCAB + 1)) in response.json()["error"]["message"]
        for body in ({"logprobs": -1}, {"logprobs": 1001}):
            response = await served.post("/v1/completions", prompt="a", stream=True, **body)
            assert response.status_code == 400
            assert "at most 1000" in response.json()["error"]["message"]
        events = await served.events("/v1/completions", prompt="a", logprobs=200, max_tokens=3)
        tops = [top for e in events[:-1] for top in e["choices"][0]["logprobs"]["top_logprobs"]]
        assert len(tops) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "logprobs": -1, "prompt_logprobs": -1}),
        ("/v1/chat/completions", CHAT | {"top_logprobs": -1}),
    ],
)
async def test_a_large_vocabulary_does_not_hold_the_loop(
    make_server: MakeServer, path: str, body: dict[str, Any]
) -> None:
    more = {"max_tokens": 2, "return_tokens_as_token_ids": True}
    async with make_server(engine=ALL, vocab_size=60_000) as served:
        request = request_bytes(path, body | more)
        meter, answer = await shortest_hold(
            lambda: asyncio.to_thread(answer_of, served, request), LIMIT_MS
        )
        assert meter.longest_ms < LIMIT_MS, meter.what
        assert len(answer) > 2 * 60_000 * 20


async def test_ids_of_one_text_do_not_hold_the_loop(make_server: MakeServer) -> None:
    """The fake tokenizer knows no text for ids from 259 on: all share the empty one, which an
    answer names once."""
    request = request_bytes(
        "/v1/completions", {"prompt": "ab", "logprobs": -1, "prompt_logprobs": 0, "max_tokens": 2}
    )
    async with make_server(engine=ALL, vocab_size=60_000) as served:
        meter, answer = await shortest_hold(
            lambda: asyncio.to_thread(answer_of, served, request), LIMIT_MS
        )
        assert meter.longest_ms < LIMIT_MS, meter.what
        assert b'"top_logprobs"' in answer
