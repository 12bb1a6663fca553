"""The engine core's own process: `python -P -m vllmx_engine.link.process SOCKET`.

Started by `vllmx_engine.link.supervisor` alone. It connects to the socket, is told what to load,
and serves until it is told to stop. Nobody can talk to it once the socket is gone: its end,
whatever the reason, ends this process at once.
"""

from __future__ import annotations

import faulthandler
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

from vllmx_core.errors import EngineDeadError, VllmxError
from vllmx_core.logs import configure_logging
from vllmx_core.standard_error import StandardError

from vllmx_engine.core.core_loop import CoreLoop
from vllmx_engine.core.load import load_planned
from vllmx_engine.core.load_plan import LoadPlan
from vllmx_engine.wire.ipc import (
    ErrorRecord,
    Failed,
    FrameError,
    FrameReader,
    FrameTooLargeError,
    FromCore,
    Outputs,
    Ping,
    Pong,
    Ready,
    Start,
    ToCore,
    encode_frame,
    to_core_decoder,
)
from vllmx_engine.wire.messages import CoreOutput
from vllmx_engine.wire.outbox import Outbox

logger = logging.getLogger("vllmx.core")

_RECEIVE_BYTES = 1 << 18
_FAREWELL_S = 2.0


class Connection:
    """The core's end of the socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._outbox = Outbox(self._socket, _exit_without_parent)

    def messages(self) -> Iterator[ToCore]:
        """As they come, until the other side is gone. Raises FrameError."""
        reader: FrameReader[ToCore] = FrameReader(to_core_decoder)
        while data := self._socket.recv(_RECEIVE_BYTES):
            yield from reader.feed(data)

    def send(self, message: FromCore) -> bool:
        """Never waits. False when the other side has not read for so long that nothing more should
        be made for it."""
        try:
            frame = encode_frame(message)
        except FrameTooLargeError:
            if not isinstance(message, Outputs):
                raise
            taken = [self.send(part) for part in _smaller(message)]
            return all(taken)
        return self._outbox.put(frame)

    def flush(self) -> None:
        """Gives the other side a moment to read the last words."""
        self._outbox.flush(_FAREWELL_S)


def _smaller(message: Outputs) -> list[Outputs]:
    """The same updates in two messages; one that is too large alone becomes an error."""
    outputs = message.outputs
    if len(outputs) > 1:
        middle = len(outputs) // 2
        return [Outputs(outputs[:middle]), Outputs(outputs[middle:])]
    return [
        Outputs(
            [
                CoreOutput(
                    request_id=outputs[0].request_id,
                    ids=[],
                    finish_reason="error",
                    error="the log-probabilities of this request are too large to be sent: ask for"
                    " fewer prompt_logprobs or shorten the prompt",
                    error_code="invalid_request",
                )
            ]
        )
    ]


def _exit_without_parent() -> None:
    logger.warning("the API process is gone: exiting")
    logging.shutdown()
    os._exit(0)  # nobody is left to answer, and a step may be in flight on another thread


def _give_up(connection: Connection, error: EngineDeadError) -> None:
    """Says why and ends the process, from another thread than the one that is stuck. Where the
    kernel itself cannot end that thread, the message is all that the API process gets."""
    connection.send(Failed(ErrorRecord.of(error)))
    connection.flush()
    logging.shutdown()
    os._exit(1)


def _receive(
    connection: Connection, messages: Iterator[ToCore], inbox: SimpleQueue[ToCore]
) -> None:
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


def serve(connection: Connection) -> int:
    """Loads, answers, and returns the exit code."""
    messages = connection.messages()
    start = next(messages, None)
    if not isinstance(start, Start):
        logger.error("expected a start message, got %s", type(start).__name__)
        return 1
    logging.getLogger("vllmx").setLevel(start.log_level)
    inbox: SimpleQueue[ToCore] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages, inbox), daemon=True).start()
    plan = LoadPlan(start.config, Path(start.path), start.specs.registry(), start.progress)
    try:
        core, info = load_planned(plan)
        connection.send(Ready(info))
        CoreLoop(core, inbox, connection.send, partial(_give_up, connection)).run()
    except VllmxError as error:
        connection.send(Failed(ErrorRecord.of(error)))
        return 1
    except Exception:
        logger.exception("the engine core failed")
        text = "the engine core failed with an internal error; see its log above"
        connection.send(Failed(ErrorRecord("VllmxError", text)))
        return 1
    finally:
        connection.flush()
    return 0


def main() -> int:
    """Signals are the parent's business: it drains first, then tells the core to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(stream=StandardError())
    faulthandler.enable()  # native code that crashes says where
    return serve(Connection(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
