"""Models, usage of keys, and the version."""

from __future__ import annotations

from typing import Literal

from vllmx_server.schema.record import Record


class ModelCard(Record, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["vllmx"] = "vllmx"
    root: str
    """The path or name that was loaded."""
    parent: None = None
    max_model_len: int | None
    """Tokens of the context; null of a model that was never loaded."""
    input_modalities: list[Literal["text", "image"]] | None = None
    """The contents that a message may have; null of a model that was never loaded."""
    permission: list[str]
    aliases: tuple[str, ...] = ()
    """Other names of it."""
    state: Literal["unloaded", "loading", "loaded", "failed"] = "loaded"
    size_bytes: int | None = None
    """The bytes of weights and KV cache, once it was loaded."""
    error: str | None = None
    """Why it could not be loaded."""


class ModelList(Record, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class KeyUsed(Record, kw_only=True):
    object: Literal["key_usage"] = "key_usage"
    key: str
    """The name of the key."""
    requests: int
    """The requests that were taken."""
    refused: int
    """The requests that a limit of the key refused."""
    prompt_tokens: int
    cached_tokens: int
    """The tokens of the prompts that came from the cache."""
    completion_tokens: int


class KeyUsedList(Record, kw_only=True):
    object: Literal["list"] = "list"
    data: list[KeyUsed]


class Version(Record, kw_only=True):
    version: str
