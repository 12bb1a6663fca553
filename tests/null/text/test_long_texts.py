"""Long texts are measured in pieces; what is refused or cut by that, and that the rest is not."""

from __future__ import annotations

import pytest
from vllmx_engine.text.token_bound import PIECE_CHARS, fewest_tokens, part_with
from vllmx_engine.text.tokenizer import Tokenizer, TooManyTokensError

WORDS = "The quick brown fox jumps over the lazy dog. " * 25_000  # 1.1 M characters


def num_words(text: str) -> int:
    return len(text.split())


def test_no_more_is_counted_than_is_there() -> None:
    total = num_words(WORDS)
    assert total * 0.9 < fewest_tokens([WORDS], total, num_words) <= total
    assert fewest_tokens([WORDS, "a b", WORDS], 3 * total, num_words) <= 2 * total + 2
    assert fewest_tokens(["a b"], 0, num_words) == 0


def test_counting_ends_where_it_is_enough() -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return num_words(text)

    assert fewest_tokens([WORDS], 100, count) > 100
    assert counted == [PIECE_CHARS]


@pytest.mark.parametrize("from_end", [False, True])
def test_a_part_has_as_many_tokens_as_are_wanted(from_end: bool) -> None:
    for num_tokens in (1, 50_000, 150_000):
        part = part_with(WORDS, num_tokens, num_words, from_end=from_end)
        assert num_tokens < num_words(part) < num_tokens + 2 * PIECE_CHARS
        assert WORDS.endswith(part) if from_end else WORDS.startswith(part)
        assert len(part) < len(WORDS)
    assert part_with(WORDS, num_words(WORDS), num_words, from_end=from_end) == WORDS


def test_tokens_at_the_ends_are_those_of_the_whole_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(WORDS, add_special_tokens=False)
    for keep in (1, 500):
        end = byte_level.part_with(WORDS, keep, from_end=True)
        assert len(end) < len(WORDS)
        assert byte_level.encode(end, add_special_tokens=False)[-keep:] == ids[-keep:]
        begin = byte_level.part_with(WORDS, keep)
        assert byte_level.encode(begin, add_special_tokens=False)[:keep] == ids[:keep]


def test_far_too_long_texts_are_not_tokenised_whole(sentencepiece: Tokenizer) -> None:
    exact = len(sentencepiece.encode(WORDS))
    with pytest.raises(TooManyTokensError) as refused:
        sentencepiece.encode(WORDS, limit=1000)
    assert not refused.value.exact
    assert 1000 < refused.value.num_tokens <= exact
    with pytest.raises(TooManyTokensError) as refused:
        sentencepiece.encode(WORDS, limit=exact - 1)
    assert (refused.value.num_tokens, refused.value.exact) == (exact, True)
    assert len(sentencepiece.encode(WORDS, limit=exact)) == exact
