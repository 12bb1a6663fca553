"""Checks grammars, and translates them into the form that the core compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from vllmx_core.errors import GrammarError, shown

from vllmx_engine.grammar.gbnf import is_gbnf
from vllmx_engine.grammar.gbnf_lark import lark_of_gbnf
from vllmx_engine.grammar.matcher import CompiledGrammar
from vllmx_engine.grammar.parts import all_parts, referred
from vllmx_engine.grammar.schema import prepare
from vllmx_engine.grammar.structural_tag import lark_of_tag, regex_lark
from vllmx_engine.grammar.vocabulary import Lexicon
from vllmx_engine.wire.grammars import GrammarSpec

BOUNDED_BLANKS = r"[ \t]?|\r?\n[ \t]{0,20}"
"""The blanks between two tokens of JSON: one, or a new line and its indentation. Weak models write
blanks without end where they may."""


def translate(spec: GrammarSpec, lexicon: Lexicon | None = None) -> str:
    """Translates a spec into llguidance's form. Raises GrammarError for a malformed grammar.

    Args:
        lexicon: the model's tokens, which grammars and structural tags may name.
    """
    match spec.kind:
        case "json_schema" | "json_object":
            schema = with_options(json.loads(spec.text), spec)
            return json.dumps({"grammars": [{"json_schema": schema}]})
        case "structural_tag":
            options = partial(with_options, spec=spec)
            return json.dumps({"grammars": lark_of_tag(json.loads(spec.text), lexicon, options)})
        case "regex":
            text = f"start: {regex_lark(spec.text)}\n"
        case "choice":
            listed = " | ".join(map(json.dumps, json.loads(spec.text)))
            text = f"start: CHOICE\nCHOICE: {listed}\n"
        case _ if is_gbnf(spec.text):
            start, lines = lark_of_gbnf(spec.text, lexicon)
            text = "\n".join([f"start: {start}", *lines]) + "\n"
        case _:
            text = spec.text
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


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


MAX_MASK_S = 0.05
"""The most seconds of processor time for the mask of a token."""
_MAX_PARTS = 64
"""The most parts of a refused schema that are tried alone."""
_OF_VALUES = (
    *("type", "pattern", "format", "minLength", "maxLength"),
    *("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)
"""Keywords that a part has for itself, whatever it refers to."""
_OWN_LINES = re.compile(r" \d+ \| ")
"""Begins a line of the Lark that was made of a tag or of GBNF, which users have not seen."""


def check(spec: GrammarSpec, lexicon: Lexicon) -> str:
    """The grammar in the words of the library. Raises GrammarError."""
    try:
        text = translate(spec, lexicon)
        compiled = CompiledGrammar(text, lexicon.trie, lexicon.vocab_size)
    except GrammarError as error:
        raise _named(error, spec, lexicon) from None
    if not compiled.first_mask.any():
        raise GrammarError("the grammar allows no first token: no text satisfies it")
    if compiled.repeated_mask_s > MAX_MASK_S:
        raise GrammarError(
            f"the grammar takes {compiled.repeated_mask_s * 1000:.0f} ms a token, at most"
            f" {MAX_MASK_S * 1000:.0f} ms are allowed: simplify it (fewer optional properties or"
            " choices)"
        )
    return text


def _named(error: GrammarError, spec: GrammarSpec, lexicon: Lexicon) -> GrammarError:
    """Says which keyword of which schema it is that the library does not have."""
    if spec.kind == "json_schema":
        return _keyword_named(error, json.loads(spec.text), spec, lexicon)
    if spec.kind == "lark" and is_gbnf(spec.text):
        return GrammarError(_OWN_LINES.split(error.message)[0])
    if spec.kind != "structural_tag":
        return error
    for begin, schema in _schemas_of(json.loads(spec.text)):
        found = _refusal(schema, spec, lexicon)
        if found is not None:
            named = _keyword_named(found, schema, spec, lexicon)
            return GrammarError(f"in what begins with {shown(begin)}: {named.message}")
    return GrammarError(_OWN_LINES.split(error.message)[0])


def _refusal(schema: Any, spec: GrammarSpec, lexicon: Lexicon) -> GrammarError | None:
    """Returns the error of a schema on its own, written as the spec has it."""
    alone = msgspec.structs.replace(spec, kind="json_schema", text=json.dumps(schema))
    try:
        CompiledGrammar(translate(alone), lexicon.trie, lexicon.vocab_size)
    except GrammarError as error:
        return error
    return None


def _keyword_named(
    error: GrammarError, schema: Any, spec: GrammarSpec, lexicon: Lexicon
) -> GrammarError:
    if " at #" in error.message:
        return error
    listed = re.search(r"Unimplemented keys: \[([^\]]*)", error.message)
    for keyword in re.findall(r'"([^"]+)"', listed.group(1) if listed else ""):
        place = next((path for path, part in all_parts(schema) if keyword in part), None)
        if place is not None:
            return GrammarError(
                f"{keyword} at {place} is a keyword that cannot be held while an answer is written:"
                " leave it out, or say the same by others"
            )
    if lacking := re.search(r"required property '(.+)' is unsatisfiable", error.message):
        for place, part in all_parts(schema):
            if all(lacking[1] in (part.get(key) or ()) for key in ("required", "properties")):
                return GrammarError(
                    f"required at {place} names the property {shown(lacking[1])}, whose schema"
                    " allows nothing: nothing is left"
                )
    for path, part in list(all_parts(schema))[_MAX_PARTS::-1]:
        reference = part.get("$ref", "#")
        is_local = reference.startswith("#")
        if referred(schema, reference) is None if is_local else reference in error.message:
            return GrammarError(
                f"$ref at {path} leads to {shown(reference)}, which the schema does not have:"
                " only references within it are followed"
            )
        has_references = any("$ref" in each for _, each in all_parts(part))
        own = {key: part[key] for key in _OF_VALUES if key in part}
        alone = own if has_references else part
        found = _refusal(alone, spec, lexicon)
        if found is not None and error.message.startswith(found.message):
            return GrammarError(f"{found.message} at {path}")
    return error


def _schemas_of(tag: Any, begin: str = "") -> Iterator[tuple[str, Any]]:
    """The schemas in a structural tag, each with the text that begins the tag around it."""
    if isinstance(tag, dict):
        begin = tag.get("begin") or begin
        for key, value in tag.items():
            if key in ("json_schema", "schema") and isinstance(value, dict):
                yield begin, value
            else:
                yield from _schemas_of(value, begin)
    elif isinstance(tag, list):
        for each in tag:
            yield from _schemas_of(each, begin)
