"""Keeps the engine cores of several models: loads them on demand, and ends them when they are idle
or memory is short.

It runs in the process that answers requests, or with several of them in their supervisor. Processes
that answer requests connect to a core by the path of its listening socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
from vllmx_core.errors import (
    CapacityError,
    InvalidRequestError,
    ModelNotFoundError,
    VllmxError,
    shown,
)
from vllmx_core.system.memory import format_bytes
from vllmx_engine.core.found_model import FoundModel, find_model
from vllmx_engine.link.frontend import Listener
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.supervisor import CoreListener
from vllmx_engine.replicas.start import Cores, start_frontend
from vllmx_engine.wire.ipc import Start
from vllmx_engine.wire.messages import CoreInfo, CoreStats

from vllmx_server.errors import OverloadedError
from vllmx_server.generating.served import Modality, ModelInfo, State, modalities_of
from vllmx_server.host.models.config import ModelConfig, engine_of, part_bytes
from vllmx_server.host.models.device_memory import DeviceMemory, FreeMemory

logger = logging.getLogger("vllmx.supervisor")

_WEIGHTS = (".safetensors", ".gguf")
_LOOK_S = 0.5


class Attachment(msgspec.Struct, frozen=True):
    """A loaded core, and the paths of the sockets of its replicas."""

    core: Start
    paths: list[str]


class FirstCore(Protocol):
    """The core of the first model, whose start and end are not up to the host."""

    @property
    def is_asleep(self) -> bool: ...

    async def sleep(self, level: int = 2) -> None: ...

    async def wake(self) -> None: ...


@dataclass
class _Hosted:
    """One model, and its core while there is one."""

    config: ModelConfig
    state: State = "unloaded"
    listeners: list[CoreListener] = field(default_factory=list)
    core: Cores | None = None
    loading: asyncio.Task[Attachment] | None = None
    used_s: float = field(default_factory=time.monotonic)
    is_busy: bool = False
    num_bytes: int | None = None
    backend: str | None = None
    """The backend of the last load."""
    device: str = ""
    """`FreeMemory.device` of the running core."""
    max_model_len: int | None = None
    modalities: list[Modality] | None = None
    error: str | None = None

    def card(self) -> ModelInfo:
        return ModelInfo(
            name=self.config.name,
            aliases=self.config.aliases,
            root=self.config.engine.model,
            state=self.state,
            num_bytes=self.num_bytes,
            max_model_len=self.max_model_len,
            modalities=self.modalities,
            error=self.error,
        )

    def note(self, stats: CoreStats) -> None:
        """Takes the core's reports of its work: at its begin, during it and at its end."""
        self.is_busy = bool(stats.num_running or stats.num_waiting)
        self.used_s = time.monotonic()


@dataclass
class _Device:
    """The memory of one device."""

    free_bytes: int
    """Free before any model was loaded; 0: unknown."""
    first_bytes: int = 0
    """The bytes of the first model, which the host does not unload."""


