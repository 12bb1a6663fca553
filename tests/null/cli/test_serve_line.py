"""What `vllmx serve` says when it is ready."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from vllmx.cli.serve import _announce


def test_the_line_says_what_loading_came_to() -> None:
    info: Any = SimpleNamespace(
        architecture="Qwen3ForCausalLM",
        dtype="bf16",
        backend="metal",
        max_model_len=4096,
        num_kv_blocks=512,
        block_size=16,
        max_num_seqs=23,
    )
    stream = io.StringIO()
    _announce(stream, "mine", info, "http://127.0.0.1:8000")
    shown = stream.getvalue()
    assert "mine (Qwen3ForCausalLM, bf16) on metal, context 4096, 8192 tokens of KV cache" in shown
    assert "up to 23 sequences together" in shown
    assert '"model": "mine"' in shown
