"""The server in its own OpenAPI document: its model, its keys, its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllmx_core.bounds import MAX_TOKEN_ID

from vllmx_server.apis.openapi.schemas import Schema
from vllmx_server.generating.served import Served
from vllmx_server.http.operation import Task
from vllmx_server.http.route import Right

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
        """Whether the model answers routes of a task; unknown counts as yes."""
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
