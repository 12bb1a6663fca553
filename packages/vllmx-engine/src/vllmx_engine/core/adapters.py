"""The LoRA adapters of a core: those in host memory by name, and those in the model's slots."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.adapters import Adapter, AdapterRoom, AdapterTargets, LowRank
from vllmx_core.backend import HasAdapters, LoadedModel
from vllmx_core.config import EngineConfig
from vllmx_core.config_values import json_object
from vllmx_core.errors import AdapterError, ConfigError, ModelNotFoundError, shown
from vllmx_core.model import Model
from vllmx_core.plugins.checkpoint import open_adapter
from vllmx_core.plugins.registry import Registry
from vllmx_core.recorded.passes import with_adapters
from vllmx_core.recorded.recording import record
from vllmx_core.records import Record

from vllmx_engine.wire.messages import AdapterInfo

logger = logging.getLogger("vllmx.adapters")
MIN_RANK = 16
"""The rank that there is room for if no adapter was named at the start."""
MAX_NAME = 256


class HeldAdapter(Record, eq=False):
    """An adapter in host memory. Requests that run keep theirs, whatever becomes of its name and
    its files."""

    info: AdapterInfo
    adapter: Adapter
    digest: str
    """Equal for equal adapters: the part of prefix-cache roots."""

    @classmethod
    def of(cls, name: str, path: str, adapter: Adapter) -> HeldAdapter:
        """Names an adapter that was read."""
        digest = _digest(adapter)
        return cls(AdapterInfo(name, path, adapter.rank, digest), adapter, digest)


def _digest(adapter: Adapter) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, change in sorted(adapter.modules.items()):
        found.update(f"{name} {change.a.shape} {change.b.shape} ".encode())
        found.update(np.ascontiguousarray(change.a).data)
        found.update(np.ascontiguousarray(change.b).data)
    return found.hexdigest()


class AdapterFiles(Record):
    """Reads adapters for one base model, on any thread."""

    registry: Registry
    config: Mapping[str, Any]
    """The base model's."""
    targets: AdapterTargets

    @classmethod
    def of(cls, registry: Registry, config: Mapping[str, Any], model: Model) -> AdapterFiles:
        """Finds what adapters can change of a model. Raises ConfigError where that is nothing."""
        recording = record(model, 1)
        targets = AdapterTargets(recording.specs, with_adapters(recording.steps).ops)
        if not targets.names:
            raise ConfigError(
                "adapters need vllmx's own code of a model, another runs this one: leave"
                " --enable-lora and --lora out",
                param="enable_lora",
            )
        return cls(registry, config, targets)

    def read(self, name: str, path: str) -> HeldAdapter:
        """Reads an adapter and checks it against the model. Raises AdapterError,
        ModelNotFoundError or WeightFormatError."""
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise AdapterError(
                f"{shown(name)} cannot name an adapter: a name has 1 to {MAX_NAME} printable"
                " characters"
            )
        adapter = open_adapter(self.registry, Path(path), self.config)
        self.targets.check(adapter)
        return HeldAdapter.of(name, path, adapter)

    def at_start(self, config: EngineConfig) -> StartAdapters:
        """Reads the adapters of `--lora NAME=PATH`, and those of the base model (`--lora PATH`,
        `--lora-scaled PATH:SCALE`) as one. Raises as `read`, and ConfigError."""
        named, of_base = list[HeldAdapter](), list[tuple[HeldAdapter, float]]()
        for text in config.lora:
            name, path = _named(text)
            if name == config.name:
                raise ConfigError(f"--lora {name}=...: the model has that name", param="lora")
            if name:
                named.append(self.read(name, path))
            else:
                of_base += [(self.read(Path(one).stem, one), 1.0) for one in text.split(",")]
        for text in chain.from_iterable(one.split(",") for one in config.lora_scaled):
            path, found, scale = text.rpartition(":")
            if not found or not _is_number(scale):
                raise ConfigError(
                    f"--lora-scaled is PATH:SCALE, got {shown(text)}", param="lora_scaled"
                )
            of_base.append((self.read(Path(path).stem, path), float(scale)))
        base = _joined(of_base)
        room = _room(config, named if base is None else [*named, base])
        return StartAdapters(self, room, config.max_cpu_loras, named, base)


def _named(text: str) -> tuple[str, str]:
    """Name and path of NAME=PATH, or of vLLM's JSON object; an empty name: there is a path alone.
    Raises ConfigError."""
    if text.startswith("{"):
        values = json_object(text, "lora", '{"name": "sql", "path": "adapters/sql"}')
        if not isinstance(values.get("name"), str) or not isinstance(values.get("path"), str):
            raise ConfigError(f"--lora {shown(text)} has no name and path", param="lora")
        return values["name"], values["path"]
    name, found, path = text.partition("=")
    return ("", text) if not found or Path(text).exists() else (name, path)


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _joined(adapters: Sequence[tuple[HeldAdapter, float]]) -> HeldAdapter | None:
    """The sum of adapters with their factors, one below the other."""
    if not adapters:
        return None
    modules: dict[str, LowRank] = {}
    for held, scale in adapters:
        for name, change in held.adapter.modules.items():
            a, b = change.a, change.b * np.float32(scale)
            if (known := modules.get(name)) is not None:
                a, b = np.concatenate([known.a, a]), np.concatenate([known.b, b], axis=1)
            modules[name] = LowRank(a, b)
    paths = ", ".join(held.info.path for held, _ in adapters)
    return HeldAdapter.of("", paths, Adapter(modules))


