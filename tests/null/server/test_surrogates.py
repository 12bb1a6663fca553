"""Half of a character in a body is told as what it is, on all routes."""

from __future__ import annotations

import pytest
from vllmx_server.schema.decode import lone_surrogate

from .conftest import JSON, Served


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (rb'{"a":"\ud800 x"}', 6),
        (rb'{"a":"\uD800"}', 6),
        (rb'{"\udC00":1}', 2),
        (rb'"\ud83d\ude00 \ude00"', 14),
        (rb'"\ud800\ud800\udc00"', 1),
        (rb'"\\\ud800"', 3),
        (rb'"\ud83d\ude00"', None),
        (rb'"\\ud800"', None),
        (rb'"\u00e9 \ud8"', None),
        (b'"cut', None),
    ],
)
def test_a_lone_surrogate_is_found(text: bytes, place: int | None) -> None:
    assert lone_surrogate(text) == place


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", rb'{"prompt":"\ud800 x"}'),
        ("/v1/chat/completions", rb'{"messages":[{"role":"user","content":"\ud800"}]}'),
        ("/v1/responses", rb'{"input":"a\ud800\n"}'),
        ("/v1/messages", rb'{"messages":[{"role":"user","content":"\ud800"}],"max_tokens":1}'),
        ("/v1/messages/count_tokens", rb'{"messages":[{"role":"user","content":"\udfff"}]}'),
        ("/tokenize", rb'{"prompt":"\ud800\ud800"}'),
        ("/detokenize", rb'{"tokens":[1],"\ud800":1}'),
        ("/v1/embeddings", rb'{"input":"\ud800"}'),
        ("/v1/rerank", rb'{"query":"\ud800","documents":["a"]}'),
        ("/v1/score", rb'{"text_1":"\ud800","text_2":"a"}'),
        ("/classify", rb'{"input":"\ud800"}'),
        ("/pooling", rb'{"input":"\ud800"}'),
        ("/v1/batches", rb'{"input_file_id":"\ud800"}'),
    ],
)
async def test_every_route_says_what_is_wrong(served: Served, path: str, body: bytes) -> None:
    response = await served.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"lone surrogate, {body[lone_surrogate(body) :][:6].decode()} at byte" in message
