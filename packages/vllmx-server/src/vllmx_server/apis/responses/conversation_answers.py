"""Answers of /v1/conversations."""

from __future__ import annotations

from typing import Literal

from vllmx_server.schema.record import Record


class ConversationObject(Record, kw_only=True):
    """A conversation without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Record, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
