"""Whether a grammar can be followed, and what it is for the core."""

from __future__ import annotations

from vllmx_core.errors import GrammarError

from vllmx_engine.grammar.matcher import CompiledGrammar
from vllmx_engine.grammar.translate import translate
from vllmx_engine.grammar.vocabulary import Lexicon
from vllmx_engine.wire.grammars import GrammarSpec

MAX_MASK_S = 0.05
"""Of processor time for the mask of a token."""


def check(spec: GrammarSpec, lexicon: Lexicon) -> str:
    """The grammar in the words of the library. Raises GrammarError."""
    text = translate(spec, lexicon.specials)
    compiled = CompiledGrammar(text, lexicon.trie, lexicon.vocab_size)
    if not compiled.first_mask.any():
        raise GrammarError("the grammar allows no first token: no text satisfies it")
    if compiled.mask_s > MAX_MASK_S:
        raise GrammarError(
            f"the grammar takes {compiled.mask_s * 1000:.0f} ms a token, at most"
            f" {MAX_MASK_S * 1000:.0f} ms are allowed: simplify it (fewer optional properties or"
            " choices)"
        )
    return text
