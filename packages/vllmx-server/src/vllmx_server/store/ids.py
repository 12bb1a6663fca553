"""Names and times of what is kept."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str) -> str:
    """Makes an id that cannot be guessed: 128 bits."""
    return prefix + secrets.token_hex(16)


def now() -> int:
    """Seconds since 1970, as OpenAI's API counts."""
    return int(time.time())
