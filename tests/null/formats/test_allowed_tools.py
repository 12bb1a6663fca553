"""Calls of tools that are not allowed, in formats that no grammar holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.plugins.registry import load_registry
from vllmx_core.records import Record
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.client.answers import AnswerReaders
from vllmx_engine.client.chat import ChatRenderer
from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.text.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "delete")]


class Asked(Record):
    """The part of a request that is looked at."""

    prompt: str = ""
    prompt_ids: tuple[int, ...] = ()
    readers: AnswerReaders | None = None


def read(parser: str, text: str, allowed: Sequence[str] | None) -> ReadAnswer:
    tokenizer = Tokenizer.from_folder(MODEL_FOLDER)
    config = EngineConfig(tool_parser=parser, reasoning_parser="qwen3")
    renderer = ChatRenderer.of(config, tokenizer, load_registry())
    asked: Any = renderer.with_readers(
        Asked(),  # type: ignore[arg-type]
        ChatOptions(tools=TOOLS, allowed_tools=allowed),
    )
    found = ReadAnswer()
    reader = asked.readers.reader()
    found.add(reader.push(text))
    found.add(reader.finish())
    return found


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "delete", "parameters": {"all": true}}'),
        ("pythonic", "[delete(all=True)]"),
    ],
)
def test_a_tool_that_is_not_allowed_is_not_called(parser: str, text: str) -> None:
    """What the model writes of it is content."""
    for allowed in (None, ("delete",), ("add", "delete")):
        (call,) = read(parser, text, allowed).tool_calls
        assert call.name == "delete"
    for allowed in (("add",), ()):
        found = read(parser, text, allowed)
        assert not found.tool_calls
        assert found.content == text
    good = text.replace("delete", "add")
    (call,) = read(parser, good, ("add",)).tool_calls
    assert call.name == "add"
