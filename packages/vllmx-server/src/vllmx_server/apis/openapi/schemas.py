"""Schemas of structs for the document, with the limits of this server."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET
from vllmx_core.bounds import MAX_TOKEN_ID

from vllmx_server.generating.fields import UNSERVED
from vllmx_server.generating.served import Served
from vllmx_server.http.operation import Task
from vllmx_server.http.route import Right
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
    """True if a field of a request is known, but not served."""
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


_WITH_KEY: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]


@dataclass(frozen=True, slots=True)
class Bounds:
    """One server.

    Attributes:
        tasks: what its model does; None: several models.
        has_keys: whether it asks for a key.
        greatest: maximum values by field name.
        vocab_size: of its model; None: several models.
    """

    tasks: frozenset[Task] | None
    has_keys: bool
    greatest: Mapping[str, int]
    vocab_size: int | None = None

    @classmethod
    def of(cls, served: Served) -> Bounds:
        """The server with this state."""
        has_keys = not served.keys.is_open
        if served.models is not None:
            return cls(None, has_keys, {})
        info, pooler = served.llm.info, served.pooler
        tasks: frozenset[Task] = frozenset(["generate"] if pooler is None else pooler.tasks)
        greatest = {"truncate_prompt_tokens": info.max_model_len}
        if info.max_logprobs >= 0:
            names = ("logprobs", "top_logprobs", "prompt_logprobs")
            greatest |= dict.fromkeys(names, info.max_logprobs)
        if pooler is not None:
            greatest["dimensions"] = pooler.dimensions
        return cls(tasks, has_keys, greatest, info.vocab_size)

    def does(self, task: Task) -> bool:
        """True if the model answers routes of a task, or that is unknown."""
        if self.tasks is None:
            return True
        return task in self.tasks or (task == "pool" and "generate" not in self.tasks)

    def narrow(self, components: Mapping[str, Schema]) -> None:
        """Replaces general bounds of fields by those of this server."""
        for component in components.values():
            for name, schema in component.get("properties", {}).items():
                _narrow(schema, self.greatest.get(name), self.vocab_size)


def _narrow(schema: Any, greatest: int | None, vocab_size: int | None) -> None:
    if isinstance(schema, list):
        for each in schema:
            _narrow(each, greatest, vocab_size)
    elif isinstance(schema, dict):
        if "maximum" in schema:
            is_id = schema["maximum"] == MAX_TOKEN_ID and schema.get("minimum") == 0
            found = vocab_size - 1 if is_id and vocab_size is not None else greatest
            schema["maximum"] = schema["maximum"] if found is None else found
        for name in ("anyOf", "items"):
            _narrow(schema.get(name), greatest, vocab_size)


def security(right: Right, bounds: Bounds | None) -> list[dict[str, list[str]]]:
    """The keys that a route asks for. None: any server, so a key is optional on the routes that may
    need one."""
    if right is Right.EVERYBODY:
        return []
    if right is Right.OPERATORS:
        return _WITH_KEY
    if bounds is None:
        return [*_WITH_KEY, {}]
    return _WITH_KEY if bounds.has_keys else []
