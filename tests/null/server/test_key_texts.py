"""What asks no model for text counts in the rates of its key too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from vllmx_server.errors import RateLimitError
from vllmx_server.limits.rate_limiter import KeyLimiter

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served
from .test_keys import key_file
from .test_pooling import LetterPooler

ANN = {"authorization": "Bearer secret-ann"}
TALK = [{"role": "user", "content": "abcd" * 10}]
ROUTES: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "abcd" * 10},
    "/detokenize": {"tokens": list(range(40))},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/v1/embeddings": {"input": "abcd" * 10},
    "/pooling": {"input": "abcd" * 10},
    "/v1/score": {"text_1": "abcd" * 5, "text_2": "abcd" * 5},
    "/v1/rerank": {"query": "abcd" * 5, "documents": ["abcd" * 5]},
    "/classify": {"input": "abcd" * 10},
}
DETAILS = ("limit", "remaining", "reset")


def stop_time(served: Served) -> None:
    """Nothing comes back while a slow machine runs the test."""
    assert isinstance(served.state.limiter, KeyLimiter)
    served.state.limiter.clock = lambda: 0.0


async def post(served: Served, path: str) -> httpx.Response:
    return await served.client.post(path, json=ROUTES[path], headers=ANN)


@pytest.mark.parametrize("path", ROUTES)
async def test_requests_and_tokens_a_minute(
    tmp_path: Path, make_server: MakeServer, path: str
) -> None:
    rates = {"requests_per_minute": 2, "tokens_per_minute": 6000}
    async with make_server({"api_keys_file": key_file(tmp_path, ann=rates, bob={})}) as served:
        stop_time(served)
        served.state.pooler = LetterPooler()
        first = await post(served, path)
        assert first.status_code == 200, first.text
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        second = await post(served, path)
        left = int(second.headers["x-ratelimit-remaining-tokens"])
        assert 5800 < left < 5990, "the tokens of the first, and what the second may come to"
        assert {f"x-ratelimit-{detail}-tokens" for detail in DETAILS} <= set(second.headers)
        refused = await post(served, path)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "30"
        assert "2 requests a minute" in refused.json()["error"]["message"]
        other = await served.client.post(
            path, json=ROUTES[path], headers={"x-api-key": "secret-bob"}
        )
        assert other.status_code == 200
        assert await served.server.drain(PATIENCE_S)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_texts_are_settled_with_what_they_came_to(
    tmp_path: Path, make_server: MakeServer, path: str
) -> None:
    rates = {"tokens_per_minute": 90, "concurrency": 1}
    async with make_server({"api_keys_file": key_file(tmp_path, ann=rates)}) as served:
        stop_time(served)
        statuses = [(await post(served, path)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        usage = (await served.client.get("/v1/usage", headers=ANN)).json()["data"][0]
        assert (usage["requests"], usage["refused"]) == (2, 1)
        assert usage["prompt_tokens"] == 0, "the model read nothing"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_texts_of_a_model_that_the_key_may_not_use(
    tmp_path: Path, make_server: MakeServer, path: str
) -> None:
    path_of_keys = key_file(tmp_path, ann={"models": ["other"], "concurrency": 1})
    async with make_server({"api_keys_file": path_of_keys}) as served:
        for _ in range(2):
            refused = await post(served, path)
            assert refused.status_code == 403
            assert "it may use: other" in refused.json()["error"]["message"]


async def test_a_text_that_fails_leaves_its_place(tmp_path: Path, make_server: MakeServer) -> None:
    path = key_file(tmp_path, ann={"concurrency": 1, "tokens_per_minute": 50})
    async with make_server({"api_keys_file": path}) as served:
        stop_time(served)

        async def failing(*_: object, **__: object) -> list[int]:
            raise RateLimitError("too many texts wait")

        served.llm.encode = failing  # type: ignore[method-assign]
        for _ in range(6):
            refused = await post(served, "/tokenize")
            assert "too many texts wait" in refused.text
