"""Text of one sequence: detokenizer and stop strings together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.sampling import SamplingParams
from vllmx_engine.text.output import SequenceText
from vllmx_engine.text.tokenizer import Tokenizer


def test_text_flows_and_ends(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Once upon a time")
    text = SequenceText(byte_level, (), SamplingParams())
    shown = "".join(text.push([i])[0] for i in ids)
    assert shown + text.finish("length") == "Once upon a time"
    assert (text.finish_reason, text.stop_reason, text.num_tokens) == ("length", None, len(ids))


def test_stop_string_ends_the_sequence_and_drops_later_ids(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one. two. three.")
    text = SequenceText(byte_level, (), SamplingParams(stop=(". t",)))
    assert text.push(ids) == ("one", ". t")
    assert text.num_tokens < len(ids)
    assert (text.finish_reason, text.stop_reason) == ("stop", ". t")
    assert text.finish("length") == ""
    assert text.finish_reason == "stop"


def test_held_text_is_flushed_with_the_incomplete_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab<🚀")[:-1]
    text = SequenceText(byte_level, (), SamplingParams(stop=("</s>",)))
    shown = "".join(text.push([i])[0] for i in ids)
    assert shown == "ab"
    assert text.finish("length") == "<\ufffd"


def test_stop_token_text_is_left_out_unless_asked_for(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("ab"), 2]
    for include, expected in ((False, "ab"), (True, "ab<|im_end|>")):
        params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
        text = SequenceText(byte_level, (), params, keep_offsets=True)
        shown, stop = text.push(ids, ends_with_stop_token=True)
        assert (shown + text.finish("stop"), stop) == (expected, None)
        assert text.num_tokens == len(ids)
        assert text.token_offsets is not None
        assert len(text.token_offsets) == len(ids)


def test_min_tokens_lets_early_stops_pass(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(char)[0] for char in "a.b.c"]
    for min_tokens, expected in ((0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")):
        text = SequenceText(byte_level, (), SamplingParams(stop=(".",), min_tokens=min_tokens))
        assert text.push(ids)[0] + text.finish("length") == expected


@given(value=st.text(max_size=30), group=st.integers(1, 4))
@settings(max_examples=40)
def test_offsets_point_at_the_tokens(tokenizer: Tokenizer, value: str, group: int) -> None:
    ids = tokenizer.encode(value)
    grouped = SequenceText(tokenizer, (), SamplingParams(), keep_offsets=True)
    shown = "".join(grouped.push(ids[i : i + group])[0] for i in range(0, len(ids), group))
    shown += grouped.finish("stop")
    offsets = grouped.token_offsets
    assert offsets is not None
    assert shown == tokenizer.decode(ids)
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    for token_id, offset in zip(ids, offsets, strict=True):
        text = tokenizer.token_text(token_id)
        if tokenizer.coding and token_id not in tokenizer.special_ids and "\ufffd" not in text:
            assert shown.startswith((text, text.removeprefix(" ")), offset)
