"""Tokens of texts, and texts of tokens."""

from __future__ import annotations

from vllmx_server.schema.record import Record


class Tokenized(Record, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Record, kw_only=True):
    prompt: str
