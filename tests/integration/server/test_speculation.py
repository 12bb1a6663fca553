"""Speculation over HTTP: predicted outputs, usage and metrics; answers stay what they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_demo.source import MODEL_FOLDER

from .conftest import RunningServer, running_server

STORY = [{"role": "user", "content": "Tell a story about a dog."}]


@pytest.fixture(scope="module")
def drafting() -> Iterator[RunningServer]:
    with running_server("--speculate=twin", "--speculate-tokens=4", "--api-workers=2") as server:
        yield server


@pytest.fixture(scope="module")
def predicting() -> Iterator[RunningServer]:
    """Drafts from predictions alone, whether that pays on a busy machine or not."""
    with running_server("--speculate-tokens=8") as server:
        yield server


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": STORY, "max_tokens": 48, "temperature": 0, "ignore_eos": True} | fields
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_prediction_saves_steps_and_changes_no_token(
    predicting: RunningServer, as_parts: bool
) -> None:
    plain = chat(predicting)
    assert "accepted_prediction_tokens" not in str(plain["usage"])
    expected = text(plain)
    content: Any = expected.replace("dog", "cat", 1)
    if as_parts:
        content = [{"type": "text", "text": content[:30]}, {"type": "text", "text": content[30:]}]
    steps = predicting.metric("engine_steps_total")
    predicted = chat(predicting, prediction={"type": "content", "content": content})
    assert text(predicted) == expected
    details = predicted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 16
    assert details["rejected_prediction_tokens"] >= 0
    assert predicted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert predicting.metric("engine_steps_total") - steps < 32


@pytest.mark.parametrize(
    ("prediction", "word"),
    [
        ({"type": "text", "content": "a"}, "prediction"),
        ({"type": "content"}, "content"),
        ({"type": "content", "content": 5}, "content"),
        ("text", "prediction"),
    ],
)
def test_wrong_predictions_are_refused(server: RunningServer, prediction: Any, word: str) -> None:
    response = server.post("/v1/chat/completions", {"messages": STORY, "prediction": prediction})
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


def test_a_long_prediction_is_cut_to_the_context(server: RunningServer) -> None:
    answer = chat(server, prediction={"type": "content", "content": "a dog " * 200_000})
    assert text(answer) == text(chat(server))


def test_a_twin_drafts_for_all_requests(drafting: RunningServer, server: RunningServer) -> None:
    for fields in (
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 6, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}, "max_tokens": 80, "ignore_eos": False},
        {"stop": ["."], "seed": 7, "temperature": 0.5},
    ):
        drafted, plain = chat(drafting, **fields), chat(server, **fields)
        assert drafted["choices"] == plain["choices"]
    usage = chat(drafting)["usage"]["completion_tokens_details"]
    assert usage["accepted_prediction_tokens"] > 0
    accepted = drafting.metric("spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafting.metric("spec_decode_num_draft_tokens_total")
    assert drafting.metric("spec_decode_num_accepted_tokens_per_pos_total") == accepted
    predicted = chat(drafting, prediction={"type": "content", "content": text(chat(server))})
    assert text(predicted) == text(chat(server))


def test_usage_of_a_stream_has_its_drafts(drafting: RunningServer) -> None:
    body = {"messages": STORY, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = drafting.post("/v1/chat/completions", body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    details = chunks[-1]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    texts = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(texts) == text(chat(drafting, max_tokens=24))


def test_heads_draft_over_http(tmp_path: Path) -> None:
    """A checkpoint with a layer of multi-token prediction."""
    pytest.importorskip("transformers")
    from tests.backend.test_recurrent_architectures import TestQwen35
    from tests.head_checkpoints import QWEN, random_model, save_with_head, with_few_likely_ids

    config = dict(TestQwen35.config) | {"vocab_size": 4096}
    save_with_head(tmp_path, config, QWEN, random_model, with_few_likely_ids)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL_FOLDER) / name, tmp_path)
    flags = ("--dtype=float32", "--num-kv-blocks=60", "--max-model-len=256", "--backend=cpu")
    body = {"prompt": "Tom and Lily", "max_tokens": 40, "ignore_eos": True, "logprobs": 2}
    found = []
    for more in (("--speculative-config", '{"method": "qwen3_5_mtp"}'), ()):
        with running_server(str(tmp_path), *flags, *more, "--speculate-tokens=3") as server:
            answers = [
                server.post("/v1/completions", body | {"temperature": heat, "seed": 3}).json()
                for heat in (0.0, 0.8)
            ]
            found.append([answer["choices"] for answer in answers])
            details = answers[0]["usage"].get("completion_tokens_details") or {}
            assert (details.get("accepted_prediction_tokens", 0) > 0) == bool(more)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_drafters_of_hidden_states_draft_over_http(
    predicting: RunningServer, tmp_path: Path, kind: str
) -> None:
    """Files of a drafter for the demo model, in `speculators`' format."""
    from tests.drafter_checkpoints import dflash, eagle3

    target = json.loads((MODEL_FOLDER / "config.json").read_text())
    unused, points = np.zeros((target["vocab_size"], 1)), [1, 3, 5]
    if kind == "eagle3":
        layers = {"eagle_aux_hidden_state_layer_ids": points}
        eagle3(tmp_path, target, unused, ids=16, own_embedding=True, layer="layers.0", **layers)
    else:
        dflash(tmp_path, target, unused, unused, points, ids=16, from_speculators=True)
    given = json.dumps({"method": kind, "model": str(tmp_path), "num_speculative_tokens": 3})
    with running_server("--speculative-config", given) as server:
        for heat in (0.0, 0.8):
            found = chat(server, temperature=heat, seed=3)
            assert text(found) == text(chat(predicting, temperature=heat, seed=3))
            details = found["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 9
        assert server.metric("spec_decode_num_draft_tokens_total") > 90
