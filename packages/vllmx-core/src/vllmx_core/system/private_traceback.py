"""Tracebacks without the texts of exceptions, which may quote what a client sent.

A log is read by more people than may know prompts and API keys. So what goes wrong on behalf of a
request is logged as types of exceptions and lines of code.
"""

from __future__ import annotations

import traceback

_MOST = 20
"""Exceptions of one chain or group that are shown."""


def private_traceback(error: BaseException) -> str:
    """The stacks and types of an error, of what caused it and of the members of a group."""
    parts: list[str] = []
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting and len(parts) < _MOST:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        kind = type(one)
        stack = "".join(traceback.format_tb(one.__traceback__))
        parts.append(f"{stack}{kind.__module__}.{kind.__qualname__}")
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += (one.__cause__, one.__context__)
    return "\nwith, or because of:\n".join(parts)
