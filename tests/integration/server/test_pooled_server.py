"""The routes of vectors, scores and classes over real models, through the whole application."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from vllmx_core.config import EngineConfig
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.async_llm import AsyncLLM
from vllmx_server.config import ServerConfig
from vllmx_server.host.app import build_app

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
Client = httpx.AsyncClient
Serve = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """A server of a model in this process, and a client of it."""

    @asynccontextmanager
    async def run(model: Any, *, has_template: bool = True, **config: Any) -> AsyncIterator[Client]:
        if not isinstance(model, str):
            model.save_pretrained(tmp_path)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(MODEL_FOLDER) / name, tmp_path)
            if not has_template:
                (tmp_path / "tokenizer_config.json").write_text("{}")
            model = str(tmp_path)
        engine = EngineConfig(model=model, served_model_name="m", backend="numpy", **config)
        async with await AsyncLLM.start(engine, in_process=True) as llm:
            transport = httpx.ASGITransport(build_app(llm, ServerConfig()))
            async with Client(transport=transport, base_url="http://127.0.0.1") as client:
                yield client

    return run


async def ask(client: Client, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = json.loads(response.text)
    return found


async def refused(client: Client, path: str, **body: Any) -> str:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.text


async def test_embeddings(serve: Serve) -> None:
    torch.manual_seed(0)
    model = transformers.MistralModel(
        transformers.MistralConfig(**CONFIG, num_key_value_heads=1)
    ).eval()
    async with serve(model) as client:
        answer = await ask(client, "/v1/embeddings", input=["The cat", "a dog", [5, 6, 7]])
        vectors = [np.array(each["embedding"]) for each in answer["data"]]
        with torch.no_grad():
            wanted = model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(vectors[2], wanted / np.linalg.norm(wanted), atol=2e-5)
        assert answer["usage"]["prompt_tokens"] > 3
        short = await ask(
            client, "/v1/embeddings", input="a dog", dimensions=5, encoding_format="base64"
        )
        cut = np.frombuffer(base64.b64decode(short["data"][0]["embedding"]), "<f4")
        head = vectors[1][:5]
        np.testing.assert_allclose(cut, head / np.linalg.norm(head), atol=1e-5)
        scored = await ask(client, "/score", text_1="The cat", text_2=["a dog", "The cat"])
        scores = [each["score"] for each in scored["data"]]
        np.testing.assert_allclose(scores, [vectors[0] @ vectors[1], 1], atol=1e-5)
        assert scores[1] <= 1
        assert "64" in await refused(client, "/v1/embeddings", input="a b c " * 100)
        text = await refused(client, "/v1/embeddings", input=["a", "a b c " * 100])
        assert "input 1: the text has" in text
        assert "truncate_prompt_tokens" in text
        text = await refused(client, "/v1/completions", model="m", prompt="The")
        assert "generates no text" in text
        text = await refused(
            client, "/v1/chat/completions", model="m", messages=[{"role": "user", "content": "x"}]
        )
        assert "generates no text" in text
        assert "load" in await refused(client, "/classify", input="x")
        await check_times(client, num_texts=6)
        await check_other_shapes(client, vectors)


async def check_other_shapes(client: Client, vectors: list[Any]) -> None:
    """TEI's, and a conversation, which is embedded as its tokens are."""
    rows = await ask_list(client, "/embed", inputs=["The cat", "a dog"])
    np.testing.assert_allclose(rows, vectors[:2], atol=1e-6)
    cut = await ask_list(client, "/embed", inputs="a b c " * 100, truncate=True)
    assert len(cut[0]) == CONFIG["hidden_size"]
    assert "no prompt" in await refused(client, "/embed", inputs="a", prompt_name="query")
    best, other = await ask_list(client, "/rerank", query="The cat", texts=["a dog", "The cat"])
    assert (best["index"], other["index"]) == (1, 0)
    talk = {"messages": [{"role": "user", "content": "a dog"}]}
    tokens = (await ask(client, "/tokenize", **talk, add_generation_prompt=False))["tokens"]
    by_talk, by_ids = [
        (await ask(client, "/v1/embeddings", **body))["data"] for body in (talk, {"input": tokens})
    ]
    assert by_talk == by_ids
    invoked = await ask(client, "/invocations", **talk)
    assert invoked["data"] == by_talk


async def ask_list(client: Client, path: str, **body: Any) -> list[Any]:
    found: Any = await ask(client, path, **body)
    assert isinstance(found, list)
    return found


async def check_times(client: Client, num_texts: int) -> None:
    """Each text that was computed has its times in /metrics, one that came twice once."""
    text = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model_name="m"}'
    for kind in ("queue", "prefill", "inference"):
        assert values[f"vllmx:request_{kind}_time_seconds_count{label}"] == f"{num_texts}.0"
    assert float(values[f"vllmx:request_prefill_time_seconds_sum{label}"]) > 0
    assert values[f"vllmx:request_decode_time_seconds_count{label}"] == "0.0"
    assert values[f"vllmx:request_prompt_tokens_count{label}"] == f"{num_texts}.0"


