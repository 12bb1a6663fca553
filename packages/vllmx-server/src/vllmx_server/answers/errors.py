"""Errors, in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

from typing import Literal

from vllmx_server.answers.record import Record

AnthropicType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
]


class ErrorFields(Record, kw_only=True):
    message: str
    """What is wrong and what helps."""
    type: str
    param: str | None
    """The field at fault."""
    code: str


class ErrorAnswer(Record, kw_only=True):
    """What every route but those of Anthropic's API sends with a status of 400 or above."""

    error: ErrorFields


class MessagesErrorFields(Record, kw_only=True):
    type: AnthropicType
    message: str


class MessagesError(Record, kw_only=True):
    """What the routes of Anthropic's API send with a status of 400 or above, and as the event
    `error` of a stream."""

    type: Literal["error"] = "error"
    error: MessagesErrorFields
