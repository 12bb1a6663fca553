"""An engine core in a process of its own, which is started again when it dies."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import msgspec
from vllmx_core.errors import EngineDeadError, RankLostError, VllmxError
from vllmx_core.weights.file_names import weight_files

from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link.frontend import ASLEEP, SEND_AGAIN, CoreFrontend, Heartbeat, lost_with
from vllmx_engine.link.supervisor import CoreProcess
from vllmx_engine.wire.ipc import FromCore, KnownSpecs, Ping, Pong, Start, ToCore
from vllmx_engine.wire.messages import CoreInfo

if TYPE_CHECKING:
    from vllmx_core.system.held_files import HeldFiles

logger = logging.getLogger("vllmx.supervisor")


class Door(Protocol):
    """The place where a core finds its further clients."""

    listener: socket.socket
    """Inherited by the core's process."""


class ProcessFrontend(CoreFrontend):
    """The core in a process of its own, started again when it dies.

    A core that dies soon after its start, again and again, stays dead: waiting longer and longer
    between the attempts, `MAX_QUICK_FAILURES` of them are made.
    """

    MAX_QUICK_FAILURES = 5
    QUICK_S = 30.0
    """A core that was heard of for longer than this has not failed quickly."""
    FIRST_DELAY_S = 0.1
    LAST_DELAY_S = 10.0
    EXIT_S = 1.0
    """The time that a core whose connection is gone gets to exit, so that its code says why."""

    def __init__(
        self,
        found: FoundModel,
        listener: Door | None = None,
        *,
        cores: Sequence[int] = (),
        devices: str = "",
    ) -> None:
        super().__init__()
        self._core_listener = listener
        self._start = Start(
            config=found.config,
            path=str(found.path),
            mmproj=None if found.mmproj is None else str(found.mmproj),
            specs=KnownSpecs.of(found.registry),
            progress=found.progress,
            log_level=logging.getLogger("vllmx").getEffectiveLevel(),
            digest_key=found.digest_key,
            host_key=found.host_key,
            cores=list(cores),
            devices=devices,
        )
        self._core: CoreProcess
        self._born_s = 0.0
        self._quick_failures = 0
        self._waking = asyncio.Lock()
        self._held: HeldFiles | None = None
        """The weights, while the core sleeps at level 1."""
        self._last_update_s = 0.0
        self._restarting: asyncio.Task[None] | None = None
        self._heartbeat = Heartbeat(lambda: self._send(Ping()), self._on_hang)

    @classmethod
    async def start(cls, found: FoundModel, listener: Door | None = None) -> ProcessFrontend:
        """Spawns the process and loads the model. Other processes connect to `listener`. Raises the
        VllmxError that loading met."""
        return await cls(found, listener).begin()

    async def begin(self) -> Self:
        """The second half of `start`."""
        await self._spawn()
        self._heartbeat.start()
        return self

    def begin_asleep(self, info: CoreInfo) -> None:
        """Takes the description of another core: this one starts with `wake`."""
        self.info, self.status = info, "asleep"

    @property
    def silent_s(self) -> float:
        """See `Frontend.silent_s`. A core that starts is not silent."""
        return self._heartbeat.silent_s if self.status == "ready" else 0.0

    @property
    def is_asleep(self) -> bool:
        """It was ended by `sleep`, until `wake`."""
        return self.status == "asleep"

    @property
    def start_message(self) -> Start:
        """The message that starts the core with its model."""
        return self._start

    @property
    def pid(self) -> int:
        """The process id of the core."""
        return self._core.pid

    def unavailable(self) -> EngineDeadError:
        if self.status == "restarting":
            return EngineDeadError(
                f"the engine core is being restarted ({self._last_reason}): try again in a moment"
            )
        return super().unavailable()

    def keep_sizes(self, memory_fraction: float) -> None:
        """Has the core start again with as many blocks and slots as it has now, in this part of the
        memory that is free then."""
        config = dataclasses.replace(
            self._start.config,
            num_kv_blocks=self.info.num_kv_blocks,
            num_state_slots=self.info.num_state_slots or None,
            kv_cache_memory_bytes=None,
            memory_fraction=memory_fraction,
        )
        self._start = msgspec.structs.replace(self._start, config=config)

    async def sleep(self, level: int = 2) -> None:
        """Ends the core until `wake`: all that it holds is free. At level 1 the files of weights
        stay in the host's memory, so that `wake` reads no disk. Requests in flight are lost. Raises
        EngineDeadError where it neither runs nor starts again, and WeightFormatError where the
        files cannot be listed."""
        if self.status not in ("ready", "restarting"):
            raise self.unavailable()
        files = weight_files(Path(self._start.path)) if level == 1 else []
        self.status = "asleep"
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        self._tell_lost(EngineDeadError(ASLEEP))
        await self._core.stop()
        if level == 1:
            from vllmx_core.system.held_files import HeldFiles  # few starts need it

            async with self._waking:
                if self.status == "asleep":
                    self._held = await asyncio.to_thread(HeldFiles, files)
                if self.status != "asleep":  # closed meanwhile
                    self._let_go()

    async def wake(self) -> None:
        """Starts it again after `sleep`. Raises what it met then, and it sleeps on."""
        async with self._waking:
            if self.status != "asleep":
                return
            await self._spawn()
            self._let_go()
            self.status = "ready"
            self._heartbeat.heard()
            self._heartbeat.start()
            if self.listener is not None:
                self.listener.restarted(self.info)

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    async def close(self) -> None:
        if self.status == "closed":
            return
        self.status = "closed"
        self._let_go()
        self._heartbeat.stop()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if hasattr(self, "_core"):  # it may never have begun
            await self._core.stop()

    def _send(self, message: ToCore) -> None:
        self._core.send(message)

    def _take(self, message: FromCore) -> None:
        self._heartbeat.heard()
        if not isinstance(message, Pong):  # which a core whose steps hang sends too
            self._last_update_s = self._loop_s()
            super()._take(message)

    async def _spawn(self) -> None:
        listener = None if self._core_listener is None else self._core_listener.listener
        core = await CoreProcess.start(self._start, self._take, self._on_lost, listener)
        if core.lost:  # as soon as it was ready
            await core.stop(0.0)
            raise core.failure or EngineDeadError(core.describe_end())
        self._core, self.info = core, core.info
        self._born_s = self._last_update_s = self._loop_s()

    def _on_hang(self) -> None:
        """Kills a hanging core of a rank group. A core alone may still recover; the ranks of a
        group do not wait for so long."""
        if self.status == "ready" and self._start.config.num_ranks > 1:
            self._core.end(RankLostError(f"rank 0 (process {self.pid}) hangs or was stopped"))

    def _on_lost(self, core: CoreProcess) -> None:
        if core is not getattr(self, "_core", None):
            return  # `_spawn` has not taken it yet, and sees it for itself
        self.status = "restarting"
        self._last_reason = "it failed"
        if core.failure is not None:
            self._fail_all(core.failure)
        self._restarting = asyncio.ensure_future(self._restart(core))

    def _fail_all(self, failure: VllmxError) -> None:
        """Requests in flight end at once: they do not wait until a process that hangs is gone."""
        self._last_reason = failure.message
        lost = "" if self._start.config.replicas > 1 else "; every request in flight is lost"
        logger.error("%s%s", failure.message, lost)
        self._tell_lost(lost_with(failure, failure.message + SEND_AGAIN))

    async def _restart(self, core: CoreProcess) -> None:
        if self._last_update_s - self._born_s > self.QUICK_S:
            self._quick_failures = 0
        ended = await core.reap(self.EXIT_S)
        if core.failure is None:
            self._fail_all(EngineDeadError(core.describe_end()))
        if not ended:
            self._give_up(f"{self._last_reason}; process {core.pid} cannot be killed")
            return
        reason = self._last_reason
        while self._quick_failures < self.MAX_QUICK_FAILURES:
            self._quick_failures += 1
            await asyncio.sleep(self._delay_s())
            try:
                await self._spawn()
            except Exception as error:  # if this task died, nobody would ever try again
                self._last_reason = reason = str(error)
                logger.error("the engine core cannot be restarted: %s", reason, exc_info=error)
                continue
            self.status = "ready"
            self._heartbeat.heard()
            if self.listener is not None:
                self.listener.restarted(self.info)
            return
        logger.critical("the engine core keeps failing: it is not restarted again")
        self._give_up(reason)

    def _loop_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _delay_s(self) -> float:
        delay = self.FIRST_DELAY_S * 2.0 ** (self._quick_failures - 1)
        return min(delay, self.LAST_DELAY_S)
