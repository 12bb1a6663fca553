"""The workers of a server as their supervisor sees them: started, called, restarted."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import TypeVar

import msgspec
from vllmx_core.errors import ConfigError, EngineDeadError
from vllmx_engine.link.supervisor import run_module

from vllmx_server.host.workers.channel import Channel, GoneError
from vllmx_server.host.workers.dispatch import Dispatcher
from vllmx_server.host.workers.messages import Begin
from vllmx_server.host.workers.shared_counts import SharedCounts

logger = logging.getLogger("vllmx.supervisor")

R = TypeVar("R")
_POLL_S = 0.02
_QUICK_S = 30.0
"""A worker that served for longer has not failed quickly."""
_MAX_QUICK_FAILURES = 5
_FIRST_DELAY_S, _LAST_DELAY_S = 0.1, 10.0
_EXIT_S = 5.0


class Worker:
    """One life of a worker."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.serves = False

    async def reap(self, timeout_s: float) -> None:
        """Waits until it has exited; kills it after `timeout_s`."""
        clock = asyncio.get_running_loop().time
        kill_at_s = clock() + timeout_s
        while self.process.poll() is None:
            if clock() >= kill_at_s:
                self.process.kill()
            await asyncio.sleep(_POLL_S)

    def describe_end(self) -> str:
        code = self.process.poll()
        if code is not None and code < 0 and -code in set(signal.Signals):
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


