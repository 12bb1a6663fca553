"""Incremental detokenizing equals decoding the whole, for real texts and random ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_engine.text.detokenizer import PieceDetokenizer, WindowDetokenizer, make_detokenizer
from vllmx_engine.text.tokenizer import Tokenizer

FAST = settings(max_examples=40)
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def streamed(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    prompt: Sequence[int] = (),
    group: int = 1,
    skip_special_tokens: bool = True,
) -> str:
    """The text when `ids` come in groups of `group`."""
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    parts = [detokenizer.push(ids[i : i + group]) for i in range(0, len(ids), group)]
    return "".join([*parts, detokenizer.finish()])


def byte_of(tokenizer: Tokenizer, token_id: int) -> int | None:
    """The byte of a byte-fallback token."""
    match = BYTE_TOKEN.fullmatch(tokenizer.id_to_token(token_id) or "")
    return int(match[1], 16) if match else None


def has_mixed_byte_run(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> bool:
    """A run of byte tokens that is invalid as a whole but holds a valid character.

    `ByteFallback` gives up on such a run; the stream keeps the valid characters.
    """
    visible = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    known = [i for i in visible if tokenizer.id_to_token(i) is not None]
    runs, run = [], bytearray()
    for token_id in [*known, -1]:
        byte = None if token_id < 0 else byte_of(tokenizer, token_id)
        if byte is None:
            runs.append(bytes(run))
            run = bytearray()
        else:
            run.append(byte)
    return any("\ufffd" in (t := r.decode("utf-8", "replace")) and t.strip("\ufffd") for r in runs)


def is_sentencepiece(tokenizer: Tokenizer) -> bool:
    return tokenizer.coding is not None and tokenizer.coding.errors != "replace"


@given(data=st.data(), group=st.integers(1, 5), skip=st.booleans())
@FAST
def test_random_ids_equal_whole_decode(
    tokenizer: Tokenizer, data: st.DataObject, group: int, skip: bool
) -> None:
    anything = st.integers(0, tokenizer.vocab_size + 20)
    low = st.integers(0, min(300, tokenizer.vocab_size))
    ids = data.draw(st.lists(st.one_of(anything, low), max_size=30))
    if is_sentencepiece(tokenizer) and has_mixed_byte_run(tokenizer, ids, skip):
        return
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert streamed(tokenizer, ids, group=group, skip_special_tokens=skip) == whole


@given(text=st.text(max_size=60), group=st.integers(1, 4))
@FAST
def test_encoded_text_equals_whole_decode(tokenizer: Tokenizer, text: str, group: int) -> None:
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids, group=group) == tokenizer.decode(ids)


@given(text=st.text(min_size=1, max_size=40), data=st.data())
@FAST
def test_output_continues_the_prompt(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    stable = make_detokenizer(tokenizer).push(ids[:cut])
    assert stable + streamed(tokenizer, ids[cut:], ids[:cut]) == tokenizer.decode(ids)


@given(runs=st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=4))
@FAST
def test_byte_runs_keep_their_valid_characters(sentencepiece: Tokenizer, runs: list[bytes]) -> None:
    letter = sentencepiece.token_to_id("a")
    assert letter is not None
    ids = [i for run in runs for i in [*(3 + byte for byte in run), letter]]
    expected = ""
    for run in runs:
        rest = run
        while rest:
            size = next((n for n in range(1, 5) if _is_char(rest[:n])), 0)
            expected += rest[:size].decode() if size else "\ufffd"
            rest = rest[size or 1 :]
        expected += "a"
    assert streamed(sentencepiece, ids) == expected.removeprefix(" ")


def _is_char(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def test_split_emoji_appears_once_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a👩‍🚀b")
    detokenizer = make_detokenizer(byte_level)
    parts = [detokenizer.push([token_id]) for token_id in ids]
    assert len(ids) > 8
    assert "".join(parts) == "a👩‍🚀b"
    assert not any("\ufffd" in part for part in parts)
    assert detokenizer.finish() == ""


def test_incomplete_tail_is_flushed_as_replacement(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    ids = byte_level.encode("é🚀")[:-1]
    detokenizer = make_detokenizer(byte_level)
    assert detokenizer.push(ids) == "é"
    assert detokenizer.finish() == "\ufffd"
    assert streamed(sentencepiece, [3 + 0xF0, 3 + 0x9F]) == "\ufffd\ufffd"


def test_leading_space_is_kept_after_a_prompt_only(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the tin", add_special_tokens=False)
    assert streamed(sentencepiece, ids) == "the tin"
    assert streamed(sentencepiece, ids, prompt=[1]) == "the tin"
    assert streamed(sentencepiece, ids, prompt=ids) == " the tin"


def test_character_begun_by_the_prompt_belongs_to_the_output(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("x🚀y")
    assert streamed(byte_level, ids[3:], ids[:3]) == "🚀y"


def test_special_tokens_are_skipped_or_kept(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|><|tool▁call|>b<think>   é中")
    assert streamed(byte_level, ids) == "a<|tool▁call|>b<think>   é中"
    kept = streamed(byte_level, ids, skip_special_tokens=False)
    assert kept == "a<|im_end|><|tool▁call|>b<think>   é中"


def test_neighbouring_special_tokens_without_spaces(metaspace: Tokenizer) -> None:
    backend = metaspace.backend
    ids = [*metaspace.encode("time"), 1, 2]
    spaced = make_detokenizer(metaspace, skip_special_tokens=False)
    joined = make_detokenizer(
        metaspace, skip_special_tokens=False, spaces_between_special_tokens=False
    )
    assert spaced.push(ids) + spaced.finish() == backend.decode(ids, skip_special_tokens=False)
    assert joined.push(ids).endswith("<s></s>")


def test_each_family_takes_its_path(
    byte_level: Tokenizer, sentencepiece: Tokenizer, metaspace: Tokenizer
) -> None:
    assert isinstance(make_detokenizer(byte_level), PieceDetokenizer)
    assert isinstance(make_detokenizer(sentencepiece), PieceDetokenizer)
    assert isinstance(make_detokenizer(metaspace), WindowDetokenizer)


@given(data=st.data())
@FAST
def test_window_agrees_with_pieces(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = byte_level.encode(data.draw(st.text(max_size=40)))
    window = WindowDetokenizer(byte_level)
    assert "".join(window.push([i]) for i in ids) + window.finish() == streamed(byte_level, ids)


def test_every_token_of_the_vocabulary_alone(tokenizer: Tokenizer) -> None:
    if tokenizer.coding is None:
        return
    step = max(1, tokenizer.vocab_size // 2000)
    for token_id in range(0, tokenizer.vocab_size, step):
        expected = tokenizer.decode([token_id], skip_special_tokens=False)
        text = tokenizer.token_text(token_id)
        assert expected == (text.removeprefix(" ") if is_sentencepiece(tokenizer) else text)
