"""Whether a grammar can be followed, and what it is for the core."""

from __future__ import annotations

import json
import re

from vllmx_core.errors import GrammarError

from vllmx_engine.grammar.matcher import CompiledGrammar
from vllmx_engine.grammar.schema import place_of
from vllmx_engine.grammar.translate import translate
from vllmx_engine.grammar.vocabulary import Lexicon
from vllmx_engine.wire.grammars import GrammarSpec

MAX_MASK_S = 0.05
"""The most seconds of processor time for the mask of a token."""


def check(spec: GrammarSpec, lexicon: Lexicon) -> str:
    """The grammar in the words of the library. Raises GrammarError."""
    text = translate(spec, lexicon.specials)
    try:
        compiled = CompiledGrammar(text, lexicon.trie, lexicon.vocab_size)
    except GrammarError as error:
        raise _named(error, spec) from None
    if not compiled.first_mask.any():
        raise GrammarError("the grammar allows no first token: no text satisfies it")
    if compiled.mask_s > MAX_MASK_S:
        raise GrammarError(
            f"the grammar takes {compiled.mask_s * 1000:.0f} ms a token, at most"
            f" {MAX_MASK_S * 1000:.0f} ms are allowed: simplify it (fewer optional properties or"
            " choices)"
        )
    return text


def _named(error: GrammarError, spec: GrammarSpec) -> GrammarError:
    """Names the keyword of a schema that the library does not have, and its place."""
    listed = re.search(r"Unimplemented keys: \[([^\]]*)", error.message)
    if listed is None or spec.kind != "json_schema":
        return error
    for keyword in re.findall(r'"([^"]+)"', listed.group(1)):
        place = place_of(json.loads(spec.text), keyword)
        if place is not None:
            return GrammarError(
                f"{keyword} at {place} is a keyword that cannot be held while an answer is written:"
                " leave it out, or say the same by others"
            )
    return error
