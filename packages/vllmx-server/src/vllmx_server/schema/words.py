"""The words that a field may hold, where its type lists them."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec


def words_of(kind: Any, path: str) -> list[str]:
    """The words at a path within a type as msgspec writes it, `a.b[0].c` say; none where the type
    lists none."""
    kinds = [kind]
    for name in path.split("."):
        field, *items = name.split("[")
        structs = [each for one in kinds for each in _plain(one) if field and _is_struct(each)]
        if field:
            kinds = [hint for each in structs if (hint := _hint(each, field)) is not None]
        for _ in items:
            kinds = [
                typing.get_args(each)[-1]
                for one in kinds
                for each in _plain(one)
                if typing.get_origin(each) in (list, dict)
            ]
    found = [each for one in kinds for each in _plain(one) if typing.get_origin(each) is Literal]
    return [str(word) for each in found for word in typing.get_args(each)]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _hint(kind: Any, field: str) -> Any:
    return typing.get_type_hints(kind, include_extras=True).get(field)


def _plain(kind: Any) -> Iterator[Any]:
    """The types that a value may have."""
    if typing.get_origin(kind) is typing.Annotated:
        yield from _plain(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, type(int | str)):
        for each in typing.get_args(kind):
            yield from _plain(each)
    else:
        yield kind
