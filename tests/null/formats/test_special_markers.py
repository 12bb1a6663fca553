"""Markers that are special tokens keep their text, so that they are found; others stay hidden."""

from __future__ import annotations

import pytest
from vllmx_core.output_format import Calls, JsonCall, OutputFormat, Thinking
from vllmx_core.sampling import SamplingParams
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.client.answers import AnswerReaders, marker_ids
from vllmx_engine.formats.events import ReadAnswer
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
    expected = 1 + ids.index(tokenizer.encode("</think>", False)[0])
    assert readers.reasoning_counter().add(ids, reader) == expected
    hidden = SequenceText(tokenizer, [], SamplingParams())
    assert "<|im_start|>" not in "".join(hidden.push([token])[0] for token in ids)


@pytest.mark.parametrize("end", ["</think>", "</of thoughts>"])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 500])
def test_the_count_of_thoughts_does_not_depend_on_how_tokens_come(
    size: int, is_open: bool, end: str
) -> None:
    """A stream that is read slowly gets several tokens in one output, the end of thoughts among
    them."""
    tokenizer = Tokenizer.from_folder(MODEL_FOLDER)
    begin = "<thoughts of>"
    made_of = OutputFormat("odd", Thinking(begin, end))
    readers = AnswerReaders(made_of, tokenizer, begin if is_open else "", [], TOOLS)
    thoughts = tokenizer.encode(f"{'' if is_open else begin} Is it 3 or 4?{end}", False)
    ids = thoughts + tokenizer.encode("It is 7, and no more than that.", False)
    text, reader = SequenceText(tokenizer, [], SamplingParams()), readers.reader()
    counter = readers.reasoning_counter()
    for at in range(0, len(ids), size):
        reader.push(text.push(ids[at : at + size])[0])
        counter.add(ids[at : at + size], reader)
    assert counter.count == len(thoughts)
