"""Waiting for what another task, thread or process does: as long as it takes, on any machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""How long anything may take before a test fails. It ends tests that would hang and measures no
speed: a busy machine may have a fiftieth of a core to give."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; it fails after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s"
        time.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    """`wait_until`, in an event loop that goes on meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s"
        await asyncio.sleep(0.005)
