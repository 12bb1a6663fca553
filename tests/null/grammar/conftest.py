"""The demo model's tokens, and answers drawn at random from what a grammar allows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from vllmx_core.errors import GrammarError
from vllmx_core.structured import StructuredOutputsParams
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.grammar.check import check
from vllmx_engine.grammar.matcher import CompiledGrammar, allowed_ids
from vllmx_engine.grammar.spec import grammar_spec
from vllmx_engine.grammar.vocabulary import Lexicon, vocabulary_of
from vllmx_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Grammarian:
    """Compiles grammars over one vocabulary."""

    tokenizer: Tokenizer
    lexicon: Lexicon

    def compiled(self, **form: object) -> CompiledGrammar:
        """What the core would make of it. Raises GrammarError."""
        spec = grammar_spec(StructuredOutputsParams(**form))  # type: ignore[arg-type]
        text = check(spec, self.lexicon)
        return CompiledGrammar(text, self.lexicon.trie, self.lexicon.vocab_size)

    def accepts(self, grammar: CompiledGrammar, text: str) -> bool:
        """Whether a whole answer of this text is allowed."""
        matcher = grammar.start()
        try:
            for token in self.tokenizer.encode(text, add_special_tokens=False):
                matcher.consume(token)
        except GrammarError:
            return False
        return matcher.is_accepting

    def draw(self, grammar: CompiledGrammar, seed: int, most_tokens: int = 400) -> str | None:
        """A text that the grammar allows, by tokens drawn from its masks; None: it did not end.
        What may end ends soon, and short tokens that close things are likely."""
        rng = random.Random(seed)
        matcher, mask = grammar.start(), grammar.first_mask.copy()
        ids: list[int] = []
        while len(ids) < most_tokens and not matcher.is_stopped:
            matcher.fill_mask(mask)
            allowed = allowed_ids(mask).tolist()
            ends = [token for token in allowed if token in self.tokenizer.eos_token_ids]
            if ends and rng.random() < 0.5:
                break
            allowed = [token for token in allowed if token not in ends]
            if not allowed:
                break
            closing = [t for t in allowed if set(self.tokenizer.token_bytes(t)) <= set(b'"}],')]
            pool = closing if closing and rng.random() < 0.4 else allowed
            token = rng.choice(pool)
            matcher.consume(token)
            ids.append(token)
        if not matcher.is_accepting:
            return None
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode()


@pytest.fixture(scope="session")
def grammarian() -> Grammarian:
    tokenizer = Tokenizer.from_folder(MODEL_FOLDER)
    size = tokenizer.vocab_size
    return Grammarian(
        tokenizer, Lexicon.of(vocabulary_of(tokenizer, size, tokenizer.eos_token_ids))
    )
