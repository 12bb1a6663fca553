"""Answers of the routes for operators."""

from __future__ import annotations

from typing import Literal

from vllmx_server.schema.record import Record


class ModelState(Record, kw_only=True):
    model: str
    state: Literal["unloaded", "loaded"]


class PrefixCachesReset(Record, kw_only=True):
    reset: dict[str, bool]
    """Whether each model's cache was reset; false where requests run."""
