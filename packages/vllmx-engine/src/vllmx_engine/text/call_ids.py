"""Ids and names of past calls, for templates that require them.

Mistral's templates accept only ids of nine letters and digits, and some want the tool's name in its
result. A conversation that began with another provider may have neither.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

_USUAL_ID = re.compile(r"[A-Za-z0-9]{9}")


def with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Gives the calls of checked messages ids of nine letters and digits, and their results the id
    and name of the call. None: nothing changes."""
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    waiting: list[str] = []
    found = []
    for index, message in enumerate(messages):
        copy = dict(message)
        if calls := message.get("tool_calls"):
            copy["tool_calls"] = []
            waiting = []
            for number, call in enumerate(calls):
                given = call.get("id") if isinstance(call.get("id"), str) else None
                made = _nine(given or f"{index}.{number}")
                ids[given or made] = made
                names[made] = call["function"]["name"]
                waiting.append(made)
                copy["tool_calls"].append({**call, "id": made})
        elif message["role"] == "tool":
            given = message.get("tool_call_id") or (waiting[0] if waiting else "")
            made = ids.get(given, given if given in names else _nine(given))
            if made in waiting:
                waiting.remove(made)
            copy["tool_call_id"] = made
            if not message.get("name") and made in names:
                copy["name"] = names[made]
        found.append(copy)
    return found if found != messages else None


def _nine(given: str) -> str:
    """An id of nine letters and digits, the same for the same text."""
    if _USUAL_ID.fullmatch(given):
        return given
    digest = hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return base64.b32encode(digest).decode().lower()[:9]
