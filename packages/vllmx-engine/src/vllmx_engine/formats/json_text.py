"""JSON as models and templates write it."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any, is_compact: bool) -> str:
    """JSON with or without a space behind commas and colons; letters stay as they are."""
    separators = (",", ":") if is_compact else (", ", ": ")
    return json.dumps(value, ensure_ascii=False, separators=separators)


def json_type(value: Any) -> str:
    """The most general name that JSON Schema has for the type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
