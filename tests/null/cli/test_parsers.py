"""`vllmx parsers` says what was found for a model, and lists what there is."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from vllmx.cli.parsers import parsers


def test_all_formats() -> None:
    rows = json.loads(CliRunner().invoke(parsers, ["--json"]).output)
    found = {row["name"]: row for row in rows}
    assert "kimi_k2" in found["kimi"]["aliases"]
    assert found["think"]["reads"] == ["reasoning"]
    assert found["harmony"]["reads"] == ["tools", "reasoning"]
    assert len(CliRunner().invoke(parsers, []).output.splitlines()) == len(rows)


def test_of_a_model() -> None:
    shown = CliRunner().invoke(parsers, ["demo"]).output
    assert "calls of tools: hermes (it writes calls as the chat template does)" in shown
    assert '    {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}' in shown
    assert "'<think>\\n' ... '\\n</think>\\n\\n'" in shown


def test_of_a_template_that_no_format_reads(tmp_path: Path) -> None:
    template = tmp_path / "odd.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name ~ c.function.arguments }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    shown = CliRunner().invoke(parsers, ["demo", "--chat-template", str(template)]).output
    assert "calls of tools: not read: no record fits the chat template, and nothing is" in shown
    assert "thoughts: not read" in shown


def test_by_name() -> None:
    flags = ["demo", "--tool-call-parser", "glm45", "--reasoning-parser", "none"]
    shown = CliRunner().invoke(parsers, flags).output
    assert "calls of tools: glm45 (--tool-parser)" in shown
    assert "thoughts: not read (--reasoning-parser none)" in shown
    wrong = CliRunner().invoke(parsers, ["demo", "--tool-parser", "hermse"])
    assert "did you mean 'hermes'" in str(wrong.exception)
    wrong = CliRunner().invoke(parsers, ["demo", "--tool-parser", "think"])
    assert "says nothing of calls of tools" in str(wrong.exception)
