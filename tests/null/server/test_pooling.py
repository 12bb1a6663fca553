"""Embeddings, scores and classes, over a pooler that counts letters."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import openai
import pytest
from vllmx_core.errors import ContextLengthError, InvalidRequestError
from vllmx_engine.client.pooling import PoolingText, similarity
from vllmx_engine.wire.messages import PoolingInfo
from vllmx_engine.wire.outputs import PoolingOutput, PoolingRequestOutput
from vllmx_server.generating.pooling import (
    MAX_PAIRED_BYTES,
    EnginePooler,
    Pooled,
    PoolingOptions,
    Task,
)
from vllmx_server.generating.reading import BATCH_PRIORITY

from .conftest import MakeServer, Served
from .loop_meter import shortest_hold

DIMENSIONS = 8
VOCAB = 259


class LetterPooler:
    """A vector says how often the first letters of the alphabet come; a score is how many letters
    two texts share."""

    labels = ("few", "many")
    dimensions = DIMENSIONS

    def __init__(self, *tasks: Task, wait: asyncio.Event | None = None) -> None:
        self.tasks = frozenset(tasks or ("embed", "score", "classify"))
        self.wait = wait
        self.options: PoolingOptions | None = None
        self.was_cancelled = False

    async def pool(
        self, task: Task, inputs: Sequence[PoolingText], options: PoolingOptions
    ) -> list[Pooled]:
        self.options = options
        if self.wait is not None:
            try:
                await self.wait.wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        return [self._one(task, each, options) for each in inputs]

    def _one(self, task: Task, each: PoolingText, options: PoolingOptions) -> Pooled:
        if each.ids is not None and max(each.ids) >= VOCAB:
            raise InvalidRequestError("there is no such token id", param="input")
        text = each.text if each.ids is None else "".join(chr(token % 128) for token in each.ids)
        if options.max_tokens is not None:
            text = text[: options.max_tokens]
        if len(text) > 50:
            raise ContextLengthError("the text has over 50 tokens", param="input")
        if task == "score":
            shared = len(set(text) & set(each.pair or "")) / 26
            return Pooled(np.array([shared], np.float32), len(text) + len(each.pair or ""))
        if task == "classify":
            many = min(1.0, len(text) / 10)
            return Pooled(np.array([1 - many, many], np.float32), len(text))
        counts = [text.count(letter) for letter in "abcdefgh"]
        vector = np.array(counts, np.float32)
        if options.normalize and any(counts):
            vector /= np.linalg.norm(vector)
        return Pooled(vector, len(text))


@pytest.fixture
def pooling(served: Served) -> Served:
    served.state.pooler = LetterPooler()
    return served


async def ask(served: Served, path: str, **body: Any) -> Any:
    response = await served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_embeddings_in_every_form(pooling: Served) -> None:
    one = await ask(pooling, "/v1/embeddings", input="aab")
    assert one["object"] == "list"
    assert one["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    (row,) = one["data"]
    assert (row["object"], row["index"]) == ("embedding", 0)
    np.testing.assert_allclose(row["embedding"][:2], np.array([2, 1]) / 5**0.5, rtol=1e-6)
    several = await ask(pooling, "/v1/embeddings", input=["aab", "c"])
    assert several["data"][0] == row
    by_ids = await ask(pooling, "/v1/embeddings", input=[97, 97, 98])
    assert by_ids["data"] == one["data"]
    both = await ask(pooling, "/v1/embeddings", input=[[97, 97, 98], [99]])
    assert both["data"] == several["data"]
    unsaid = await ask(pooling, "/v1/embeddings", input="aab", encoding_format=None)
    assert unsaid["data"] == one["data"]
    raw = await ask(pooling, "/v1/embeddings", input="aab", encoding_format="base64")
    data = base64.b64decode(raw["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), np.float32(row["embedding"]))
    cut = await ask(pooling, "/v1/embeddings", input="aabc", dimensions=2)
    np.testing.assert_allclose(cut["data"][0]["embedding"], np.array([2, 1]) / 5**0.5, rtol=1e-6)
    plain = await ask(pooling, "/v1/embeddings", input="aab", normalize=False)
    assert plain["data"][0]["embedding"][:2] == [2, 1]


async def test_the_openai_client_reads_them(pooling: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=pooling.url + "/v1", api_key="none", max_retries=0
    ) as client:
        answer = await client.embeddings.create(model="fake", input=["aab", "b"], dimensions=4)
        assert [len(each.embedding) for each in answer.data] == [4, 4]
        assert answer.data[1].embedding == [0, 1, 0, 0]
        with pytest.raises(openai.BadRequestError, match="dimensions must be between 1 and"):
            await client.embeddings.create(model="fake", input="a", dimensions=9)


async def test_documents_are_ranked(pooling: Served) -> None:
    documents = ["xyz", "abc", {"text": "ab"}, "abcd"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = await ask(pooling, path, query="abcd", documents=documents)
        assert [each["index"] for each in answer["results"]] == [3, 1, 2, 0]
        assert answer["results"][2]["document"] == {"text": "ab"}
        assert answer["results"][0]["relevance_score"] == pytest.approx(4 / 26)
        assert answer["usage"]["total_tokens"] == 28
    best = await ask(
        pooling, "/rerank", query="abcd", documents=documents, top_n=1, return_documents=False
    )
    assert best["results"] == [{"index": 3, "relevance_score": pytest.approx(4 / 26)}]


async def test_scores_of_one_and_of_pairs(pooling: Served) -> None:
    one = await ask(pooling, "/score", text_1="ab", text_2=["a", "ab"])
    assert [each["score"] for each in one["data"]] == pytest.approx([1 / 26, 2 / 26])
    assert {each["object"] for each in one["data"]} == {"score"}
    pairs = await ask(pooling, "/v1/score", queries=["a", "x"], documents=["a", "b"])
    assert [each["score"] for each in pairs["data"]] == pytest.approx([1 / 26, 0])


async def test_classes_and_what_the_model_makes(pooling: Served) -> None:
    answer = await ask(pooling, "/classify", input=["a", "abcdefgh"])
    assert [each["label"] for each in answer["data"]] == ["few", "many"]
    assert answer["data"][0]["num_classes"] == 2
    assert answer["data"][0]["probs"] == pytest.approx([0.9, 0.1])
    vector = await ask(pooling, "/pooling", input="b")
    assert vector["data"][0]["data"] == [0, 1, 0, 0, 0, 0, 0, 0]
    probs = await ask(pooling, "/pooling", input="b", task="classify")
    assert len(probs["data"][0]["data"]) == 2


async def test_vectors_of_tokens(served: Served) -> None:
    """A model that makes them makes them without being asked, and nothing else."""

    class Tokens(LetterPooler):
        def _one(self, task: Task, each: PoolingText, options: PoolingOptions) -> Pooled:
            assert task == "token_embed"
            return Pooled(np.eye(DIMENSIONS, dtype=np.float32)[: len(each.text)], len(each.text))

    served.state.pooler = Tokens("token_embed", "score")
    for extra in ({}, {"task": "token_embed"}):
        answer = await ask(served, "/pooling", input=["abc", "a"], **extra)
        found = [each["data"] for each in answer["data"]]
        assert found == [np.eye(8)[:3].tolist(), np.eye(8)[:1].tolist()]
    cut = await ask(served, "/pooling", input="ab", dimensions=4)
    assert cut["data"][0]["data"] == np.eye(4)[:2].tolist()
    raw = await ask(served, "/pooling", input="ab", encoding_format="base64")
    data = np.frombuffer(base64.b64decode(raw["data"][0]["data"]), "<f4")
    np.testing.assert_array_equal(data.reshape(2, 8), np.eye(8)[:2])
    response = await served.client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 400
    served.state.pooler = LetterPooler("embed")
    response = await served.client.post("/pooling", json={"input": "a", "task": "token_embed"})
    assert "ColBERT" in response.json()["error"]["message"]


LOADS = {
    "/v1/embeddings": ({"input": "a"}, "Embedding"),
    "/pooling": ({"input": "a"}, "Embedding"),
    "/score": ({"text_1": "a", "text_2": "b"}, "rerank"),
    "/rerank": ({"query": "a", "documents": ["b"]}, "rerank"),
    "/classify": ({"input": "a"}, "classification head"),
}


@pytest.mark.parametrize("path", LOADS)
async def test_a_model_that_generates_says_what_to_load(served: Served, path: str) -> None:
    body, remedy = LOADS[path]
    response = await served.client.post(path, json=body)
    assert response.status_code == 400
    assert remedy in response.json()["error"]["message"]
    served.state.pooler = LetterPooler("score" if "score" not in remedy else "embed")
    if path in ("/v1/embeddings", "/classify"):
        again = await served.client.post(path, json=body)
        assert again.status_code == 400, "a model that does something else"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": [1 << 40]}, "input"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "x" * 51}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "nonsense": 0}, "nonsense"),
        ("/v1/embeddings", {"input": "a", "priority": -1}, "priority"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a"}, "text_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, None),
    ],
)
async def test_wrong_fields_are_named(
    pooling: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = await pooling.client.post(path, json=body)
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param


async def test_inputs_are_cut_where_that_is_wanted(pooling: Served) -> None:
    answer = await ask(pooling, "/v1/embeddings", input="a" * 60, truncate_prompt_tokens=10)
    assert answer["usage"]["total_tokens"] == 10


async def test_a_client_that_leaves_ends_the_work(served: Served) -> None:
    pooler = LetterPooler(wait=asyncio.Event())
    served.state.pooler = pooler
    asking = asyncio.ensure_future(served.client.post("/v1/embeddings", json={"input": "a"}))
    await served.in_flight_become(1)
    asking.cancel()
    await served.in_flight_become(0)
    assert pooler.was_cancelled


async def test_batches_of_embeddings(pooling: Served) -> None:
    from .test_batches import begin, content, ended

    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "b"}}
    batch = await ended(pooling, await begin(pooling, [line], endpoint="/v1/embeddings"))
    (record,) = await content(pooling, batch["output_file_id"])
    assert record["response"]["body"]["data"][0]["embedding"][:2] == [0, 1]
    assert isinstance(pooling.state.pooler, LetterPooler)
    assert pooling.state.pooler.options is not None
    assert pooling.state.pooler.options.who.priority == BATCH_PRIORITY


async def test_large_answers_hold_nobody(make_server: MakeServer) -> None:
    class Large(LetterPooler):
        dimensions = 4096

        def _one(self, task: Task, each: PoolingText, options: PoolingOptions) -> Pooled:
            return Pooled(np.ones(4096, np.float32), 1)

    async with make_server() as served:
        served.state.pooler = Large()

        async def ask() -> int:
            async with served.client.stream(
                "POST", "/v1/embeddings", json={"input": ["a"] * 500}
            ) as response:
                return sum([len(piece) async for piece in response.aiter_raw()])

        meter, size = await shortest_hold(ask, 20)
        assert size > 500 * 4096 * 3
        assert meter.longest_ms < 20, meter.what


async def test_vectors_of_many_tokens_go_out_in_pieces(make_server: MakeServer) -> None:
    class Tokens(LetterPooler):
        def _one(self, task: Task, each: PoolingText, options: PoolingOptions) -> Pooled:
            return Pooled(np.ones((8192, 128), np.float32), 1)

    async with make_server() as served:
        served.state.pooler = Tokens("token_embed")

        async def ask() -> int:
            async with served.client.stream("POST", "/pooling", json={"input": "a"}) as response:
                return sum([len(piece) async for piece in response.aiter_raw()])

        meter, size = await shortest_hold(ask, 20)
        assert size > 8192 * 128 * 3
        assert meter.longest_ms < 20, meter.what


async def test_the_text_of_all_pairs_is_bounded(served: Served) -> None:
    """One long text with each of many short ones is a small body and much to tokenise."""
    model = PoolingInfo(tasks=["score"], size=1)
    served.state.pooler = EnginePooler(served.llm, model)
    size = MAX_PAIRED_BYTES // 2048 + 1
    for path, names in (("/score", ("text_1", "text_2")), ("/rerank", ("query", "documents"))):
        body = {names[0]: "x" * size, names[1]: ["y"] * 2048, "truncate_prompt_tokens": 8}
        response = await served.client.post(path, json=body)
        assert response.status_code == 400
        assert "counts each time" in response.json()["error"]["message"]


async def test_vectors_of_tokens_are_compared_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        async def pool(self, task: Task, texts: Sequence[PoolingText], *rest: Any) -> list[Any]:
            one = np.eye(2, dtype=np.float32)
            outputs = [PoolingOutput(one * len(text.text)) for text in texts]
            return [
                PoolingRequestOutput(request_id="r", prompt_token_ids=[1], outputs=output)
                for output in outputs
            ]

    threads = list[int]()

    def compared(*both: Any) -> float:
        threads.append(threading.get_ident())
        return similarity(*both)

    monkeypatch.setattr("vllmx_server.generating.pooling.similarity", compared)
    pooler = EnginePooler(cast(Any, Model()), PoolingInfo(tasks=["score", "token_embed"], size=2))
    pairs = [PoolingText("aa", pair="b"), PoolingText("aa", pair="ccc")]
    found = await pooler.pool("score", pairs, PoolingOptions())
    assert [each.values.tolist() for each in found] == [[4.0], [12.0]]
    assert len(threads) == 2
    assert threading.get_ident() not in threads
