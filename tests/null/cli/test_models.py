"""`vllmx models` lists what the installed plugins provide."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner
from vllmx.cli.models import architectures, models

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_json_names_files_and_plugin() -> None:
    rows = json.loads(CliRunner().invoke(models, ["--json"]).output)
    (llama,) = (row for row in rows if row["model_type"] == "llama")
    assert "LlamaForCausalLM" in llama["architectures"]
    assert "llama" in llama["gguf"]
    assert llama["plugin"].startswith("vllmx-models")
    assert len(rows) >= 30
    assert {"safetensors", "gptq", "fp8", "gguf"} <= set(llama["formats"])
    assert {"cpu", "numpy"} <= set(llama["backends"])
    assert llama["checked"] == ["logits"]
    (seeing,) = (row for row in rows if row["model_type"] == "gemma3")
    assert "gguf" not in seeing["formats"]
    (mixtral,) = (row for row in rows if row["model_type"] == "mixtral")
    assert mixtral["gguf"] == ["llama"], "the files of a llama may have experts"
    assert "gguf" in mixtral["formats"]
    assert seeing["checked"] == ["images"]


def test_a_line_for_each() -> None:
    rows = json.loads(CliRunner().invoke(models, ["--json"]).output)
    lines = CliRunner().invoke(models, []).output.splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[0].split() == [
        "MODEL",
        "TYPE",
        "ARCHITECTURE",
        "GGUF",
        "BACKENDS",
        "CHECKED",
        "FROM",
    ]
    assert any(line.startswith("qwen3_moe ") and " qwen3moe " in line for line in lines)


def test_the_page_has_every_architecture() -> None:
    if not DOCS.exists():
        pytest.skip("without the repository there are no docs")
    page = runpy.run_path(str(DOCS / "list_models.py"))["page"]()
    found = [name for model in architectures() for name in model.architectures]
    assert [name for name in found if name not in page] == []
