"""What all structs of answers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

import msgspec

from vllmx_server.schema.json_pieces import Items, Members

T = TypeVar("T")


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object that the server sends. A field that may be missing is `UnsetType`, and what is
    not declared here is never sent."""


def lazily(items: Iterable[T]) -> list[T]:
    """A list that `json_pieces` makes while it encodes it; nobody else may look into it."""
    return cast(list[T], Items(items))


def lazy_members(members: Iterable[tuple[str, T] | None]) -> dict[str, T]:
    """The same for a dictionary: see `Members`."""
    return cast(dict[str, T], Members(members))
