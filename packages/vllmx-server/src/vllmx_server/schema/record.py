"""Structs of answers, and their JSON in pieces: a large answer does not hold the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar, cast

import msgspec

_PIECE_BYTES = 32 << 10
"""The bytes that are made and encoded in one to three milliseconds."""
_GROUP = 16
_NOTHING_BYTES = 64
"""Bytes that a member that is left out counts as: finding that out takes as long."""
_WHOLE = frozenset({str, int, float, bool, type(None), list})
"""The types of most members, which contain nothing lazy."""
encode = msgspec.json.Encoder().encode


class Items:
    """A JSON array whose items are made while it is encoded."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


class Members:
    """A JSON object whose members are made while it is encoded, each name once. None is a member
    that is left out: the work of finding that out counts, too."""

    __slots__ = ("members",)

    def __init__(self, members: Iterable[tuple[str, Any] | None]) -> None:
        self.members = members


_LAZY = (Items, Members)


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value, in pieces of about the same work; a small one is a single piece. `Items`
    and `Members` may be anywhere within structs, dictionaries and each other."""
    held = bytearray()
    num_nothing = 0
    for part in _parts(value):
        held += part
        num_nothing += not part
        if len(held) + num_nothing * _NOTHING_BYTES >= _PIECE_BYTES:
            yield bytes(held) or b" "  # which JSON allows between two members
            held.clear()
            num_nothing = 0
    if held:
        yield bytes(held)


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Items):
        yield from _array(iter(value.items))
    elif isinstance(value, Members):
        yield from _object(value.members)
    elif _is_lazy(value):
        yield from _object(value.items() if isinstance(value, dict) else _fields(value))
    else:
        yield encode(value)


def _object(members: Iterable[tuple[str, Any] | None]) -> Iterator[bytes]:
    before = b"{"
    for member in members:
        if member is None:
            yield b""
            continue
        name, item = member
        begin = before + encode(name) + b":"
        if type(item) in _WHOLE:
            yield begin + encode(item)
        else:
            yield begin
            yield from _parts(item)
        before = b","
    yield b"}" if before == b"," else b"{}"


def _array(items: Iterator[Any]) -> Iterator[bytes]:
    before = b"["
    while group := list(islice(items, _GROUP)):
        if any(map(_is_lazy, group)):
            for item in group:
                yield before
                yield from _parts(item)
                before = b","
        else:
            yield before + encode(group)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


def _fields(value: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Fields that are set, in their order, behind the tag if there is one."""
    config = value.__struct_config__
    if config.tag is not None and config.tag_field is not None:
        yield config.tag_field, config.tag
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if field is not msgspec.UNSET:
            yield name, field


def _is_lazy(value: Any) -> bool:
    if type(value) in _WHOLE:
        return False
    names = getattr(type(value), "__struct_fields__", None)  # sooner than by `isinstance`
    if names is not None:
        return any(_is_lazy(getattr(value, name)) for name in names)
    return isinstance(value, _LAZY) or (
        isinstance(value, dict) and any(map(_is_lazy, value.values()))
    )


T = TypeVar("T")


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object that the server sends. A field that may be missing is `UnsetType`, and what is
    not declared here is never sent."""


def lazily(items: Iterable[T]) -> list[T]:
    """A list that `json_pieces` makes while it encodes it; only that may read it."""
    return cast(list[T], Items(items))


def lazy_members(members: Iterable[tuple[str, T] | None]) -> dict[str, T]:
    """The same for a dictionary: see `Members`."""
    return cast(dict[str, T], Members(members))
