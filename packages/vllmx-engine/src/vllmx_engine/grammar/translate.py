"""Translates a `GrammarSpec` into a grammar in llguidance's own words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from vllmx_core.errors import GrammarError, excerpt, shown

from vllmx_engine.grammar.schema import prepare
from vllmx_engine.grammar.structural_tag import lark_of_tag
from vllmx_engine.wire.grammars import GrammarSpec

BOUNDED_BLANKS = r"[ \t]?|\r?\n[ \t]{0,20}"
"""The blanks between two tokens of JSON: one, or a new line and its indentation. Weak models write
blanks without end where they may."""


def translate(spec: GrammarSpec, specials: Mapping[str, int] | None = None) -> str:
    """Raises GrammarError for what is no grammar of its kind.

    Args:
        specials: ids of the model's special tokens by their text, for structural tags.
    """
    if spec.kind in ("json_schema", "json_object"):
        return _grammar(json.dumps(with_options(json.loads(spec.text), spec)), "json_schema")
    if spec.kind == "regex":
        return _from_regex(spec.text)
    if spec.kind == "choice":
        return _from_choices(json.loads(spec.text))
    if spec.kind == "structural_tag":
        return _from_tag(spec, specials or {})
    return _from_grammar(spec.text)


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


def _from_tag(spec: GrammarSpec, specials: Mapping[str, int]) -> str:
    from llguidance import LLMatcher

    lark = lark_of_tag(json.loads(spec.text), specials, partial(with_options, spec=spec))
    return LLMatcher.grammar_from_lark(lark)


def _from_regex(regex: str) -> str:
    """The whole answer matches anyway, so anchors around all of it say nothing. Digits and word
    characters are those of ASCII, as in JSON schemas, whatever else Unicode counts as such."""
    from llguidance import LLMatcher, regex_to_lark

    if regex.startswith("^") and "|" not in regex:
        regex = regex[1:]
    if regex.endswith("$") and not regex.endswith("\\$") and "|" not in regex:
        regex = regex[:-1]
    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(regex, 'dw')}/\n")


def _from_choices(choices: list[str]) -> str:
    from llguidance import LLMatcher

    listed = " | ".join(json.dumps(text) for text in choices)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {listed}\n")


def _from_grammar(text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if "::=" in text:
        try:
            text = gbnf_to_lark(text)
        except RecursionError:
            raise GrammarError("the grammar is nested too deeply: flatten it") from None
        except Exception as error:  # the library's own types are not told apart
            raise GrammarError(
                f"the grammar is not valid GBNF: {excerpt(str(error), 400)}"
            ) from None
    return LLMatcher.grammar_from_lark(text)
