"""The checkpoint's own format: `response_template` of tokenizer_config.json, as transformers reads
it from version 5.13 on.

It names regions of an answer by literal texts or regular expressions. Texts with a name between
them are understood; for anything else the other sources of formats are tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllmx_core.errors import shown
from vllmx_core.output_format import (
    Calls,
    JsonArguments,
    JsonCall,
    NamedCall,
    OutputFormat,
    TaggedArguments,
    Thinking,
    ValueArguments,
)

from vllmx_engine.formats.renderings import NotDerivedError

_REASONING = ("reasoning_content", "thinking", "reasoning")
_TOKEN = re.compile(
    r"(?P<space>\\s[*+]\??)|\(\?P<(?P<group>\w+)>(?:[^()\[\]\\]|\\.|\[(?:[^\]\\]|\\.)*\])*\)"
    r"|\\(?P<escaped>[^\w\s])|(?P<line>\\n)|(?P<plain>[^\\()\[\]{}.*+?^$|])"
)


def stated_format(template: Any) -> OutputFormat:
    """Raises NotDerivedError for what is not understood."""
    if not isinstance(template, Mapping) or template.get("version", 1) != 1:
        raise NotDerivedError("it is of another version")
    try:
        fields = template["fields"]
        thinking = next((fields[name] for name in _REASONING if name in fields), None)
        calls, content = fields.get("tool_calls"), fields.get("content", {})
        return OutputFormat(
            "stated",
            None
            if thinking is None
            else Thinking(_edge(thinking, "open"), _edge(thinking, "close")),
            None if calls is None else _calls(calls),
            content_begin=_literal(content.get("open", "")),
        )
    except NotDerivedError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotDerivedError(f"it lacks a part, or has a wrong one: {error}") from error


def _literal(value: Any) -> str:
    """A text, or the first of several."""
    found = value[0] if isinstance(value, list) and value else value
    if not isinstance(found, str):
        raise NotDerivedError(f"{shown(value)} is not text")
    return found


def _edge(field: Mapping[str, Any], edge: str) -> str:
    """Returns the beginning or the end of a region."""
    parts = _parts(field, edge)
    if any(is_group for is_group, _ in parts):
        raise NotDerivedError(f"a part is named in {shown(field.get(f'{edge}_pattern'))}")
    return "".join(text for _, text in parts)


def _parts(field: Mapping[str, Any], edge: str) -> list[tuple[bool, str]]:
    """(whether it is a named group, its name or the text) of what begins or ends a region."""
    if edge in field:
        return [(False, _literal(field[edge]))]
    pattern = field.get(f"{edge}_pattern")
    return [] if pattern is None else _read(_literal(pattern))


def _read(pattern: str) -> list[tuple[bool, str]]:
    """Texts and named groups of a regular expression that holds nothing else; white space of any
    length is a line break."""
    parts: list[tuple[bool, str]] = []
    at = 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        if match is None:
            raise NotDerivedError(f"the pattern {shown(pattern)} holds more than texts and names")
        at = match.end()
        if match["group"] is not None:
            parts.append((True, match["group"]))
            continue
        text = match["escaped"] or match["plain"] or "\n"
        if parts and not parts[-1][0]:
            text = parts.pop()[1] + text
        parts.append((False, text))
    return parts


def _calls(field: Mapping[str, Any]) -> Calls:
    begin, end = _parts(field, "open"), _edge(field, "close")
    transform, each = field["transform"], bool(field.get("transform_each"))
    named = transform["function"]
    if any(is_group for is_group, _ in begin):
        if named["name"] != "{name}" or named["arguments"] != "{content}":
            raise NotDerivedError(f"calls are transformed by {shown(transform)}")
        return _named(field, begin, end)
    first = "".join(text for _, text in begin).lstrip()
    if field.get("content") != "json":
        raise NotDerivedError(f"calls are parsed by {shown(field.get('content'))}")
    call = JsonCall()
    if isinstance(named, Mapping):
        name, arguments = (_key(named[key], each) for key in ("name", "arguments"))
        spelling = f'{{"{name}": "{{name}}", "{arguments}": {{arguments}}}}'
        call = JsonCall(name, arguments, spelling=spelling)
    if each:
        return Calls(call, section_begin=f"{first}[", section_end=f"]{end}", separator=", ")
    return Calls(call, first, end, separator="\n")


def _key(placeholder: Any, each: bool) -> str:
    """The key that {content.KEY}, or {KEY} of each of several, names."""
    found = re.fullmatch(r"\{(?:content\.)?(\w+)\}", _literal(placeholder))
    if found is None or each is ("content." in placeholder):
        raise NotDerivedError(f"calls are transformed by {shown(placeholder)}")
    return found[1]


def _named(field: Mapping[str, Any], begin: list[tuple[bool, str]], end: str) -> Calls:
    """Returns the format of a call with its name before the arguments."""
    groups = [name for is_group, name in begin if is_group]
    if groups != ["name"] or begin[0][0]:
        raise NotDerivedError("the text before a call's arguments is more than a name")
    header_end = begin[2][1] if len(begin) > 2 else ""
    arguments = _arguments(field)
    if isinstance(arguments, TaggedArguments):
        header_end += "\n"
    call = NamedCall(arguments, header_end=header_end)
    return Calls(call, begin[0][1].lstrip(), end, separator="\n")


def _arguments(field: Mapping[str, Any]) -> JsonArguments | TaggedArguments | ValueArguments:
    options = field.get("content_args") or {}
    if field.get("content") == "xml-inline":
        parts = _read(options["tag_pattern"].replace(".*?", "."))
        if [name for is_group, name in parts if is_group] != ["key", "value"] or len(parts) != 5:
            raise NotDerivedError(f"arguments are parsed by {shown(options)}")
        return TaggedArguments(parts[0][1].lstrip(), parts[2][1], parts[4][1])
    if field.get("content") != "json":
        raise NotDerivedError(f"arguments are parsed by {shown(field.get('content'))}")
    delimiters = options.get("string_delims")
    if not delimiters:
        return JsonArguments()
    (quote, other), *more = delimiters
    if quote != other or more:
        raise NotDerivedError(f"strings stand between {shown(delimiters)}")
    return ValueArguments("{", ":", ",", "}", quote=quote, escapes=False, python=False)
