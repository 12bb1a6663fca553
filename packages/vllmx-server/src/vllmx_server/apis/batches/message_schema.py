"""Bodies of POST /v1/messages/batches."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError, shown

MAX_REQUESTS = 50_000
"""Requests in one batch, the limit of OpenAI's batches."""


class BatchedMessage(msgspec.Struct):
    """One request. Its `params` are checked when its turn comes, as in Anthropic's API."""

    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


class CreateMessageBatch(msgspec.Struct, forbid_unknown_fields=True):
    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_REQUESTS)]

    @property
    def model(self) -> None:
        """Each request names its own."""

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        known: set[str] = set()
        for index, each in enumerate(self.requests):
            if each.custom_id in known:
                raise InvalidRequestError(
                    f"requests[{index}].custom_id {shown(each.custom_id)} is given twice: each"
                    " request needs an id of its own",
                    param=f"requests[{index}].custom_id",
                )
            known.add(each.custom_id)
            if not bytes(each.params).lstrip().startswith(b"{"):
                raise InvalidRequestError(
                    f"requests[{index}].params: expected an object",
                    param=f"requests[{index}].params",
                )


CREATE = msgspec.json.Decoder(CreateMessageBatch)
