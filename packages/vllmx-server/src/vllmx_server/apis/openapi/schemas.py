"""Schemas of structs for the document: msgspec's, with what it does not say.

That is which fields of an answer are always there, and what the docstrings under fields say.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET

from vllmx_server.generating.unserved import UNSERVED
from vllmx_server.schema.record import Record

Schema = dict[str, Any]
REF = "#/components/schemas/"


def schemas_of(
    types: Iterable[Any], packages: Collection[str]
) -> tuple[list[Schema], dict[str, Schema]]:
    """The schema of each type, and the components that they refer to, all by names of structs.
    `packages`: those that define the structs."""
    found, components = msgspec.json.schema_components(types, ref_template=REF + "{name}")
    structs = _structs(packages)
    for name, schema in components.items():
        if name in structs:
            _complete(schema, structs[name])
    return list(found), dict(sorted(components.items()))


def _structs(packages: Collection[str]) -> dict[str, type[msgspec.Struct]]:
    """All structs of the packages by their names, and by their full ones where two share a name."""
    found: dict[str, type[msgspec.Struct]] = {}
    waiting: list[type[msgspec.Struct]] = [msgspec.Struct]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.partition(".")[0] in packages:
                found[kind.__name__] = kind
                found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return found


def _complete(schema: Schema, kind: type[msgspec.Struct]) -> None:
    schema.pop("title", None)
    if kind.__doc__ is None or kind.__doc__.startswith(f"{kind.__name__}("):
        schema.pop("description", None)
    elif "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    properties: dict[str, Schema] = schema.get("properties", {})
    if issubclass(kind, Record):
        schema["required"] = _always_there(kind, properties)
        for each in properties.values():
            each.pop("default", None)
    texts = _field_texts(kind)
    for name, each in properties.items():
        if text := texts.get(name):
            each["description"] = text
        elif _is_unserved(name, each):
            each["description"] = f"Not served: {UNSERVED[name][1]}."
    required = schema.get("required", ())
    if not issubclass(kind, Record) and properties:
        names = sorted(
            properties,
            key=lambda name: (name not in required, _is_unserved(name, properties[name])),
        )
        schema["properties"] = {name: properties[name] for name in names}


def _is_unserved(name: str, schema: Schema) -> bool:
    """Whether a field of a request is known, but not served."""
    return name in UNSERVED and "default" in schema


def _always_there(kind: type[msgspec.Struct], properties: Mapping[str, Schema]) -> list[str]:
    """Fields of an answer that it never leaves out."""
    defaults = kind.__struct_defaults__
    names = kind.__struct_encode_fields__[len(kind.__struct_encode_fields__) - len(defaults) :]
    may_miss = {name for name, default in zip(names, defaults, strict=True) if default is UNSET}
    return [name for name in properties if name not in may_miss]


def _field_texts(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The docstrings under the fields of a struct, its bases' as well."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found |= _texts_of_module(base.__module__).get(base.__name__, {})
    return found


@cache
def _texts_of_module(name: str) -> Mapping[str, dict[str, str]]:
    """The texts of a module's fields, by class and field; nothing where there are no sources."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except OSError:
        return {}
    return {node.name: dict(_texts(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(node: ast.ClassDef) -> Iterable[tuple[str, str]]:
    for field, text in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield field.target.id, " ".join(str(text.value.value).split())
