"""The models of a server in a process that answers requests."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from vllmx_core.errors import ModelNotFoundError, listing, shown
from vllmx_core.plugins.registry import load_registry
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core_start import CoreStart
from vllmx_engine.replicas.start import attach_frontend
from vllmx_engine.wire.ipc import Start

from vllmx_server.errors import OverloadedError
from vllmx_server.generating.pooling import pooler_of
from vllmx_server.generating.served import ModelHost, Served, cache_labels, fingerprint
from vllmx_server.host.models.config import ModelConfig
from vllmx_server.host.models.host import Attachment
from vllmx_server.watch.metrics import Metrics


async def attach(core: Start, paths: Sequence[str]) -> CoreStart:
    """Begins to connect to a core, or to all its replicas, by the paths of their sockets. Loads all
    plugins: a core has only those that load models, not those of formats of answers."""
    registry = await asyncio.to_thread(load_registry)
    if core.config.prefer:
        registry.prefer(core.config.prefer)
    found = FoundModel(
        core.config, Path(core.path), registry, progress=False, digest_key=core.digest_key
    )
    return CoreStart(found, asyncio.ensure_future(attach_frontend(found, paths)))


_LOOK_S = 0.02
_GRACE_S = 1.0
"""Seconds that a request may take from its arrival to the engine."""


class Host(ModelHost, Protocol):
    """Loads and unloads models, here or in another process."""

    async def load(self, name: str) -> Attachment: ...

    async def wake_idle(self) -> bool: ...


class _Entry:
    """A model other than the default one."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.served: Served | None = None
        self.metrics: Metrics | None = None
        """Kept while it is unloaded: counters never fall."""
        self.opening: asyncio.Task[Served] | None = None
        self.used_s = 0.0

    @property
    def is_open(self) -> bool:
        return self.served is not None and not self.served.llm.errored