def _room(config: EngineConfig, adapters: Sequence[HeldAdapter]) -> AdapterRoom:
    """The slots of a model and their rank. Raises ConfigError for adapters of a greater one."""
    greatest = max((held.info.rank for held in adapters), default=0)
    rank = config.max_lora_rank or max(MIN_RANK, greatest)
    if greatest > rank:
        raise ConfigError(
            f"an adapter has rank {greatest}, --max-lora-rank is {rank}: raise it to {greatest}",
            param="max_lora_rank",
        )
    return AdapterRoom(config.max_loras, rank)


class StartAdapters(Record):
    """The adapters that a model is started with, and its room for more."""

    files: AdapterFiles
    room: AdapterRoom
    most: int
    """Adapters that are kept in host memory."""
    named: Sequence[HeldAdapter] = ()
    of_base: HeldAdapter | None = None
    """The adapter of requests that name none."""


class AdapterPool:
    """Adapters by name, and the slots that running rows use. The core's thread owns it.

    Attributes:
        files: reads more of them.
    """

    def __init__(self, model: LoadedModel, start: StartAdapters) -> None:
        assert isinstance(model, HasAdapters), "the model was loaded with room for adapters"
        self._model, self.files, room = model, start.files, start.room
        self._rank, self._most, self._of_base = room.rank, start.most, start.of_base
        self._named: dict[str, HeldAdapter] = {}
        self._slots: list[HeldAdapter | None] = [None] * room.slots
        self._users = [0] * room.slots
        self._used = [0] * room.slots
        """The count of such events at which each slot was given to a row last."""
        self._clock = 0
        for held in start.named:
            self.add(held)

    @property
    def infos(self) -> list[AdapterInfo]:
        """All adapters that requests may name."""
        return [held.info for held in self._named.values()]

    def find(self, name: str) -> HeldAdapter | None:
        """The adapter of a request. Raises ModelNotFoundError for an unknown name."""
        if not name:
            return self._of_base
        if name not in self._named:
            raise ModelNotFoundError(
                f"adapter {shown(name)} is not loaded: load it with /v1/load_lora_adapter or --lora"
                " NAME=PATH",
                param="model",
            )
        return self._named[name]

    def add(self, held: HeldAdapter) -> None:
        """Gives an adapter its name; later requests of that name use it in place of another.
        Raises AdapterError for too great a rank, and where too many are loaded."""
        name, rank = held.info.name, held.info.rank
        if rank > self._rank:
            raise AdapterError(
                f"adapter {shown(name)} has rank {rank}, there is room for {self._rank}: start"
                f" with --max-lora-rank {rank}"
            )
        if name not in self._named and len(self._named) >= self._most:
            raise AdapterError(
                f"{len(self._named)} adapters are loaded, as many as --max-cpu-loras lets: unload"
                " one, or raise it"
            )
        self._named[name] = held
        logger.info("adapter=%s path=%s rank=%d", name, held.info.path, rank)

    def remove(self, name: str) -> None:
        """Forgets a name; requests in flight keep their adapter. Raises ModelNotFoundError."""
        held = self.find(name)
        if not name or held is None:
            raise ModelNotFoundError("name the adapter to unload", param="lora_name")
        del self._named[name]
        for slot, found in enumerate(self._slots):
            if found is held and not self._users[slot]:
                self._slots[slot] = None
                self._model.set_adapter(slot, None)

    def has_slot(self, held: HeldAdapter | None) -> bool:
        """Makes sure that an adapter is in a slot: in that of the one which no row has used for
        longest, if necessary. False while rows use all."""
        if held is None or held in self._slots:
            return True
        free = [slot for slot, users in enumerate(self._users) if not users]
        if not free:
            return False
        slot = min(free, key=lambda one: (self._slots[one] is not None, self._used[one]))
        self._slots[slot] = None  # whatever happens now
        self._model.set_adapter(slot, held.adapter)
        self._slots[slot] = held
        return True

    def take(self, held: HeldAdapter) -> int:
        """The slot of an adapter, for one more row, after `has_slot`."""
        slot = self._slots.index(held)
        self._users[slot] += 1
        self._clock += 1
        self._used[slot] = self._clock
        return slot

    def leave(self, slot: int) -> None:
        """One row less uses a slot."""
        self._users[slot] -= 1


def no_room() -> ConfigError:
    """The error for adapters of a model that takes none."""
    return ConfigError(
        "the model was loaded without room for adapters: start with --enable-lora",
        param="enable_lora",
    )
