"""A host that runs ranks for a rank 0 elsewhere: `vllmx rank`.

It waits for a rank 0 that has its key (`vllmx_tp.door`) and runs the group that this asks for
(`vllmx_tp.hosted_group`). Then it waits again: rank 0 is started again after it failed, and asks
anew.
"""

from __future__ import annotations

import errno
import logging
import os
import socket

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, VllmxError
from vllmx_engine.core.found_model import find_model
from vllmx_engine.wire.ipc import FrameError

from vllmx_tp.door import Door
from vllmx_tp.hosted_group import HostedGroup

logger = logging.getLogger("vllmx.tp")


def listen(address: tuple[str, int]) -> socket.socket:
    """Raises ConfigError where that cannot be."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=64)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0  # those of resolvers are negative
        reason = os.strerror(number) if number > 0 else str(error)
        is_port = number == errno.EADDRINUSE or isinstance(error, OverflowError)
        remedy = (
            "choose another port, or end the process that has this one"
            if is_port
            else "name an address that this host has, or a port that this user may have"
        )
        raise ConfigError(
            f"--listen {address[0]}:{address[1]}: {reason}: {remedy}", param="listen"
        ) from error


def serve_ranks(listener: socket.socket, config: EngineConfig, key: bytes) -> None:
    """Runs groups one after the other until the listener is closed.

    Args:
        config: names the model, and the tower of --mmproj, as they are found on this host; all
            else is rank 0's to say.
    """
    found = find_model(config)
    host, port = listener.getsockname()[:2]
    door = Door(listener, key)
    logger.info("ranks of %s wait at %s:%d", config.model, host, port)
    while (caller := door.caller()) is not None:
        try:
            HostedGroup(caller, found, f"{host}:{port}").run()
            logger.info("a group has ended: rank 0 has closed it")
        except (VllmxError, FrameError, OSError, EOFError) as error:
            logger.error("a group has ended: %s", error)
        finally:
            door.leave(caller)
