"""Call arguments in the XML-like notations of some models, as parts of structural tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllmx_core.errors import GrammarError, listing, shown

from vllmx_engine.grammar.disjoint import values_of

Form = dict[str, Any]
_STYLES = {
    "qwen_xml": ("<parameter={name}>", "</parameter>"),
    "minimax_xml": ('<parameter name="{name}">', "</parameter>"),
    "deepseek_xml": (
        '<｜DSML｜parameter name="{name}" string="{is_text}">',
        "</｜DSML｜parameter>",
    ),
    "glm_xml": ("<arg_key>{name}</arg_key><arg_value>", "</arg_value>"),
    "cohere_xml": ("<cofl:tool_param name={name}>", "</cofl:tool_param>"),
}
_BLANKS: Form = {"type": "regex", "pattern": r"[ \t\n]{0,20}"}
_ANY_NAME: Form = {"type": "regex", "pattern": r"[a-zA-Z_][a-zA-Z0-9_.\-]*"}


def xml_parameters(schema: Mapping[str, Any], style: Any) -> Form:
    """The properties of an object, each in its tags: strings as they are, other values as JSON.
    Raises GrammarError for an unknown style."""
    if style not in _STYLES:
        raise GrammarError(f"json_schema has no style {shown(style)}: use json, {listing(_STYLES)}")
    required = schema.get("required") or ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    elements: list[Form] = []
    for name, each in (schema.get("properties") or {}).items():
        part = _parameter(style, name, {**shared, **each} if isinstance(each, dict) else each)
        elements.append(part if name in required else {"type": "optional", "content": part})
    others = schema.get("additionalProperties", False)
    if others is not False:
        part = _parameter(style, None, others)
        elements.append({"type": "star", "content": part})
    return {"type": "sequence", "elements": elements}


def _parameter(style: str, name: str | None, schema: Any) -> Form:
    begin, end = _STYLES[style]
    is_text = _is_text(schema)
    begin = begin.replace("{is_text}", json.dumps(is_text))
    before, _, behind = begin.partition("{name}")
    if name is not None:
        before, behind = before + name + behind, ""
    head: list[Form] = [{"type": "const_string", "value": before}]
    if name is None:
        head += [_ANY_NAME, {"type": "const_string", "value": behind}]
    values = values_of(schema) if isinstance(schema, dict) else None
    if not is_text:
        content: Form = {"type": "json_schema", "json_schema": schema}
        content = {"type": "sequence", "elements": [_BLANKS, content, _BLANKS]}
    elif values is not None:
        texts = [{"type": "const_string", "value": value} for value in values]
        content = {"type": "or", "elements": texts}
    else:
        content = {"type": "any_text"}
    tag = {"type": "tag", "begin": "", "content": content, "end": end}
    return {"type": "sequence", "elements": [*head, tag, _BLANKS]}


def _is_text(schema: Any) -> bool:
    """Whether values are written as they are: all are strings, or their type is unknown."""
    if not isinstance(schema, dict):
        return True
    values = values_of(schema)
    if values is not None:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string" or not set(schema) - {"$defs", "definitions"}
