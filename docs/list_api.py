"""Makes the site's page of the reference of all routes: `python docs/list_api.py`.

It is made of the document that a server has at `/openapi.json`, so that it cannot differ from what
the server does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllmx_server.apis.openapi.document import document
from vllmx_server.host.apis import all_routes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = """# All routes and structs

Written by `python docs/list_api.py` from what a server has at `/openapi.json` (OpenAPI 3.1; `/docs`
shows it in a browser); do not edit it by hand. [serving.md](serving.md) and [routes.md](routes.md)
say what fields do. A field with a star is required in a request, and always there in an answer. Any
other field is refused (400).

"""
LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} entries",
    "maxItems": "≤ {} entries",
    "minProperties": "≥ {} members",
    "maxProperties": "≤ {} members",
}
Schema = dict[str, Any]


def limits(schema: Schema) -> str:
    """Bounds of a number or a size, in brackets."""
    found = [form.format(schema[name]) for name, form in LIMITS.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def words(schema: Schema) -> str:
    """The type of a schema, with links to structs."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " \\| ".join(f"`{json.dumps(value)}`" for value in values)
    if "anyOf" in schema or "oneOf" in schema:
        return " \\| ".join(map(words, schema.get("anyOf") or schema["oneOf"]))
    if schema.get("type") == "array":
        return f"list of {words(schema.get('items', {}))}{limits(schema)}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {words(schema['additionalProperties'])}{limits(schema)}"
    return f"{schema.get('type', 'anything')}{limits(schema)}"


def table(schema: Schema) -> Iterator[str]:
    """A line for each field."""
    required = set(schema.get("required", ()))
    if not schema.get("properties"):
        return
    yield "| field | type | |\n|-|-|-|\n"
    for name, each in schema["properties"].items():
        star = " *" if name in required else ""
        yield f"| `{name}`{star} | {words(each)} | {each.get('description', '')} |\n"
    yield "\n"


def operation(method: str, path: str, asked: Schema) -> Iterator[str]:
    """One route."""
    yield f"### {method.upper()} {path}\n\n{asked.get('description') or asked['summary'] + '.'}\n\n"
    for each in asked.get("parameters", ()):
        yield f"- `{each['name']}` ({each['in']}): {words(each['schema'])}. {each['description']}\n"
    for media, body in asked.get("requestBody", {}).get("content", {}).items():
        if "$ref" in body["schema"]:
            yield f"- body ({media}): {words(body['schema'])}\n"
        else:
            yield f"- body ({media}):\n\n{''.join(table(body['schema']))}"
        if "example" in body:
            yield f"- example: `{json.dumps(body['example'])}`\n"
    for media, answer in asked["responses"]["200"]["content"].items():
        events = answer.get("x-events")
        if events is not None:
            shown = ", ".join(dict.fromkeys(words(each["data"]) for each in events))
            yield f"- streamed ({media}): {shown}\n"
        else:
            shown = f": {words(answer['schema'])}" if "schema" in answer else ""
            yield f"- answer ({media}){shown}\n"
    statuses = [status for status in asked["responses"] if status != "200"]
    error = words(asked["responses"]["400"]["content"]["application/json"]["schema"])
    yield f"- errors: {', '.join(statuses)} ({error})\n\n"


def page() -> str:
    """The whole page."""
    found = document(all_routes())
    return "".join(_parts(found)).rstrip("\n") + "\n"


def _parts(found: Schema) -> Iterable[str]:
    yield HEAD
    for tag in found["tags"]:
        yield f"## {tag['name']}\n\n"
        for path, methods in found["paths"].items():
            for method, asked in methods.items():
                if tag["name"] in asked["tags"]:
                    yield from operation(method, path, asked)
    yield "## Structs\n\n"
    for name, schema in found["components"]["schemas"].items():
        yield f"### {name}\n\n"
        if "description" in schema:
            yield f"{schema['description']}\n\n"
        if "properties" not in schema:
            yield f"{words(schema)}\n\n"
        yield from table(schema)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}\n")
