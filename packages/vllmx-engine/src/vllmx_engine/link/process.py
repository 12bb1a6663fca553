"""The engine core's own process: `python -P -m vllmx_engine.link.process SOCKET [LISTENER]`.

Started by `vllmx_engine.link.supervisor` alone. It connects to the socket, receives what to load,
and serves until a message stops it. The end of that connection, for any reason, ends this process
at once. Further clients connect to the listening socket of descriptor LISTENER, if there is one.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec
from vllmx_core.errors import EngineDeadError, VllmxError
from vllmx_core.system.logs import configure_logging
from vllmx_core.system.standard_error import StandardError

from vllmx_engine.core.announcer import Announcer
from vllmx_engine.core.core_loop import CoreLoop, Inbox
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.load import load_core
from vllmx_engine.link.core_socket import ClientListener, CoreSocket
from vllmx_engine.wire.ipc import (
    ErrorRecord,
    Failed,
    FrameError,
    Ping,
    Pong,
    Ready,
    Start,
    ToCore,
)

if TYPE_CHECKING:
    from vllmx_engine.core.engine_core import EngineCore
    from vllmx_engine.core.peers import Peers

logger = logging.getLogger("vllmx.core")


def _exit_without_parent() -> None:
    logger.warning("the API process is gone: exiting")
    logging.shutdown()
    os._exit(0)  # nobody is left to answer, and a step may be in flight on another thread


def _tell_end(connection: CoreSocket, clients: ClientListener | None, error: VllmxError) -> None:
    """Says why to all clients; the process ends behind that."""
    failed = Failed(ErrorRecord.of(error))
    for each in [connection, *(clients.close() if clients is not None else ())]:
        each.send(failed)


def _give_up(
    connection: CoreSocket, clients: ClientListener | None, error: EngineDeadError
) -> None:
    """Says why and ends the process, from another thread than the one that is stuck. Where the
    kernel itself cannot end that thread, the message is all that the API process gets."""
    _tell_end(connection, clients, error)
    connection.flush()
    logging.shutdown()
    os._exit(1)


def _receive(connection: CoreSocket, messages: Iterator[ToCore], inbox: Inbox) -> None:
    """The reader thread: also sees the parent die while the core loads or computes, and answers
    for the process meanwhile."""
    try:
        for message in messages:
            if isinstance(message, Ping):
                connection.send(Pong())
            else:
                inbox.put(message)
    except FrameError as error:
        logger.error("the API process sent %s: exiting", error)
        logging.shutdown()
        os._exit(1)
    except OSError:
        pass
    _exit_without_parent()


def serve(connection: CoreSocket, listener: socket.socket | None = None) -> int:
    """Loads, answers, and returns the exit code. `listener`: the socket of further clients."""
    messages = connection.messages()
    start = next(messages, None)
    if not isinstance(start, Start):
        logger.error("expected a start message, got %s", type(start).__name__)
        return 1
    logging.getLogger("vllmx").setLevel(start.log_level)
    inbox: Inbox = SimpleQueue()
    clients = None if listener is None else ClientListener(listener, inbox)
    threading.Thread(target=_receive, args=(connection, messages, inbox), daemon=True).start()
    tower = None if start.mmproj is None else Path(start.mmproj)
    registry = start.specs.registry()
    found = FoundModel(
        start.config,
        Path(start.path),
        registry,
        start.progress,
        tower,
        host_key=start.host_key,
    )
    try:
        if start.cores:
            os.sched_setaffinity(0, start.cores)
        if start.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = start.devices
        core, info = load_core(found)
        announcer = Announcer(core, start.digest_key) if start.digest_key else None
        name = core.scheduler.cache.identity.model
        info = msgspec.structs.replace(info, cache_model=name)
        peers = None
        if announcer is not None and start.config.role != "both":
            peers = _peers(core, found)
            info = msgspec.structs.replace(info, role=start.config.role, blocks_of=peers.blocks_of)
        connection.send(Ready(info))
        if clients is not None:
            clients.open(info)
        gc.freeze()  # no step waits for a collection that looks through what stays to the end
        gc.set_threshold(700)  # small and frequent collections
        on_stuck = partial(_give_up, connection, clients)
        CoreLoop(core, inbox, connection.send, on_stuck, found, announcer, peers).run()
    except VllmxError as error:
        _tell_end(connection, clients, error)
        return 1
    except Exception:
        logger.exception("the engine core failed")
        text = "the engine core failed with an internal error; see its log above"
        _tell_end(connection, clients, VllmxError(text))
        return 1
    finally:
        connection.flush()
    return 0


def _peers(core: EngineCore, found: FoundModel) -> Peers:
    """The other replicas, with which blocks are exchanged."""
    from vllmx_engine.core.fingerprint import blocks_of  # few cores need them
    from vllmx_engine.core.peers import Peers
    from vllmx_engine.link.remote_core import connect_peer

    tiers = core.scheduler.tiers
    assert tiers is not None, "a role opens them"
    of = blocks_of(found, core, tiers.block_bytes)
    return Peers(core.scheduler, tiers, of, partial(connect_peer, found))


def main() -> int:
    """Signals are the parent's business: it drains first, then tells the core to stop."""
    gc.set_threshold(50_000)  # loading leaves little garbage
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(stream=StandardError())
    faulthandler.enable()  # native code that crashes says where
    _, path, *descriptors = sys.argv
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    listener = socket.socket(fileno=int(descriptors[0])) if descriptors else None
    return serve(CoreSocket(connection, _exit_without_parent), listener)


if __name__ == "__main__":
    sys.exit(main())
