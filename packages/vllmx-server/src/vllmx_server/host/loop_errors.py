"""Errors that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from vllmx_core.system.private_traceback import private_traceback

logger = logging.getLogger("vllmx.server")


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The handler of an event loop for errors that nobody awaits. The usual one prints the task,
    and with it the exception's text. A connection that is cut when the server stops is no error;
    Python 3.11 reports each as one."""
    error = context.get("exception")
    if not isinstance(error, asyncio.CancelledError):
        stack = private_traceback(error) if error is not None else "no exception"
        logger.error("%s\n%s", context.get("message"), stack)
