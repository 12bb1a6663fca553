"""The Open Inference Protocol with `--apis kserve`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from .conftest import MakeServer, Served, events_of
from .test_pooling import LetterPooler, ask

FLAGS = {"apis": ("kserve",)}
MODEL = "/v2/models/fake"


@pytest.fixture
async def kserve(make_server: MakeServer) -> AsyncIterator[Served]:
    async with make_server(FLAGS) as served:
        yield served


def tensor(*texts: str, **more: Any) -> dict[str, Any]:
    return {"name": "in", "datatype": "BYTES", "shape": [len(texts)], "data": texts, **more}


async def test_the_server_and_its_models(kserve: Served) -> None:
    async def get(path: str) -> Any:
        response = await kserve.client.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    assert (await get("/v2"))["name"] == "vllmx"
    assert await get("/v2/health/live") == {"live": True}
    assert await get("/v2/health/ready") == {"ready": True}
    assert await get(f"{MODEL}/ready") == {"name": "fake", "ready": True}
    about = await get(MODEL)
    assert about["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}]
    kserve.state.pooler = LetterPooler()
    (output,) = (await get(MODEL))["outputs"]
    assert output == {"name": "embeddings", "datatype": "FP32", "shape": [-1, 8]}
    for path in ("", "/ready"):
        missing = await kserve.client.get(f"/v2/models/other{path}")
        assert missing.status_code == 404
        assert "'other' is not served" in missing.json()["error"]
    kserve.state.admission.draining = True
    drained = await kserve.client.get("/v2/health/ready")
    assert (drained.status_code, drained.json()) == (503, {"ready": False})


async def test_vectors_and_classes(kserve: Served) -> None:
    kserve.state.pooler = LetterPooler()
    found = await ask(kserve, f"{MODEL}/infer", id="7", inputs=[tensor("aab", "c")],
                      outputs=[{"name": "embeddings"}])  # fmt: skip
    assert (found["model_name"], found["id"]) == ("fake", "7")
    (output,) = found["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("embeddings", "FP32", [2, 8])
    rows = np.reshape(output["data"], output["shape"])
    plain = await ask(kserve, "/v1/embeddings", input=["aab", "c"])
    np.testing.assert_array_equal(rows, [each["embedding"] for each in plain["data"]])
    kserve.state.pooler = LetterPooler("classify")
    column = tensor("abc", "d", shape=[2, 1])
    (output,) = (await ask(kserve, f"{MODEL}/infer", inputs=[column]))["outputs"]
    assert output["parameters"] == {"labels": ["few", "many"]}
    np.testing.assert_allclose(output["data"], [0.7, 0.3, 0.9, 0.1], rtol=1e-5)


async def test_texts(kserve: Served) -> None:
    params = {"max_tokens": 6, "temperature": 0.0}
    found = await ask(kserve, f"{MODEL}/generate", text_input="ab", parameters=params, id="x")
    plain = await ask(kserve, "/v1/completions", prompt="ab", **params)
    text = plain["choices"][0]["text"]
    assert found == {"model_name": "fake", "id": "x", "text_output": text}
    body = {"text_input": "ab", "parameters": params}
    response = await kserve.client.post(f"{MODEL}/generate_stream", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "".join(each["text_output"] for each in events_of(response.text)) == text
    both = await ask(kserve, f"{MODEL}/infer", inputs=[tensor("ab", "ab")], parameters=params)
    output = {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": [text, text]}
    assert both["outputs"] == [output]
    usual = await ask(kserve, f"{MODEL}/generate", text_input="ab", parameters={"ignore_eos": True})
    assert usual["text_output"].startswith(text[:1])
    await kserve.becomes_idle()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("generate", {"parameters": {"n": 2}}, "parameters.n = 2 is not served"),
        ("generate", {"parameters": {"stream": True}}, "generate_stream"),
        ("generate", {"parameters": {"nonsense": 1}}, "parameters.nonsense"),
        ("generate", {"parameters": {"temperature": -1}}, "temperature"),
        ("generate", {"text_input": "a" * 600}, "512"),
        ("generate", {"text_input": 1}, "text_input"),
        ("infer", {"inputs": []}, "inputs"),
        ("infer", {"inputs": [tensor("a"), tensor("b")]}, "inputs"),
        ("infer", {"inputs": [tensor("a", shape=[2])]}, "give [1]"),
        ("infer", {"inputs": [tensor("a", datatype="FP32")]}, "FP32"),
        ("infer", {"inputs": [tensor("a")], "outputs": [{"name": "no"}]}, "text_output"),
    ],
)
async def test_what_cannot_be_served_is_named(
    kserve: Served, path: str, body: dict[str, Any], words: str
) -> None:
    asked = {"text_input": "ab", **body} if path == "generate" else body
    refused = await kserve.client.post(f"{MODEL}/{path}", json=asked)
    assert refused.status_code == 400, refused.text
    assert set(refused.json()) == {"error"}
    assert words in refused.json()["error"]


async def test_what_a_model_with_vectors_refuses(kserve: Served) -> None:
    kserve.state.pooler = LetterPooler()
    for more, words in (
        ({"parameters": {"max_tokens": 5}}, "parameters are for"),
        ({"outputs": [{"name": "text_output"}]}, "embeddings"),
        ({"inputs": [tensor("a" * 60)]}, "over 50"),
    ):
        body = {"inputs": [tensor("a")], **more}
        refused = await kserve.client.post(f"{MODEL}/infer", json=body)
        assert refused.status_code == 400, refused.text
        assert words in refused.json()["error"]


async def test_keys_and_other_models(make_server: MakeServer) -> None:
    async with make_server({**FLAGS, "api_key": ("k",)}) as served:
        body = {"text_input": "a"}
        refused = await served.client.post(f"{MODEL}/generate", json=body)
        assert (refused.status_code, set(refused.json())) == (401, {"error"})
        assert (await served.client.get("/v2/health/ready")).status_code == 200, "probes have none"
        key = {"authorization": "Bearer k"}
        for path in ("generate", "infer"):
            sent = body if path == "generate" else {"inputs": [tensor("a")]}
            missing = await served.client.post(f"/v2/models/no/{path}", json=sent, headers=key)
            assert missing.status_code == 404, missing.text
