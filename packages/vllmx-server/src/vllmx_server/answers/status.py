"""Answers of the routes for operators, and of those about texts."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from vllmx_server.answers.record import Record


class ModelCard(Record, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["vllmx"] = "vllmx"
    root: str
    """What was loaded."""
    parent: None = None
    max_model_len: int
    """Tokens of the context."""
    permission: list[str]


class ModelList(Record, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Record, kw_only=True):
    status: Literal["ready", "live", "draining", "starting", "unresponsive", "dead"]
    message: str | UnsetType | None = UNSET
    """Why it is not ready."""


class Version(Record, kw_only=True):
    version: str


class Tokenized(Record, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Record, kw_only=True):
    prompt: str
