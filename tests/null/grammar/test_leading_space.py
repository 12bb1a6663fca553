"""Grammars over a tokenizer that puts a space before a text, as those of Llama 2 and Mistral do."""

from __future__ import annotations

import json

import pytest
from vllmx_engine.grammar.vocabulary import Lexicon, vocabulary_of
from vllmx_engine.text.tokenizer import Tokenizer

from tests.null.text.conftest import sentencepiece_backend

from .conftest import Grammarian

ENTRY = {"type": "object", "properties": {"a b": {"enum": [" x", "é"]}}, "required": ["a b"]}
FORMS: list[dict[str, object]] = [
    {"grammar": 'root ::= "a"{5,5}'},
    {"json": '{"const": "the other"}'},
    {"json": json.dumps(ENTRY)},
    {"regex": " the [a-c]{3} x\\n"},
    {"grammar": 'root ::= "<a▁b>" "a"'},
    {"choice": ["in", " on", "  er"]},
]


@pytest.fixture(scope="module")
def spaced() -> Grammarian:
    tokenizer = Tokenizer(sentencepiece_backend(), {"bos_token": "<s>", "eos_token": "</s>"})
    return Grammarian(tokenizer, Lexicon.of(vocabulary_of(tokenizer, tokenizer.vocab_size, [2])))


def test_forced_texts_have_the_tokens_of_their_bytes(spaced: Grammarian) -> None:
    for text in ("a", "the", " the", "  ", "42{", "é€", "\x02", "<a▁b>"):
        ids = spaced.lexicon.trie.tokenize_str(text)
        assert b"".join(map(spaced.tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("form", FORMS)
def test_answers_can_follow(spaced: Grammarian, form: dict[str, object]) -> None:
    grammar = spaced.compiled(**form)
    drawn = [text for seed in range(5) if (text := spaced.draw(grammar, seed)) is not None]
    assert drawn
    for text in drawn:
        if "json" in form:
            json.loads(text)
        elif "choice" in form:
            assert text in ("in", " on", "  er")
