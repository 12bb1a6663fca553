"""The item that stands for a summarized conversation; clients keep it and send it back."""

from __future__ import annotations

import base64
import binascii

from vllmx_core.errors import InvalidRequestError

from vllmx_server.apis.responses.schema import InputItem
from vllmx_server.store.ids import new_id

MAX_SUMMARY_TOKENS = 2048
REQUEST = """\
Summarize the conversation so far, so that somebody who reads nothing but your summary can go on \
with it. State what the user wants, what was decided and why, facts, names, numbers and paths that \
matter, what tools returned, and what is left to do. Answer with the summary alone."""
"""The last user message, which asks the model for the summary."""
_PREFIX = "vllmx1."
"""Marks the content of our own items. Content is encoded, not secret: the client has the
conversation."""


def item_of(summary: str) -> dict[str, str]:
    """The item that holds a summary."""
    content = base64.urlsafe_b64encode(summary.encode()).decode()
    return {
        "type": "compaction",
        "id": new_id("cmp_"),
        "encrypted_content": _PREFIX + content,
    }


def summary_of(item: InputItem, where: str) -> str:
    """The summary that an item holds. Raises InvalidRequestError for one that was not made here."""
    prefix, content = _PREFIX, item.encrypted_content or ""
    try:
        if content.startswith(prefix):
            return base64.b64decode(content.removeprefix(prefix), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise InvalidRequestError(
        f"{where}.encrypted_content was not made by POST /v1/responses/compact of this server: send"
        " the item as it was, or the conversation itself",
        param=f"{where}.encrypted_content",
    )