class Models:
    """Finds the `Served` of each model.

    Args:
        default: the model of requests that name none, which is never unloaded.
        models: the configurations of all, the default's first.
        wait_s: seconds that a request waits for a model that loads.

    Attributes:
        host: loads and unloads models; set before the first request.
    """

    def __init__(self, default: Served, models: Sequence[ModelConfig], wait_s: float) -> None:
        self.default = default
        self.host: Host
        self._wait_s = wait_s
        self._configs = models
        self._entries = {model.name: _Entry(model) for model in models[1:]}
        self._used_s = time.monotonic()
        self._left = False
        self._names = {alias: model.name for model in models for alias in model.aliases}

    def name_of(self, name: str | None) -> str:
        """A model's own name. None: the default's. Raises ModelNotFoundError."""
        default = self._configs[0].name
        own = default if name is None else self._names.get(name) or self._adapted(name) or name
        if own != default and own not in self._entries:
            if self.default.takes_any_model and not self._entries:
                return default
            served = listing(
                [each for model in self._configs for each in (model.name, *model.aliases)]
            )
            raise ModelNotFoundError(
                f"model {shown(name)} is not served here; served: {served}", param="model"
            )
        return own

    def _adapted(self, name: str) -> str | None:
        """The open model that has an adapter of this name."""
        entries = (entry.served for entry in self._entries.values())
        opened = (self.default, *(served for served in entries if served is not None))
        found = (each.llm.config.name for each in opened if each.adapter_of(name))
        return next(found, None)

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other names of a model."""
        return tuple(alias for alias, own in self._names.items() if own == name)

    @property
    def sleeps_idle(self) -> bool:
        """The default model sleeps because it was idle: the next request wakes it."""
        return self._left and self.default.llm.is_asleep

    def is_open(self, name: str) -> bool:
        """True if requests for a model need not wait."""
        entry = self._entries.get(name)
        return not self.sleeps_idle if entry is None else entry.is_open

    async def served(self, name: str) -> Served:
        """The `Served` of a model, by its own name. Waits while it loads. Raises the errors of
        loading, and OverloadedError when that takes too long."""
        entry = self._entries.get(name)
        if entry is None:
            await self._wake_idle()
            return self.default
        entry.used_s = time.monotonic()
        if entry.is_open and entry.served is not None:
            return entry.served
        if entry.opening is None:
            entry.opening = asyncio.ensure_future(self._open(entry))
            entry.opening.add_done_callback(lambda task: _closed(entry, task))
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(entry.opening)
        except TimeoutError:
            raise self._too_slow(name) from None

    async def leave(self, name: str) -> bool:
        """Lets go of a model's core. False while requests need it."""
        if name not in self._entries:
            return self._leave_default()
        entry = self._entries[name]
        served = entry.served
        if entry.opening is not None or time.monotonic() - entry.used_s < _GRACE_S:
            return False
        if served is None:
            return True
        if served.llm.num_in_flight:
            return False
        entry.served = None
        served.metrics.is_open = False
        await served.llm.shutdown()
        return True

    async def close(self) -> None:
        """Leaves all cores; what is in flight is aborted."""
        for entry in self._entries.values():
            if entry.opening is not None:
                entry.opening.cancel()
                await asyncio.wait((entry.opening,))
            if entry.served is not None:
                await entry.served.llm.shutdown()

    async def loaded(self) -> list[Served]:
        """All models that are loaded, whichever process had them loaded."""
        names = [card.name for card in await self.host.cards() if card.state == "loaded"]
        default = [] if self.sleeps_idle else [self.default]
        return default + [await self.served(name) for name in names]

    def metrics(self) -> list[Metrics]:
        """The metrics of all models that were ever open here."""
        kept = [entry.metrics for entry in self._entries.values() if entry.metrics is not None]
        return [self.default.metrics, *kept]

    def _leave_default(self) -> bool:
        idle_s = max(_GRACE_S, self.default.config.idle_unload_s)
        if self.default.llm.num_in_flight:
            self._used_s = time.monotonic()
        self._left = time.monotonic() - self._used_s >= idle_s
        return self._left

    async def _wake_idle(self) -> None:
        """Wakes the default model if it slept because it was idle."""
        self._used_s = time.monotonic()
        if not self.sleeps_idle:
            self._left = False
            return
        try:
            async with asyncio.timeout(self._wait_s):
                if await asyncio.shield(asyncio.ensure_future(self.host.wake_idle())):
                    while self.default.llm.is_asleep:  # where another process has the core
                        await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise self._too_slow(self._configs[0].name) from None

    def _too_slow(self, name: str) -> OverloadedError:
        return OverloadedError(
            f"model {shown(name)} is being loaded, which takes longer than {self._wait_s:g} s:"
            " try again in a moment"
        )

    async def _open(self, entry: _Entry) -> Served:
        attachment = await self.host.load(entry.config.name)
        async with await attach(attachment.core, attachment.paths) as core:
            llm = await AsyncLLM.over(core)
        previous, entry.served = entry.served, self._copy(entry, llm)
        if previous is not None:
            await previous.llm.shutdown()
        return entry.served

    def _copy(self, entry: _Entry, llm: AsyncLLM) -> Served:
        """The `Served` of another model, which shares all but the model with the default's."""
        default = self.default
        llm.share(default.sharing.sequences(entry.config.name), default.sharing.texts)
        llm.divide(lambda: default.keys.has_several)
        if entry.metrics is None:
            entry.metrics = Metrics(entry.config.name, lambda: llm.stats, cache_labels(llm))
        else:
            entry.metrics.follow(lambda: llm.stats, cache_labels(llm))
            entry.metrics.is_open = True
        llm.grammars.observer = entry.metrics
        served = copy.copy(default)
        served.llm, served.metrics, served.pooler = llm, entry.metrics, pooler_of(llm)
        served.fingerprint = fingerprint(llm.info)
        return served


def _closed(entry: _Entry, task: asyncio.Task[Served]) -> None:
    entry.opening = None
    if not task.cancelled():
        task.exception()  # raised to those that waited