class WorkerPool:
    """All workers of a server.

    Args:
        size: how many.
        listeners: the socket that connections come from, and that of operators if there is one.
        listen: makes the first one listen.
        begin: the first message to each, without its row.
        on_channel: called with the channel of each worker before it begins.
    """

    def __init__(
        self,
        size: int,
        listeners: tuple[socket.socket, socket.socket | None],
        listen: Callable[[], None],
        begin: Begin,
        on_channel: Callable[[Channel], None],
    ) -> None:
        listener, self._operators = listeners
        self._begin = msgspec.structs.replace(begin, num_rows=size, seed=secrets.randbits(32))
        self._on_channel = on_channel
        self._memory = SharedCounts.memory(size)
        self._counts = SharedCounts(self._memory, size, 0, self._begin.seed)
        self._dispatcher = Dispatcher(listener, listen, self._counts, size)
        self._workers: dict[int, Worker] = {}
        self._leader: Worker | None = None
        self._had_leader = False
        self._ended = asyncio.Event()
        self._stopping = False
        self._keeping = [asyncio.ensure_future(self._keep(row)) for row in range(size)]
        self._began: list[asyncio.Future[None]] = [
            asyncio.get_running_loop().create_future() for _ in range(size)
        ]

    async def ready(self) -> None:
        """Returns when all of them serve for the first time. Raises the error of the first that
        cannot."""
        await asyncio.gather(*self._began)

    async def failed(self) -> EngineDeadError:
        """Returns when one of them cannot be kept alive, with the reason."""
        done, _ = await asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
        error = next(iter(done)).exception()
        return EngineDeadError(f"the API processes keep failing: {error}; see the log above")

    def channels(self) -> list[Channel]:
        """The channels of all that serve now."""
        return [each.channel for each in self._workers.values() if each.serves]

    @property
    def is_whole(self) -> bool:
        """None of them is being started."""
        return len(self.channels()) == len(self._keeping)

    @property
    def leader(self) -> Channel:
        """The worker that runs batches and background responses. Raises GoneError."""
        if self._leader is None:
            raise GoneError("batches and responses are being taken over by another process")
        return self._leader.channel

    async def stop(self, timeout_s: float) -> None:
        """Stops all of them, by force after `timeout_s`."""
        self._stopping = True
        self._dispatcher.stop()
        for each in self._workers.values():
            each.channel.tell("stop", None)
        await asyncio.gather(*(each.reap(timeout_s) for each in self._workers.values()))
        for task in self._keeping:
            task.cancel()
        await asyncio.wait(self._keeping)
        for each in self._workers.values():
            await each.reap(0)
        self._dispatcher.close()
        os.close(self._memory)

    # --- one worker, again and again --------------------------------------------------------------
    async def _keep(self, row: int) -> None:
        """Restarts a worker whenever it ends. Raises EngineDeadError if that happens too often; a
        file that has become invalid, such as keys or a certificate, does not count while other
        workers serve."""
        clock, quick_failures = asyncio.get_running_loop().time, 0
        refused: Exception | None
        told = ""
        while True:
            worker = await self._spawn(row)
            served, refused = False, None
            born_s = clock()
            try:
                await self._have_begin(worker, row)
                served = True
                await worker.channel.gone.wait()
            except Exception as error:
                if not self._began[row].done():
                    self._began[row].set_exception(error)
                    self._began[row].exception()  # retrieved: nobody may be awaiting it
                    return
                refused = error
            finally:
                await self._bury(worker, row)
            if self._stopping:
                return
            if isinstance(refused, ConfigError) and self.channels():
                if str(refused) != told:
                    told = str(refused)
                    logger.error(
                        "an API process cannot serve, and the others go on: %s; it is tried again"
                        " every %g s",
                        told,
                        _LAST_DELAY_S,
                    )
                await asyncio.sleep(_LAST_DELAY_S)
                continue
            if refused is not None:
                logger.error("an API process cannot serve: %s", refused)
            if served and clock() - born_s > _QUICK_S:
                quick_failures = 0
            quick_failures += 1
            text = f"API process {worker.process.pid} {worker.describe_end()}"
            if quick_failures > _MAX_QUICK_FAILURES:
                raise EngineDeadError(text)
            logger.error("%s; its streams are lost, and another one is started", text)
            await asyncio.sleep(min(_FIRST_DELAY_S * 2.0 ** (quick_failures - 1), _LAST_DELAY_S))

    async def _spawn(self, row: int) -> Worker:
        ours, theirs = socket.socketpair()
        listeners = [self._dispatcher.mailbox(row)]
        if self._operators is not None:
            listeners.append(self._operators.fileno())
        descriptors = (theirs.fileno(), self._memory, *listeners)
        with theirs:
            process = run_module(
                "vllmx_server.host.worker", *map(str, descriptors), descriptors=descriptors
            )
        channel = await Channel.over(ours)
        self._on_channel(channel)
        self._workers[row] = worker = Worker(process, channel)
        return worker

    async def _have_begin(self, worker: Worker, row: int) -> None:
        begin = msgspec.structs.replace(self._begin, row=row)
        await worker.channel.ask("begin", begin, type(None))
        worker.serves = True
        self._dispatcher.opened(row)
        if not self._began[row].done():
            self._began[row].set_result(None)
        await self._choose_leader()

    async def _bury(self, worker: Worker, row: int) -> None:
        """Frees what it held, once its process is certainly gone."""
        worker.serves = False
        await worker.reap(0 if not self._stopping else _EXIT_S)
        worker.channel.close()
        self._counts.clear(row)
        self._dispatcher.left(row)
        if worker is self._leader:
            self._leader = None
            if not self._stopping:
                await self._choose_leader()

    async def _choose_leader(self) -> None:
        """Makes the first that serves the leader, if there is none. Skips one that ends meanwhile,
        which `_keep` restarts."""
        for worker in list(self._workers.values()):
            if self._leader is None and worker.serves:
                self._leader = worker
                is_first, self._had_leader = not self._had_leader, True
                try:
                    await worker.channel.ask("lead", is_first, type(None))
                except GoneError:
                    if worker is self._leader:
                        self._leader = None


async def asked_of_all(
    channels: list[Channel], name: str, kind: type[R], timeout_s: float, body: object = None
) -> list[R]:
    """The answers that arrive in time."""
    tasks = [asyncio.ensure_future(each.ask(name, body, kind)) for each in channels]
    if not tasks:
        return []
    done, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    return [task.result() for task in tasks if task in done and task.exception() is None]
