"""The routes of text-embeddings-inference, and conversations that become vectors and classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.client.pooling import PoolingChoice, PoolingText
from vllmx_engine.wire.messages import PoolingInfo
from vllmx_server.generating.pooling import EnginePooler, Pooled, PoolingOptions, Task

from .conftest import MakeServer, Served
from .test_batches import begin, content, ended
from .test_pooling import LetterPooler, ask

HELLO = [{"role": "user", "content": "ab"}]

IMAGE = {"type": "image_url", "image_url": "data:,"}


class SeeingPooler(LetterPooler):
    """Remembers what it was given, which may have any length."""

    inputs: Sequence[PoolingText] = ()

    async def pool(
        self, task: Task, inputs: Sequence[PoolingText], options: PoolingOptions
    ) -> list[Pooled]:
        self.inputs, self.options = inputs, options
        return [Pooled(np.ones(2, np.float32), len(each.ids or each.text)) for each in inputs]


@pytest.fixture
def pooling(served: Served) -> Served:
    served.state.pooler = LetterPooler()
    return served


@pytest.fixture
def seeing(served: Served) -> SeeingPooler:
    pooler = SeeingPooler()
    served.state.pooler = pooler
    return pooler


async def test_vectors_as_tei_gives_them(pooling: Served) -> None:
    one = await ask(pooling, "/embed", inputs="aab")
    np.testing.assert_allclose(one[0][:2], np.array([2, 1]) / 5**0.5, rtol=1e-6)
    assert [len(each) for each in await ask(pooling, "/embed", inputs=["aab", "c"])] == [8, 8]
    assert await ask(pooling, "/embed", inputs=[97, 97, 98]) == one
    assert await ask(pooling, "/embed", inputs=[[97, 97, 98]]) == one
    plain = await ask(pooling, "/embed", inputs="aab", normalize=False, dimensions=3)
    assert plain == [[2, 1, 0]]
    long = {"inputs": "a" * 60}
    response = await pooling.client.post("/embed", json=long)
    assert response.status_code == 400
    assert "over 50 tokens" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "inputs"
    for name in ("texts", "documents"):
        body = {"query": "a" * 60, name: ["b"]}
        response = await pooling.client.post("/rerank", json=body)
        assert response.json()["error"]["param"] == name
    await ask(pooling, "/embed", inputs="a", truncate=True, truncation_direction="Right")
    assert isinstance(pooling.state.pooler, LetterPooler)
    assert pooling.state.pooler.options is not None
    assert pooling.state.pooler.options.max_tokens == 512
    assert pooling.state.pooler.options.prompt_name is None
    await ask(pooling, "/embed", inputs="a", prompt_name="query")
    assert pooling.state.pooler.options.prompt_name == "query"


async def test_a_prompt_name_reaches_the_engine() -> None:
    class Recorder:
        choice: PoolingChoice

        async def pool(self, task: Task, texts: Any, choice: PoolingChoice, who: Any) -> list[Any]:
            self.choice = choice
            return []

    llm = Recorder()
    pooler = EnginePooler(cast(AsyncLLM, llm), PoolingInfo(tasks=["embed"], size=1))
    await pooler.pool("embed", [PoolingText("a")], PoolingOptions(prompt_name="query"))
    assert llm.choice.prompt_name == "query"


async def test_texts_are_ranked_as_tei_ranks_them(pooling: Served) -> None:
    texts = ["xyz", "abc", "ab", "abcd"]
    found = await ask(pooling, "/rerank", query="abcd", texts=texts)
    assert found == [
        {"index": index, "score": pytest.approx(score / 26)}
        for index, score in ((3, 4), (1, 3), (2, 2), (0, 0))
    ]
    shown = await ask(pooling, "/rerank", query="abcd", texts=texts, return_text=True)
    assert [each["text"] for each in shown] == ["abcd", "abc", "ab", "xyz"]
    assert isinstance(pooling.state.pooler, LetterPooler)
    for raw in (False, True):
        await ask(pooling, "/rerank", query="a", texts=["a"], raw_scores=raw)
        assert pooling.state.pooler.options is not None
        assert pooling.state.pooler.options.normalize == (not raw)
    jina = await ask(pooling, "/rerank", query="abcd", documents=texts)
    assert [each["index"] for each in jina["results"]] == [3, 1, 2, 0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/embed", {}, None),
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": [1, "a"]}, "inputs"),
        ("/embed", {"inputs": ["a"] * 2049}, "inputs"),
        ("/embed", {"inputs": "a", "dimensions": 9}, "dimensions"),
        ("/embed", {"inputs": "a", "nonsense": 1}, "nonsense"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        (
            "/embed",
            {"inputs": "a", "truncate": True, "truncation_direction": "Left"},
            "truncation_direction",
        ),
        ("/rerank", {"query": "a", "texts": []}, "texts"),
        ("/rerank", {"query": "a", "texts": [1]}, "texts[0]"),
        ("/rerank", {"texts": ["a"]}, None),
        ("/rerank", {"query": "a", "texts": ["a"], "top_n": 1}, "top_n"),
        ("/rerank", {"query": "a", "texts": ["a"], "documents": ["a"]}, "texts"),
        ("/v1/rerank", {"query": "a", "texts": ["a"]}, "texts"),
    ],
)
async def test_wrong_fields_are_named(
    pooling: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = await pooling.client.post(path, json=body)
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param


async def test_a_model_that_generates_says_what_to_load(served: Served) -> None:
    for path, body, remedy in (
        ("/embed", {"inputs": "a"}, "Embedding"),
        ("/rerank", {"query": "a", "texts": ["b"]}, "rerank"),
    ):
        response = await served.client.post(path, json=body)
        assert response.status_code == 400
        assert remedy in response.json()["error"]["message"]


async def test_batches_of_both_shapes(pooling: Served) -> None:
    for url, body in (
        ("/embed", {"inputs": "b"}),
        ("/rerank", {"query": "a", "texts": ["a"]}),
        ("/rerank", {"query": "a", "documents": ["a"]}),
    ):
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        batch = await ended(pooling, await begin(pooling, [line], endpoint=url))
        (record,) = await content(pooling, batch["output_file_id"])
        assert record["response"]["status_code"] == 200


# --- conversations --------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
async def test_a_conversation_is_one_input(served: Served, seeing: SeeingPooler, path: str) -> None:
    """Its tokens are those of /tokenize, without the beginning of an answer."""
    answer = await ask(served, path, messages=HELLO)
    assert len(answer["data"]) == 1
    asked = {"messages": HELLO, "add_generation_prompt": False}
    tokens = (await ask(served, "/tokenize", **asked))["tokens"]
    assert list(seeing.inputs[0].ids or ()) == tokens
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    await ask(served, path, messages=HELLO, add_generation_prompt=True)
    with_prompt = (await ask(served, "/tokenize", messages=HELLO))["tokens"]
    assert list(seeing.inputs[0].ids or ()) == with_prompt != tokens


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "a", "messages": HELLO}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content"),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
         "add_generation_prompt"),
    ],
)  # fmt: skip
async def test_what_is_no_conversation_is_named(
    pooling: Served, path: str, body: dict[str, Any], param: str
) -> None:
    response = await pooling.client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_a_template_of_the_request(make_server: MakeServer) -> None:
    async with make_server({"trust_request_chat_template": True}) as served:
        pooler = served.state.pooler = SeeingPooler()
        template = "{{ messages[0].content }}{{ more }}"
        fields = {"chat_template": template, "chat_template_kwargs": {"more": "c"}}
        await ask(served, "/v1/embeddings", messages=HELLO, **fields)
        assert bytes(pooler.inputs[0].ids or ()) == b"abc"
