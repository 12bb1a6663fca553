"""Translates a `GrammarSpec` into a grammar in llguidance's own words."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from vllmx_core.errors import GrammarError, shown

from vllmx_engine.grammar.gbnf import is_gbnf
from vllmx_engine.grammar.gbnf_lark import lark_of_gbnf
from vllmx_engine.grammar.schema import prepare
from vllmx_engine.grammar.structural_tag import lark_of_tag, regex_lark
from vllmx_engine.grammar.vocabulary import Lexicon
from vllmx_engine.wire.grammars import GrammarSpec

BOUNDED_BLANKS = r"[ \t]?|\r?\n[ \t]{0,20}"
"""The blanks between two tokens of JSON: one, or a new line and its indentation. Weak models write
blanks without end where they may."""


def translate(spec: GrammarSpec, lexicon: Lexicon | None = None) -> str:
    """Raises GrammarError for what is no grammar of its kind.

    Args:
        lexicon: the model's tokens, which grammars and structural tags may name.
    """
    if spec.kind in ("json_schema", "json_object"):
        return _grammar(json.dumps(with_options(json.loads(spec.text), spec)), "json_schema")
    if spec.kind == "regex":
        return _from_regex(spec.text)
    if spec.kind == "choice":
        return _from_choices(json.loads(spec.text))
    if spec.kind == "structural_tag":
        return _from_tag(spec, lexicon)
    return _from_grammar(spec.text, lexicon)


def with_options(schema: Any, spec: GrammarSpec) -> dict[str, Any]:
    """The schema with how its JSON is written; what it said of that itself is dropped."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema is an object, got {shown(schema)}")
    options = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not spec.compact,
        "whitespace_pattern": None if spec.compact else spec.whitespace or BOUNDED_BLANKS,
        "coerce_one_of": False,
        "lenient": False,
    }
    return {**prepare(schema), "x-guidance": options}


def _grammar(text: str, kind: str) -> str:
    return json.dumps({"grammars": [{kind: json.loads(text) if kind == "json_schema" else text}]})


def _from_tag(spec: GrammarSpec, lexicon: Lexicon | None) -> str:
    tag = json.loads(spec.text)
    return json.dumps({"grammars": lark_of_tag(tag, lexicon, partial(with_options, spec=spec))})


def _from_regex(regex: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(f"start: {regex_lark(regex)}\n")


def _from_choices(choices: list[str]) -> str:
    from llguidance import LLMatcher

    listed = " | ".join(json.dumps(text) for text in choices)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {listed}\n")


def _from_grammar(text: str, lexicon: Lexicon | None) -> str:
    from llguidance import LLMatcher

    if is_gbnf(text):
        start, lines = lark_of_gbnf(text, lexicon)
        text = "\n".join([f"start: {start}", *lines]) + "\n"
    return LLMatcher.grammar_from_lark(text)
