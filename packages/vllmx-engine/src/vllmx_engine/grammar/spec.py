"""Turns what a user asks (`StructuredOutputsParams`) into one canonical description of a
grammar."""

from __future__ import annotations

from typing import Any

import msgspec
from vllmx_core.errors import GrammarError
from vllmx_core.structured import MAX_GRAMMAR_CHARS, StructuredOutputsParams

from vllmx_engine.wire.grammars import GrammarSpec

MAX_SCHEMA_DEPTH = 122
"""Levels of objects and lists in a schema or tag, so 60 objects in each other; the same where
it comes as an object and where it comes as text."""


def grammar_spec(params: StructuredOutputsParams) -> GrammarSpec:
    """The grammar that `params` asks for. Raises GrammarError for JSON that is none, is too deep or
    too large."""
    if params.regex is not None:
        return GrammarSpec(kind="regex", text=params.regex)
    if params.grammar is not None:
        return GrammarSpec(kind="lark", text=params.grammar)
    if params.choice is not None:
        choices = list(dict.fromkeys(params.choice))
        return GrammarSpec(kind="choice", text=_json_text(choices, "choice", params.field))
    if params.json_object:
        kind, text = "json_object", '{"type":"object"}'
    elif params.structural_tag is not None:
        kind, text = "structural_tag", _schema(params.structural_tag, params.field)
    else:
        kind, text = "json_schema", _schema(params.json, params.field)
    compact, pattern = params.disable_any_whitespace, params.whitespace_pattern
    return GrammarSpec(
        kind=kind,  # type: ignore[arg-type]
        text=text,
        compact=compact,
        whitespace=None if compact else pattern,
    )


def _schema(value: Any, field: str) -> str:
    """JSON text of a mapping, or of what a text holds. The order of keys is kept: it is the order
    of an answer's properties."""
    if isinstance(value, str):
        _check_size(value, field)
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(f"the schema is not valid JSON: {error}", param=field) from None
    _check_depth(value, field)
    return _json_text(value, "the schema", field)


def _json_text(value: Any, what: str, field: str) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        raise GrammarError(f"{what} is nested too deeply: flatten it", param=field) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise GrammarError(f"{what} cannot be written as JSON: {error}", param=field) from None
    _check_size(text, field)
    return text


def _check_depth(value: Any, field: str) -> None:
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list | tuple):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise GrammarError(
        f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels of objects and lists deep:"
        " flatten it",
        param=field,
    )


def _check_size(text: str, field: str) -> None:
    if len(text) > 2 * MAX_GRAMMAR_CHARS:
        raise GrammarError(
            f"the grammar has {len(text)} characters of JSON, at most {2 * MAX_GRAMMAR_CHARS} are"
            " taken: shorten it",
            param=field,
        )
