"""Answers written as a format says that a model writes them."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_core.output_format import OutputFormat
from vllmx_engine.formats.writer import WrittenCall, write_calls


def write_answer(
    made_of: OutputFormat,
    *,
    reasoning: str = "",
    content: str = "",
    calls: Sequence[WrittenCall] = (),
) -> str:
    """An answer with these parts; formats of channels aside."""
    text = ""
    if reasoning and made_of.thinking is not None:
        text = made_of.thinking.begin + reasoning + made_of.thinking.end
    if content:
        text += made_of.content_begin + content + made_of.content_end
    if calls and made_of.calls is not None:
        text += (made_of.calls.after_content if content else "") + write_calls(made_of.calls, calls)
    return text
