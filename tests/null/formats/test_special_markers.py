"""Markers that are special tokens keep their text, so that they are found; others stay hidden."""

from __future__ import annotations

from vllmx_core.output_format import Calls, JsonCall, OutputFormat, Thinking
from vllmx_core.sampling import SamplingParams
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.client.answers import AnswerReaders, ReadAnswer, marker_ids
from vllmx_engine.text.output import SequenceText
from vllmx_engine.text.tokenizer import Tokenizer

MADE_OF = OutputFormat(
    "odd",
    Thinking("<think>", "</think>"),
    Calls(JsonCall(), begin="<|im_start|>", end="<|im_start|>"),
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_a_special_token_as_a_marker() -> None:
    tokenizer = Tokenizer.from_folder(MODEL_FOLDER)
    kept = marker_ids(MADE_OF, tokenizer)
    assert kept == {1}  # those of thoughts are not special
    readers = AnswerReaders(MADE_OF, tokenizer, "", [], TOOLS, marker_ids=kept)
    written = '<think>a<|endoftext|>b</think>Hi<|im_start|>{"name": "f"}<|im_start|>'
    ids = tokenizer.encode(written, add_special_tokens=False)
    text, found, reader = (
        SequenceText(tokenizer, [], SamplingParams(), kept_ids=kept),
        ReadAnswer(),
        readers.reader(),
    )
    for token in ids:
        found.add(reader.push(text.push([token])[0]))
    found.add(reader.finish())
    assert (found.reasoning, found.content) == ("ab", "Hi")
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("f", "{}")]
    assert readers.num_reasoning_tokens(ids, reader) == 1 + ids.index(
        tokenizer.encode("</think>", False)[0]
    )
    hidden = SequenceText(tokenizer, [], SamplingParams())
    assert "<|im_start|>" not in "".join(hidden.push([token])[0] for token in ids)
