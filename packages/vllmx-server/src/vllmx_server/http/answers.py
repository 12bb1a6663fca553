"""Answers that several APIs share."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from vllmx_server.schema.record import Record


class Deleted(Record, kw_only=True):
    id: str
    object: Literal["file", "response"]
    deleted: Literal[True] = True


class Page(Record, kw_only=True):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class Health(Record, kw_only=True):
    status: Literal["ready", "live", "draining", "starting", "asleep", "unresponsive", "dead"]
    message: str | UnsetType | None = UNSET
    """Why it is not ready."""