async def test_a_text_whose_vector_is_broken_is_named(serve: Serve) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**CONFIG, num_key_value_heads=1)
    model = transformers.MistralModel(config).eval()
    with torch.no_grad():
        model.embed_tokens.weight[7] = float("nan")
    async with serve(model) as client:
        response = await client.post("/v1/embeddings", json={"input": [[5], [6, 7], [5]]})
        assert response.status_code == 500
        error = json.loads(response.text)["error"]
        assert error["code"] == "non_finite_logits"
        assert error["message"].startswith("input 1: what the model made")
        answer = await ask(client, "/v1/embeddings", input=[[5], [6]])
        assert len(answer["data"]) == 2


async def test_a_cross_encoder_ranks(serve: Serve) -> None:
    torch.manual_seed(1)
    config = transformers.BertConfig(**CONFIG, num_labels=1, type_vocab_size=2)
    model = transformers.BertForSequenceClassification(config).eval()
    documents = ["a dog", "The cat sat on the mat.", "Once upon a time"]
    async with serve(model) as client:
        scored = await ask(client, "/v1/score", text_1="The cat", text_2=documents)
        scores = [each["score"] for each in scored["data"]]
        ranked = await ask(client, "/v1/rerank", query="The cat", documents=documents, top_n=2)
        for name in ("activation", "use_activation"):
            asked = {"text_1": "The cat", "text_2": documents, name: False}
            raw = (await ask(client, "/v1/score", **asked))["data"]
            logits = [np.log(score / (1 - score)) for score in scores]
            np.testing.assert_allclose([each["score"] for each in raw], logits, atol=1e-4)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(MODEL_FOLDER) / "tokenizer.json")
    )
    for document, score in zip(documents, scores, strict=True):
        encoded = tokenizer.backend_tokenizer.encode("The cat", document)
        with torch.no_grad():
            logit = model(
                torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])
            ).logits[0, 0]
        assert score == pytest.approx(float(torch.sigmoid(logit)), abs=2e-5)
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [each["index"] for each in ranked["results"]] == best


async def test_classes(serve: Serve) -> None:
    torch.manual_seed(2)
    labels = {0: "good", 1: "bad", 2: "neither"}
    config = transformers.LlamaConfig(**CONFIG, id2label=labels)
    model = transformers.LlamaForSequenceClassification(config).eval()
    async with serve(model) as client:
        answer = await ask(client, "/classify", input=[[5, 6, 7]])
        text = await refused(client, "/v1/embeddings", input="x")
    with torch.no_grad():
        wanted = model(torch.tensor([[5, 6, 7]])).logits[0].softmax(-1).numpy()
    np.testing.assert_allclose(answer["data"][0]["probs"], wanted, atol=2e-5)
    assert answer["data"][0]["label"] == labels[int(wanted.argmax())]
    assert "makes no embeddings" in text


async def test_an_encoder_without_a_template_says_that_it_generates_nothing(serve: Serve) -> None:
    config = transformers.BertConfig(**CONFIG, type_vocab_size=2)
    async with serve(transformers.BertModel(config).eval(), has_template=False) as client:
        messages = [{"role": "user", "content": "x"}]
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/messages", {"messages": messages, "max_tokens": 3}),
        ):
            assert "generates no text" in await refused(client, path, model="m", **body)


async def test_a_generating_model_makes_no_vectors_unless_asked(serve: Serve) -> None:
    async with serve("demo", max_model_len=64) as client:
        assert "makes no embeddings" in await refused(client, "/v1/embeddings", input="x")
    async with serve("demo", max_model_len=64, task="embed") as client:
        answer = await ask(client, "/v1/embeddings", input="x")
        assert len(answer["data"][0]["embedding"]) > 8


async def test_late_interaction(serve: Serve, tmp_path: Path) -> None:
    """ColBERT as PyLate saves it: vectors of tokens, and scores by MaxSim."""
    torch.manual_seed(0)
    model, dense = (
        transformers.BertModel(transformers.BertConfig(**CONFIG)).eval(),
        tmp_path / "1_Dense",
    )
    dense.mkdir()
    weight = torch.randn(8, 32)
    save_file({"linear.weight": weight.numpy()}, dense / "model.safetensors")
    sizes = {"in_features": 32, "out_features": 8, "bias": False}
    (dense / "config.json").write_text(json.dumps(sizes))
    listed = [{"type": "Transformer", "path": ""}, {"type": "Dense", "path": "1_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    texts = ["The cat", "a dog", "Once upon a time"]
    async with serve(model) as client:
        expected = []
        for text in texts:
            tokens = (await ask(client, "/tokenize", prompt=text))["tokens"]
            with torch.no_grad():
                rows = model(torch.tensor([tokens])).last_hidden_state[0] @ weight.T
            expected.append(torch.nn.functional.normalize(rows, dim=-1).numpy())
        answer = await ask(client, "/pooling", input=texts)
        for row, wanted in zip(answer["data"], expected, strict=True):
            np.testing.assert_allclose(row["data"], wanted, atol=2e-5)
        wanted = [float((expected[0] @ each.T).max(axis=1).sum()) for each in expected]
        scored = await ask(client, "/score", text_1=texts[0], text_2=texts)
        np.testing.assert_allclose([each["score"] for each in scored["data"]], wanted, atol=2e-5)
        ranked = await ask(client, "/rerank", query=texts[0], documents=texts)
        found = [each["index"] for each in ranked["results"]]
        assert found == sorted(range(3), key=lambda place: -wanted[place])
        assert "makes no embeddings" in await refused(client, "/v1/embeddings", input="a")
