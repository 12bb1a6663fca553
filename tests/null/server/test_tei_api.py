"""TEI's own API with `--apis tei`, over a pooler that counts letters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllmx_server.generating.pooling import Task

from .conftest import MakeServer, Served
from .test_pooling import LetterPooler, ask

FLAGS = {"apis": ("tei",), "web": False}


@pytest.fixture
async def tei(make_server: MakeServer) -> AsyncIterator[Served]:
    async with make_server(FLAGS) as served:
        served.state.pooler = LetterPooler()
        yield served


async def test_classes_of_texts_and_pairs(tei: Served) -> None:
    few, many = {"score": pytest.approx(0.7), "label": "few"}, {"score": pytest.approx(0.3),
                 "label": "many"}  # fmt: skip
    assert await ask(tei, "/predict", inputs="abc") == [few, many]
    assert await ask(tei, "/predict", inputs=["abc", "d"]) == [few, many], "a pair"
    rows = await ask(tei, "/predict", inputs=[["a" * 9], ["abc", "d"]])
    assert [each["label"] for each in rows[0]] == ["many", "few"], "the likeliest first"
    assert rows[1] == [few, many]
    pooler = tei.state.pooler
    assert isinstance(pooler, LetterPooler)
    for raw in (False, True):
        await ask(tei, "/predict", inputs="a", raw_scores=raw, truncate=True)
        assert pooler.options is not None
        assert (pooler.options.normalize, pooler.options.max_tokens) == (not raw, 512)


@pytest.mark.parametrize(
    ("tasks", "body", "path"),
    [
        (("embed", "score"), {"inputs": "ab"}, "/embed"),
        (("score", "classify"), {"query": "a", "texts": ["b", "a"]}, "/rerank"),
        (("classify",), {"inputs": "ab"}, "/predict"),
    ],
)
async def test_the_root_answers_for_the_model(
    tei: Served, tasks: tuple[Task, ...], body: dict[str, Any], path: str
) -> None:
    tei.state.pooler = LetterPooler(*tasks)
    assert await ask(tei, "/", **body) == await ask(tei, path, **body)
    about = (await tei.client.get("/info")).json()
    assert about["max_input_length"] == 512
    kind = {"/embed": "embedding", "/rerank": "reranker", "/predict": "classifier"}[path]
    assert list(about["model_type"]) == [kind]


async def test_texts_and_tokens(tei: Served) -> None:
    rows = await ask(tei, "/tokenize", inputs=["ab", "c"], add_special_tokens=False)
    assert [[each["id"] for each in row] for row in rows] == [[97, 98], [99]]
    assert rows[1][0] == {"id": 99, "text": "c", "special": False, "start": None, "stop": None}
    assert len(await ask(tei, "/tokenize", inputs="ab")) == 1
    assert await ask(tei, "/decode", ids=[97, 98]) == ["ab"]
    assert await ask(tei, "/decode", ids=[[97], [98, 99]]) == ["a", "bc"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/predict", {"inputs": ["a", "b", "c"]}, "a pair of texts"),
        ("/predict", {"inputs": [["a"], "b", []]}, "a pair of texts"),
        ("/predict", {"inputs": ["a", ["b"]]}, "inputs"),
        ("/predict", {"inputs": "a" * 60}, "over 50"),
        ("/predict", {"inputs": "a", "parameters": {"top_k": 2}}, "parameters"),
        ("/predict", {"inputs": "a", "nonsense": 1}, "nonsense"),
        ("/predict", {"inputs": "a", "truncation_direction": "Left"}, "truncation_direction"),
        ("/tokenize", {"inputs": []}, "inputs"),
        ("/decode", {"ids": [10**6]}, "1000000"),
        ("/decode", {"ids": [1, [2]]}, "ids must be"),
        ("/embed_all", {"inputs": "a"}, "/embed_all is not served"),
        ("/embed_sparse", {"inputs": "a"}, "/embed_sparse is not served"),
        ("/embed", {"inputs": "a" * 60}, "over 50"),
        ("/rerank", {"query": "a", "texts": []}, "texts"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_named(
    tei: Served, path: str, body: dict[str, Any], words: str
) -> None:
    refused = await tei.client.post(path, json=body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error_type"] == "Validation"
    assert words in refused.json()["error"]


async def test_other_apis_keep_their_errors(make_server: MakeServer) -> None:
    async with make_server({**FLAGS, "api_key": ("k",)}) as served:
        refused = await served.client.get("/info")
        assert refused.status_code == 401
        assert set(refused.json()) == {"error", "error_type"}
        openai = await served.client.post("/v1/completions", json={"prompt": "a"})
        assert openai.json()["error"]["code"] == "invalid_api_key"


async def test_a_model_that_generates_says_what_to_load(make_server: MakeServer) -> None:
    async with make_server(FLAGS) as served:
        refused = await served.client.post("/predict", json={"inputs": "a"})
        assert "classification head" in refused.json()["error"]
