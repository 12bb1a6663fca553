"""The demo model ships whole, and its name leads to it from anywhere."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from vllmx_core.config import DEMO_MODEL
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint, resolve_path
from vllmx_core.plugins.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER, demo_model


def test_the_default_model_is_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEMO_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of that name must not take its place
    registry = load_registry()
    path = resolve_path(registry, DEMO_MODEL)
    assert path == MODEL_FOLDER
    checkpoint = open_checkpoint(registry, path)
    model = build_model(registry, checkpoint)
    assert (model.shape.vocab_size, model.shape.max_model_len) == (4096, 2048)
    parts = {(part.name, part.rows) for spec in model.weights() for part in spec.parts}
    assert {name for name, _ in parts} == set(checkpoint.weights.names())
    for name, rows in parts:
        assert checkpoint.weights.part(name).shape[0] == rows
    assert checkpoint.generation_config["eos_token_id"] == [2, 0]
    checkpoint.weights.close()


def test_other_names_are_not_the_demo() -> None:
    assert demo_model("org/demo", None, False) is None


def test_everything_that_serving_needs_is_there() -> None:
    assert {path.name for path in MODEL_FOLDER.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "MODEL_CARD.md",
    }
    tokenizer = json.loads((MODEL_FOLDER / "tokenizer_config.json").read_text())
    assert "add_generation_prompt" in tokenizer["chat_template"]
    assert importlib.metadata.version("vllmx-demo") == importlib.metadata.version("vllmx-core")
