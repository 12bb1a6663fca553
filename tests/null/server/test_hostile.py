"""Odd values in every field of the newer routes: answered, or refused in the route's own shape."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllmx_server.apis.batches.schema import CreateBatch
from vllmx_server.apis.messages.schema import CountTokensRequest, MessagesRequest
from vllmx_server.apis.pooling.schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from vllmx_server.apis.responses.schema import ResponsesRequest

from .conftest import Served
from .test_pooling import LetterPooler

DEEP: Any = 1
for _ in range(60):
    DEEP = [DEEP]
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 70, 1e300, "", "\u0000", "x" * 3000, [], {}, [None], [[]], [{}],
    {"type": "x"}, [{"type": "x"}], {"": None}, DEEP,
)  # fmt: skip
TALK = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/messages": (MessagesRequest, {**TALK, "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountTokensRequest, TALK),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    "/v1/batches": (CreateBatch, {"input_file_id": "file-x", "endpoint": "/v1/completions"}),
    "/v1/embeddings": (EmbeddingsRequest, {"input": "a"}),
    "/pooling": (PoolingRequest, {"input": "a"}),
    "/classify": (ClassifyRequest, {"input": "a"}),
    "/score": (ScoreRequest, {"text_1": "a", "text_2": "b"}),
    "/rerank": (RerankRequest, {"query": "a", "documents": ["b"]}),
}


@pytest.mark.parametrize("path", ROUTES)
async def test_odd_values_are_answered_or_refused(served: Served, path: str) -> None:
    served.state.pooler = LetterPooler()
    kind, plain = ROUTES[path]
    for number, name in enumerate(kind.__struct_fields__):
        for value in ODD[number % 4 :: 4]:  # each field meets other ones
            response = await served.client.post(path, json={**plain, name: value})
            assert response.status_code in (200, 400, 404), (name, value, response.text)
            if response.status_code == 200 or value is True:
                continue
            error = response.json()["error"]
            assert error["type"] in ("invalid_request_error", "not_found_error")
            assert len(error["message"]) < 1100
    await served.becomes_idle()


@pytest.mark.parametrize("part", ["content", "tools", "system", "input", "output"])
async def test_odd_values_inside_of_items(served: Served, part: str) -> None:
    for value in ODD:
        item = {"role": "user", "content": "hi", part: value}
        for path, body in (
            ("/v1/messages", {"messages": [item], "max_tokens": 2}),
            ("/v1/messages", {**TALK, "max_tokens": 2, "tools": [{"name": "f", part: value}]}),
            ("/v1/responses", {"input": [item], "max_output_tokens": 2}),
            ("/v1/responses", {"input": [{"type": "function_call_output", part: value}]}),
            ("/v1/responses", {"input": "hi", "tools": [{"type": "function", part: value}]}),
        ):
            response = await served.client.post(path, json=body)
            assert response.status_code in (200, 400), (path, value, response.text)
    await served.becomes_idle()
