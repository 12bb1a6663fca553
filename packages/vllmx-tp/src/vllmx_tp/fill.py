"""Reads exactly as many bytes as are wanted out of what comes in pieces."""

from __future__ import annotations

from collections.abc import Callable


def fill(view: memoryview, read: Callable[[memoryview], int]) -> None:
    """Calls `read`, as `socket.recv_into` is called, until the view is full. Raises EOFError where
    the other side hangs up before."""
    while view:
        count = read(view)
        if not count:
            raise EOFError
        view = view[count:]
