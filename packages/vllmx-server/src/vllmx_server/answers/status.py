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
    max_model_len: int | None
    """Tokens of the context; null of a model that was never loaded."""
    input_modalities: list[Literal["text", "image"]] | None = None
    """What a message may hold; null of a model that was never loaded."""
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


class Health(Record, kw_only=True):
    status: Literal["ready", "live", "draining", "starting", "asleep", "unresponsive", "dead"]
    message: str | UnsetType | None = UNSET
    """Why it is not ready."""


class ModelState(Record, kw_only=True):
    model: str
    state: Literal["unloaded", "loaded"]


class PrefixCachesReset(Record, kw_only=True):
    reset: dict[str, bool]
    """Whether each model's cache was reset; false where requests run."""


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


class Tokenized(Record, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Record, kw_only=True):
    prompt: str
