"""Bodies of POST /v1/batches and /v1/messages/batches, and the lines of a batch's input."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from vllmx_core.bounds import MAX_LIFETIME_S
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.generating.fields import field_error
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.intervals import Metadata

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
    "/v1/rerank", "/rerank", "/embed", "/v1/score", "/score", "/classify", "/pooling",
)  # fmt: skip
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Expiry(msgspec.Struct, forbid_unknown_fields=True):
    seconds: limits.Lifetime
    anchor: Literal["created_at"] = "created_at"


class CreateBatch(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: str
    completion_window: str = "24h"
    metadata: Metadata | None = None
    output_expires_after: Expiry | None = None

    model = None  # each line names its own

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if self.endpoint not in ENDPOINTS:
            raise field_error(
                "endpoint", f"is {shown(self.endpoint)}: use one of {', '.join(ENDPOINTS)}"
            )
        assert self.window_s

    @property
    def window_s(self) -> int:
        """Seconds until the batch expires. Raises InvalidRequestError."""
        found = _WINDOW.fullmatch(self.completion_window)
        seconds = int(found[1]) * _UNITS[found[2]] if found else 0
        if not 0 < seconds <= MAX_LIFETIME_S:
            raise field_error(
                "completion_window",
                f"is {shown(self.completion_window)}: give a number and s, m, h"
                " or d, such as 24h, and 30d at most",
            )
        return seconds


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


CREATE = msgspec.json.Decoder(CreateBatch)
LINE = msgspec.json.Decoder(BatchLine)


MAX_REQUESTS = 50_000
"""Requests in one batch, the limit of OpenAI's batches."""


class BatchedMessage(msgspec.Struct):
    """One request. Its `params` are checked when its turn comes, as in Anthropic's API."""

    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


class CreateMessageBatch(msgspec.Struct, forbid_unknown_fields=True):
    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_REQUESTS)]

    model = None  # each request names its own

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        known: set[str] = set()
        for index, each in enumerate(self.requests):
            if each.custom_id in known:
                raise field_error(
                    f"requests[{index}].custom_id",
                    f"{shown(each.custom_id)} is given twice: each request needs an id of its own",
                )
            known.add(each.custom_id)
            if not bytes(each.params).lstrip().startswith(b"{"):
                raise InvalidRequestError(
                    f"requests[{index}].params: expected an object",
                    param=f"requests[{index}].params",
                )


CREATE_MESSAGES = msgspec.json.Decoder(CreateMessageBatch)
