"""Starts and watches the core's process, and makes the sockets that reach it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from vllmx_core.errors import RankLostError, VllmxError

from vllmx_engine.wire.ipc import (
    Failed,
    FrameError,
    FrameReader,
    FromCore,
    Ready,
    Shutdown,
    Start,
    ToCore,
    encode_frame,
    from_core_decoder,
)
from vllmx_engine.wire.messages import CoreInfo

logger = logging.getLogger("vllmx.supervisor")

PATIENCE_S = 3.0
"""Seconds after which a stopped process that others wait for is given up."""
_POLL_S = 0.02
_EXIT_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 10.0
"""A process that outlives SIGKILL for so long hangs in the kernel, in a driver most likely."""
_MAX_SOCKET_PATH = 100
"""Bytes; sockaddr_un holds 104 to 108."""
_BACKLOG = 64


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped a child of this process; False if the system cannot say."""
    if not hasattr(os, "waitid"):
        return False
    try:
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has ended
        return False
    return found is not None


class CoreProcess(asyncio.Protocol):
    """A running engine core.

    Args:
        on_message: called for every message after Ready.
        on_lost: called once when the core cannot go on or the connection is gone, and nobody had
            asked for it.
    """

    def __init__(
        self, on_message: Callable[[FromCore], None], on_lost: Callable[[CoreProcess], None]
    ) -> None:
        self.info: CoreInfo
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader: FrameReader[FromCore] = FrameReader(from_core_decoder)
        self._started: asyncio.Future[CoreInfo | None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes]
        self._failure: VllmxError | None = None
        self._up = self._stopping = self._lost = False

    @classmethod
    async def start(
        cls,
        start: Start,
        on_message: Callable[[FromCore], None],
        on_lost: Callable[[CoreProcess], None],
        for_clients: socket.socket | None = None,
    ) -> CoreProcess:
        """Spawns the process and returns when it is ready. Further clients connect to
        `for_clients`. Raises the VllmxError that loading met."""
        core = cls(on_message, on_lost)
        folder = socket_folder()
        has_ranks = start.config.num_ranks > 1
        watch = asyncio.ensure_future(core._end_if_stopped()) if has_ranks else None
        try:
            await core._launch(start, folder, for_clients)
            core.info = await core._loaded()
        except BaseException:
            await core.stop(0.0)
            raise
        finally:
            if watch is not None:
                watch.cancel()
            shutil.rmtree(folder, ignore_errors=True)
        return core

    async def _launch(self, start: Start, folder: Path, for_clients: socket.socket | None) -> None:
        path = folder / "core.sock"
        with listen(path) as listener:
            self._process = (
                spawn(path) if for_clients is None else spawn(path, listener=for_clients.fileno())
            )
            connection = await self._accept(listener)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, sock=connection)
        self.send(start)

    async def _end_if_stopped(self) -> None:
        """Ends a core that was stopped while it loads, and cannot be asked whether it lives: the
        ranks of its group wait for it."""
        stopped_s = 0.0
        while stopped_s < PATIENCE_S:
            await asyncio.sleep(_POLL_S)
            started = hasattr(self, "_process")
            stopped_s = stopped_s + _POLL_S if started and is_stopped(self.pid) else 0.0
        self.end(RankLostError(f"rank 0 (process {self.pid}) hangs or was stopped"))

    async def _loaded(self) -> CoreInfo:
        info = await self._started
        if info is None:
            await self.reap(_EXIT_TIMEOUT_S)
            text = f"{self.describe_end()} while loading the model; see its log above"
            raise self._failure or VllmxError(text)
        return info

    async def _accept(self, listener: socket.socket) -> socket.socket:
        """The child's connection. Raises VllmxError when the child ends without one."""
        loop = asyncio.get_running_loop()
        accepting = asyncio.ensure_future(loop.sock_accept(listener))
        try:
            while not accepting.done():
                await asyncio.wait([accepting], timeout=_POLL_S)
                if not accepting.done() and self._process.poll() is not None:
                    text = f"{self.describe_end()} while starting; see its log above"
                    raise self._failure or VllmxError(text)
        finally:
            accepting.cancel()
        return accepting.result()[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> bool:
        """True once `on_lost` was called."""
        return self._lost

    @property
    def failure(self) -> VllmxError | None:
        """The error that the core sent before it ended."""
        return self._failure

    def describe_end(self) -> str:
        """Describes the end of the process in words."""
        code = self._process.poll()
        if code is None:
            return "the engine core closed its connection"
        if code < 0:
            known = -code in set(signal.Signals)  # the others are real-time signals
            name = signal.Signals(-code).name if known else f"signal {-code}"
            return f"the engine core was killed by {name}"
        return f"the engine core exited with code {code}"

    def send(self, message: ToCore) -> None:
        """Queues a message. Raises FrameTooLargeError."""
        frame = encode_frame(message)
        if self._transport is not None:
            self._transport.write(frame)

    def end(self, failure: VllmxError) -> None:
        """Kills the process, which cannot say itself what is wrong with it."""
        self._failure = failure
        self._process.kill()
        self._tell_lost()

    async def stop(self, timeout_s: float = _EXIT_TIMEOUT_S) -> None:
        """Asks the process to end, kills it after `timeout_s`, and reaps it."""
        self._stopping = True
        if not hasattr(self, "_process"):
            return
        if timeout_s > 0:
            self.send(Shutdown())
        await self.reap(timeout_s)
        if self._transport is not None:
            self._transport.close()

    async def reap(self, timeout_s: float) -> bool:
        """Waits for the process to end; kills it after `timeout_s`. False when it does not end even
        then: whatever it holds stays taken."""
        clock = asyncio.get_running_loop().time
        kill_at_s = clock() + timeout_s
        while self._process.poll() is None:
            if clock() >= kill_at_s:
                self._process.kill()
            if clock() >= kill_at_s + _KILL_TIMEOUT_S:
                logger.critical("the engine core (process %d) cannot be killed", self.pid)
                return False
            await asyncio.sleep(_POLL_S)
        return True

    # --- asyncio.Protocol -------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except FrameError as error:
            logger.error("the engine core sent %s: killing it", error)
            self._process.kill()

    def _take(self, message: FromCore) -> None:
        match message:
            case Ready(info) if not self._started.done():  # else the start was cancelled
                self._up = True
                self._started.set_result(info)
            case Failed(error):
                self._failure = error.rebuild()
                self._tell_lost()  # its end may be long in coming
            case _:
                self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._started.done():
            self._started.set_result(None)
        self._tell_lost()

    def _tell_lost(self) -> None:
        if self._up and not (self._stopping or self._lost):
            self._lost = True
            self._on_lost(self)


def spawn(
    path: Path, module: str = "vllmx_engine.link.process", listener: int | None = None
) -> subprocess.Popen[bytes]:
    """A process of ours that serves a socket, and a listening one where `listener` is its
    descriptor."""
    descriptors = () if listener is None else (listener,)
    return run_module(module, str(path), *map(str, descriptors), descriptors=descriptors)


def run_module(
    module: str, *arguments: str, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A process of ours; its output goes to our standard error. `-P`: the working directory must
    not shadow modules. It inherits a mask that holds back what a terminal or a service manager
    sends to the whole group, until it has begun to ignore it."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=descriptors
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def socket_folder() -> Path:
    """A new folder with mode 0700, whose path is short enough for a socket."""
    folder = tempfile.mkdtemp(prefix="vllmx-")
    if len(os.fsencode(folder)) + len("/core.sock") > _MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="vllmx-", dir="/tmp")
    return Path(folder)


def listen(path: Path, backlog: int = 1) -> socket.socket:
    """A socket there that this user alone can open."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(str(path))  # nobody else can enter the folder before chmod
    path.chmod(0o600)
    listener.listen(backlog)
    return listener


class CoreListener:
    """A listening socket with mode 0600, in a folder that nobody else can enter.

    A client that connects while the core starts waits there until it serves.

    Attributes:
        path: of the socket, for `AttachedFrontend`.
        listener: for the core's process.
    """

    def __init__(self) -> None:
        self._folder = socket_folder()
        self.path = self._folder / "listen.sock"
        self.listener: socket.socket = listen(self.path, _BACKLOG)
        self.listener.setblocking(True)  # a thread of the core accepts

    def close(self) -> None:
        """Nobody comes in any more. May be called twice."""
        self.listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
