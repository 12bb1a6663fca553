"""Cohere's embeddings and rankings with `--apis cohere`, over a pooler that counts letters."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
from vllmx_engine.wire.messages import PoolingInfo
from vllmx_server.apis.cohere.routes import EmbedRequest

from .conftest import MakeServer, Served
from .test_pooling import LetterPooler, ask

FLAGS = {"apis": ("cohere",)}
TEXTS = ["aab", "ch"]


@pytest.fixture
async def cohere(make_server: MakeServer) -> AsyncIterator[Served]:
    async with make_server(FLAGS) as served:
        served.state.pooler = LetterPooler()
        yield served


async def test_vectors_in_every_coding(cohere: Served) -> None:
    kinds = ["float", "base64", "binary", "ubinary", "float"]
    found = await ask(cohere, "/v2/embed", texts=TEXTS, embedding_types=kinds, model="fake")
    assert found["texts"] == TEXTS
    assert found["response_type"] == "embeddings_by_type"
    assert found["meta"]["api_version"] == {"version": "2"}
    assert found["meta"]["billed_units"] == {"input_tokens": 5}
    rows = found["embeddings"]
    np.testing.assert_allclose(rows["float"][0][:2], np.array([2, 1]) / 5**0.5, rtol=1e-6)
    raw = [np.frombuffer(base64.b64decode(each), "<f4") for each in rows["base64"]]
    np.testing.assert_array_equal(raw, np.float32(rows["float"]))
    assert rows["ubinary"] == [[0b11000000], [0b00100001]]
    assert rows["binary"] == [[0b11000000 - 128], [0b00100001 - 128]]
    plain = await ask(cohere, "/v2/embed", texts=TEXTS)
    assert plain["embeddings"] == {"float": rows["float"]}
    short = await ask(cohere, "/v2/embed", texts=["aabc"], output_dimension=2)
    np.testing.assert_allclose(short["embeddings"]["float"], [np.array([2, 1]) / 5**0.5], rtol=1e-6)


async def test_the_older_shape(cohere: Served) -> None:
    found = await ask(cohere, "/v1/embed", texts=TEXTS, truncate="END", input_type="clustering")
    assert found["response_type"] == "embeddings_floats"
    newer = await ask(cohere, "/v2/embed", texts=TEXTS)
    assert found["embeddings"] == newer["embeddings"]["float"]
    typed = await ask(cohere, "/v1/embed", texts=TEXTS, embedding_types=["float"])
    assert typed["embeddings"] == newer["embeddings"]
    assert typed["meta"]["api_version"] == {"version": "1"}


async def test_documents_are_ranked(cohere: Served) -> None:
    documents = ["xyz", "abc", "ab", "abcd"]
    found = await ask(cohere, "/v2/rerank", query="abcd", documents=documents, top_n=2)
    assert found["results"] == [
        {"index": 3, "relevance_score": pytest.approx(4 / 26)},
        {"index": 1, "relevance_score": pytest.approx(3 / 26)},
    ]
    assert len((await ask(cohere, "/v2/rerank", query="a", documents=documents))["results"]) == 4
    jina = await ask(cohere, "/v1/rerank", query="abcd", documents=documents)
    assert jina["results"][0]["document"] == {"text": "abcd"}, "this one is as ever"


async def test_the_purpose_of_a_text_chooses_its_prompt(
    cohere: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooler = cohere.state.pooler
    assert isinstance(pooler, LetterPooler)
    prompts = {"query": "q: ", "passage": "p: ", "clustering": "c: "}
    info = PoolingInfo(tasks=["embed"], size=8, prompts=prompts)
    found = msgspec.structs.replace(cohere.llm.info, pooling=info)
    monkeypatch.setattr(type(cohere.llm), "info", found)
    for purpose, name in (
        ("search_query", "query"), ("search_document", "passage"), ("clustering", "clustering"),
        ("classification", None), (None, None),
    ):  # fmt: skip
        await ask(cohere, "/v2/embed", texts=["a"], input_type=purpose)
        assert pooler.options is not None
        assert pooler.options.prompt_name == name
        assert pooler.options.max_tokens == 512, "longer texts are cut"
    await ask(cohere, "/embed", inputs="a", prompt_name="other")
    assert pooler.options.prompt_name == "other"
    assert EmbedRequest(texts=["a"], input_type="search_query").prompt_of(()) is None


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v2/embed", {"embedding_types": ["int8"]}, "int8"),
        ("/v2/embed", {"embedding_types": []}, "embedding_types"),
        ("/v2/embed", {"texts": []}, "texts"),
        ("/v2/embed", {"texts": ["a" * 60], "truncate": "NONE"}, "over 50"),
        ("/v2/embed", {"truncate": "START"}, "START"),
        ("/v2/embed", {"input_type": "image"}, "image"),
        ("/v2/embed", {"images": ["data:,"]}, "images"),
        ("/v2/embed", {"inputs": []}, "inputs"),
        ("/v2/embed", {"max_tokens": 5}, "max_tokens"),
        ("/v1/embed", {"output_dimension": 9}, "output_dimension"),
        ("/v1/embed", {"model": "other"}, "'other' is not served"),
        ("/v2/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens"),
        ("/v2/rerank", {"query": "a" * 60, "documents": ["a"]}, "over 50"),
    ],
)
async def test_what_cannot_be_served_is_named(
    cohere: Served, path: str, body: dict[str, Any], words: str
) -> None:
    asked = body if path == "/v2/rerank" else {"texts": ["a"], **body}
    refused = await cohere.client.post(path, json=asked)
    assert refused.status_code in (400, 404), refused.text
    assert set(refused.json()) == {"message"}
    assert words in refused.json()["message"]


async def test_keys_and_other_apis(make_server: MakeServer) -> None:
    async with make_server({**FLAGS, "api_key": ("k",)}) as served:
        refused = await served.client.post("/v2/embed", json={"texts": ["a"]})
        assert refused.status_code == 401
        assert "API key" in refused.json()["message"]
        openai = await served.client.post("/v1/embeddings", json={"input": "a"})
        assert openai.json()["error"]["code"] == "invalid_api_key"
