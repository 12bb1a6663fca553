"""Bodies of /v1/conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError

from vllmx_server.apis.responses.schema import InputItem
from vllmx_server.schema.metadata import Metadata

MAX_ADDED = 20
"""Items in one request, as in OpenAI's API."""
MAX_ID = 128
Items = Annotated[list[InputItem], Meta(max_length=MAX_ADDED)]


class _NoModel(msgspec.Struct, forbid_unknown_fields=True):
    """A body without a model."""

    @property
    def model(self) -> None:
        """Conversations belong to no model."""

    def check(self) -> None:
        """Nothing depends on another field."""


class CreateConversation(_NoModel, kw_only=True, forbid_unknown_fields=True):
    items: Items | None = None
    metadata: Metadata | None = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        _check_ids(self.items or ())


class UpdateConversation(_NoModel, kw_only=True, forbid_unknown_fields=True):
    metadata: Metadata | None
    """Replaces the metadata; null clears it."""


class AddItems(_NoModel, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ADDED)]
    include: Any = None
    """Accepted and ignored."""

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        _check_ids(self.items)


def _check_ids(items: Sequence[InputItem]) -> None:
    for index, item in enumerate(items):
        if item.id is not None and len(item.id) > MAX_ID:
            raise InvalidRequestError(
                f"items[{index}].id has {len(item.id)} characters, at most {MAX_ID} are allowed:"
                " leave it out, and the item gets one",
                param=f"items[{index}].id",
            )


CREATE = msgspec.json.Decoder(CreateConversation)
UPDATE = msgspec.json.Decoder(UpdateConversation)
ADD = msgspec.json.Decoder(AddItems)
