"""What `vllmx serve` says when it is ready."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllmx.cli.serve import _announce
from vllmx_server.apis.pooling.schema import CLASSIFY, EMBEDDINGS, RERANK


def test_the_line_says_what_loading_came_to() -> None:
    info: Any = SimpleNamespace(
        architecture="Qwen3ForCausalLM",
        dtype="bf16",
        backend="metal",
        max_model_len=4096,
        num_kv_blocks=512,
        block_size=16,
        max_num_seqs=23,
        pooling=None,
        audio_rows=0,
    )
    stream = io.StringIO()
    _announce("text", stream, "mine", info, "http://127.0.0.1:8000")
    shown = stream.getvalue()
    assert "mine (Qwen3ForCausalLM, bf16) on metal, context 4096, 8192 tokens of KV cache" in shown
    assert "up to 23 sequences together" in shown
    assert '"model": "mine"' in shown
    assert "/v1/chat/completions" in shown


@pytest.mark.parametrize(
    ("task", "path", "decoder"),
    [
        ("embed", "/v1/embeddings", EMBEDDINGS),
        ("score", "/v1/rerank", RERANK),
        ("classify", "/classify", CLASSIFY),
    ],
)
def test_the_request_that_is_shown_is_one_that_the_model_answers(
    task: str, path: str, decoder: Any
) -> None:
    info: Any = MagicMock(
        pooling=SimpleNamespace(tasks=(task,)), num_kv_blocks=1, block_size=1, audio_rows=0
    )
    stream = io.StringIO()
    _announce("text", stream, "mine", info, "http://127.0.0.1:8000")
    assert f"curl http://127.0.0.1:8000{path} " in stream.getvalue()
    (body,) = re.findall(r"-d '(.*)'", stream.getvalue())
    assert decoder.decode(body).model == "mine"