class CoreHost:
    """Loads and ends the cores of models.

    Args:
        models: all but the first.
        idle_unload_s: idle time after which a model is unloaded; 0: never. The first model sleeps
            instead, and keeps its memory.
        leave: disconnects all processes from a core; False if one still needs it.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        idle_unload_s: float,
        leave: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._hosted = {model.name: _Hosted(model) for model in models}
        self._idle_unload_s = idle_unload_s
        self._leave = leave
        self._first: CoreInfo | None = None
        self._first_core: FirstCore | None = None
        self._first_name = ""
        self._idle_lock = asyncio.Lock()
        self._sleeps_idle = False
        """The first model sleeps because it was idle."""
        self._memory = DeviceMemory()
        self._devices: dict[str, _Device] = {}
        self._room = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        if idle_unload_s:
            self._looking = asyncio.ensure_future(self._unload_idle())

    def first_took(self, info: CoreInfo) -> None:
        """Takes the free memory before the first model was loaded, and its size. Call before any
        other is loaded."""
        self._first = info

    def watch_first(self, name: str, core: FirstCore) -> None:
        """Lets the first model sleep while it is idle, until `wake_idle`."""
        self._first_name, self._first_core = name, core

    async def wake_idle(self) -> bool:
        """Wakes the first model if it sleeps because it was idle. False if an operator put it to
        sleep. Raises the errors of waking."""
        async with self._idle_lock:
            if self._first_core is None or not self._sleeps_idle:
                return False
            await self._first_core.wake()
            self._sleeps_idle = False
            return True

    async def cards(self) -> list[ModelInfo]:
        return [hosted.card() for hosted in self._hosted.values()]

    async def load(self, name: str) -> Attachment:
        """A model's core, which is loaded first if necessary. Raises the errors of loading, and
        OverloadedError if models that are in use leave no room for it."""
        hosted = self._find(name)
        hosted.used_s = time.monotonic()
        if hosted.core is not None and hosted.core.status == "dead":
            await self._end(hosted)
        if hosted.loading is None:
            hosted.loading = asyncio.ensure_future(self._load(hosted))
            hosted.loading.add_done_callback(_retrieved)
        return await asyncio.shield(hosted.loading)

    async def unload(self, name: str) -> None:
        """Ends a model's core. Raises InvalidRequestError while it is in use."""
        hosted = self._find(name)
        if hosted.core is not None and not await self._let_go(hosted):
            raise InvalidRequestError(
                f"model {shown(name)} is in use: unload it when its requests have ended",
                param="model",
            )

    async def close(self) -> None:
        """Ends all cores."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))
        for hosted in self._hosted.values():
            if hosted.loading is not None and not hosted.loading.done():
                hosted.loading.cancel()
                await asyncio.wait((hosted.loading,))
        await asyncio.gather(*(self._end(hosted) for hosted in self._hosted.values()))

    # --- inside -----------------------------------------------------------------------------------
    def _find(self, name: str) -> _Hosted:
        found = self._hosted.get(name)
        if found is None:
            raise ModelNotFoundError(f"model {shown(name)} is not one that is loaded on demand")
        return found

    async def _load(self, hosted: _Hosted) -> Attachment:
        hosted.state, hosted.error = "loading", None
        try:
            async with self._room:  # one at a time: each takes part of the memory that is left
                found = await self._load_making_room(hosted)
        except BaseException as error:
            hosted.state, hosted.loading = "failed", None
            hosted.error = error.message if isinstance(error, VllmxError) else "internal error"
            if isinstance(error, VllmxError):
                logger.error("model %s cannot be loaded: %s", hosted.config.name, error.message)
            raise
        hosted.state, hosted.used_s = "loaded", time.monotonic()
        return found

    async def _load_making_room(self, hosted: _Hosted) -> Attachment:
        found = await asyncio.to_thread(find_model, hosted.config.engine, None)
        free = await self._free(found, hosted)
        known = self._devices.get(free.device)
        engine = engine_of(hosted.config, 0 if known is None else known.free_bytes)
        found = msgspec.structs.replace(found, config=engine)
        needed = hosted.num_bytes
        if needed is None:
            needed = await asyncio.to_thread(_weight_bytes, found.path)
            most = engine.memory_bytes
            if most is not None and needed > most:
                files, part = format_bytes(needed), format_bytes(most)
                text = f"the weights take {files}, more than {part}"
                raise _small_part(hosted.config, CapacityError(text))
        while needed > free.num_bytes and await self._evict(free.device):
            free = await self._free(found, hosted)
        core, listeners = await self._started(hosted, found, free.device)
        hosted.core, hosted.listeners = core, listeners
        core.listener = Listener(
            outputs=lambda outputs: None,
            stats=hosted.note,
            lost=lambda error: None,
            restarted=lambda info: None,
            dead=lambda: None,
        )
        paths = [str(listener.path) for listener in listeners]
        return Attachment(ProcessFrontend(found).start_message, paths)

    async def _started(
        self, hosted: _Hosted, found: FoundModel, device: str
    ) -> tuple[Cores, list[CoreListener]]:
        """Starts the core, and unloads others until it has the memory that it needs."""
        listeners = [CoreListener() for _ in range(found.config.replicas)]
        try:
            while True:
                try:
                    core = await start_frontend(found, listeners)
                    break
                except CapacityError as error:
                    if await self._has_its_part(hosted, found):
                        raise _small_part(hosted.config, error) from error
                    if not await self._evict(device):
                        raise _no_room(error) from error
        except BaseException:
            _close(listeners)
            raise
        try:
            await self._note(hosted, found, core.info)
        except BaseException:
            _close(listeners)
            await core.close()
            raise
        return core, listeners

    async def _note(self, hosted: _Hosted, found: FoundModel, info: CoreInfo) -> None:
        """Keeps the facts of a core that has started."""
        hosted.num_bytes = info.weight_bytes + info.kv_cache_bytes
        hosted.max_model_len = info.max_model_len
        hosted.modalities = modalities_of(info)
        hosted.backend = info.backend
        hosted.device = await self._memory.device(found.registry, info.backend)
        if hosted.device not in self._devices:
            self._devices[hosted.device] = _Device(info.free_bytes)

    async def _free(self, found: FoundModel, hosted: _Hosted) -> FreeMemory:
        """The memory that loaded models leave on the device that a model goes to. Free memory as
        the system reports it is not enough: pages of a KV cache are taken when they are written.
        """
        if self._first is not None:
            first = self._first
            size = first.weight_bytes + first.kv_cache_bytes
            device = await self._memory.device(found.registry, first.backend)
            self._devices[device] = _Device(first.free_bytes, size)
            self._first = None  # only now: the awaiting task may be cancelled
        backend = hosted.backend or hosted.config.engine.backend
        free = await self._memory.free(found.registry, backend)
        known = self._devices.get(free.device)
        if known is None or not known.free_bytes:
            return free
        taken = sum(each.num_bytes or 0 for each in self._loaded(free.device))
        left = known.free_bytes - known.first_bytes - taken
        return FreeMemory(free.device, min(free.num_bytes, left))

    async def _has_its_part(self, hosted: _Hosted, found: FoundModel) -> bool:
        """True if a model may not take more memory even if others are unloaded."""
        if hosted.config.memory_part is None:
            return False
        free = await self._free(found, hosted)
        known = self._devices.get(free.device)
        if known is None or not known.free_bytes:
            return False
        return part_bytes(hosted.config, known.free_bytes) <= free.num_bytes

    def _loaded(self, device: str) -> list[_Hosted]:
        """Models that have memory of a device."""
        hosted = self._hosted.values()
        return [each for each in hosted if each.core is not None and each.device == device]

    async def _evict(self, device: str) -> bool:
        """Unloads the least recently used model of a device. False if all are in use."""
        for hosted in sorted(self._loaded(device), key=lambda each: each.used_s):
            if await self._let_go(hosted):
                size = format_bytes(hosted.num_bytes or 0)
                logger.info("model %s makes room for another: %s", hosted.config.name, size)
                return True
        return False

    async def _let_go(self, hosted: _Hosted) -> bool:
        if hosted.is_busy or not await self._leave(hosted.config.name):
            return False
        await self._end(hosted)
        logger.info("model %s is unloaded", hosted.config.name)
        return True

    async def _end(self, hosted: _Hosted) -> None:
        core, listeners = hosted.core, hosted.listeners
        hosted.core = hosted.loading = None
        hosted.listeners = []
        hosted.is_busy = False
        if hosted.state == "loaded":
            hosted.state = "unloaded"
        _close(listeners)
        if core is not None:
            await core.close()

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S, self._idle_unload_s))
            limit_s = time.monotonic() - self._idle_unload_s
            for hosted in self._hosted.values():
                if hosted.state == "loaded" and hosted.used_s < limit_s and not hosted.is_busy:
                    await self._let_go(hosted)
            await self._doze()

    async def _doze(self) -> None:
        """Puts the first model to sleep if it is idle in all processes."""
        core = self._first_core
        if core is None or core.is_asleep:
            return
        self._sleeps_idle = False
        if not await self._leave(self._first_name):
            return
        async with self._idle_lock:
            try:
                await core.sleep()
            except VllmxError:
                return  # it is starting, or a request has come
            self._sleeps_idle = True
        logger.info("model %s sleeps: nobody asks for it", self._first_name)


def _close(listeners: Sequence[CoreListener]) -> None:
    for listener in listeners:
        listener.close()


def _small_part(config: ModelConfig, error: CapacityError) -> CapacityError:
    part = "no more" if config.memory_part is None else f"{config.memory_part:.2f} of it"
    return CapacityError(
        f"{error.message} (of the memory that was free at the start model {config.name} may take"
        f" {part}: raise its memory_fraction or memory_bytes)"
    )


def _no_room(error: CapacityError) -> OverloadedError:
    return OverloadedError(
        f"{error.message} (the models that are loaded are all in use: try again later, or give each"
        " a smaller part of the memory, by memory_fraction or kv_cache_memory_bytes)"
    )


def _weight_bytes(path: Path) -> int:
    """An estimate of a model's bytes, by its files."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.suffix in _WEIGHTS)


def _retrieved(task: asyncio.Task[Attachment]) -> None:
    """Retrieves the error of a task, which was logged: nobody may be awaiting it."""
    if not task.cancelled():
        task.exception()
