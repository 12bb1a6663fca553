"""Starts the replicas of a model here, each with its part of cores, devices and memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.records import Record
from vllmx_core.system.processors import available_processors, divided_processors

from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link.attached_frontend import AttachedFrontend
from vllmx_engine.link.frontend import Frontend, Listener
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.supervisor import CoreListener
from vllmx_engine.replicas.frontend import ReplicaFrontend, StartChild
from vllmx_engine.replicas.remote import attach_remote
from vllmx_engine.wire.messages import CoreInfo

_DEVICES = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"


Cores = ProcessFrontend | ReplicaFrontend


class Place(Record):
    """The part of the machine that one replica runs on."""

    config: EngineConfig
    cores: tuple[int, ...] = ()
    devices: str = ""
    """The value of CUDA_VISIBLE_DEVICES; empty: that of this process."""


def check_replicas(config: EngineConfig, *, in_process: bool = False) -> None:
    """Raises ConfigError for replicas that cannot be, whatever the model is."""
    if config.replica_hosts is not None:
        _check_hosts(config)
        return
    if config.prefill_replicas >= config.replicas:
        raise ConfigError(
            f"--prefill-replicas {config.prefill_replicas} of --replicas {config.replicas} leaves"
            " none that generates: set --replicas higher",
            param="prefill_replicas",
        )
    least, most = config.min_replicas, config.replicas
    if least is not None and not config.prefill_replicas < least <= most:
        raise ConfigError(
            f"--min-replicas {least} must be above --prefill-replicas {config.prefill_replicas} and"
            f" at most --max-replicas {most}",
            param="min_replicas",
        )
    if most == 1:
        return
    if in_process:
        raise ConfigError(
            f"--replicas {config.replicas}: a core in this process has no replicas: leave it out,"
            " or use `vllmx serve` or AsyncLLM",
            param="replicas",
        )
    if config.rank_hosts is not None:
        raise ConfigError(
            "--rank-hosts serves one core: leave it or --replicas out", param="rank_hosts"
        )
    if config.kv_connector is not None:
        raise ConfigError(
            "--kv-connector: a shared store names blocks by a key of its own, and replicas by"
            " theirs: use --kv-disk, or start one server for each core",
            param="kv_connector",
        )


def _check_hosts(config: EngineConfig) -> None:
    if config.prefill_replicas:
        raise ConfigError(
            "--prefill-replicas is for replicas that this server starts: with --replica-hosts,"
            " start each `vllmx core` with --role prefill or --role decode",
            param="prefill_replicas",
        )
    if config.min_replicas is not None and not str(config.replica_hosts).startswith("@"):
        raise ConfigError(
            f"--min-replicas {config.min_replicas}: nobody here starts the cores of --replica-hosts"
            f" {config.replica_hosts}: leave it out, or name a @FILE that another program keeps",
            param="min_replicas",
        )


def places(found: FoundModel) -> list[Place]:
    """The places of all replicas. Raises ConfigError where there are too few cores or devices."""
    config, count = found.config, found.config.replicas
    spec, _ = found.registry.choose_backend(config.backend)
    if spec.has_own_devices():
        own = _visible_devices()
        each = config.num_ranks
        if len(own) < count * each:
            raise ConfigError(
                f"--replicas {count} need {count * each} GPUs, {len(own)} are visible: choose at"
                f" most {max(1, len(own) // each)}",
                param="replicas",
            )
        devices = [",".join(own[number * each : (number + 1) * each]) for number in range(count)]
        return [Place(config.of_replica(number), devices=one) for number, one in enumerate(devices)]
    most = available_processors()
    if count > most and config.num_threads is None and spec.name != "numpy":
        raise ConfigError(
            f"--replicas {count} is more than the {most} cores that there are: choose at most"
            f" {most}, or set --num-threads {count} to share cores",
            param="replicas",
        )
    threads, memory = config.num_threads, config.memory_bytes
    cores = divided_processors(count)
    if hasattr(os, "sched_getaffinity") and most < len(os.sched_getaffinity(0)):
        cores = [()] * count  # a quota: each container would choose the same cores
    if threads is None and not cores[0]:
        threads = most
    mine = replace(
        config,
        num_threads=None if threads is None else max(1, threads // count),
        memory_fraction=config.memory_fraction / count,
        memory_bytes=None if memory is None else max(1, memory // count),
    )
    return [Place(mine.of_replica(number), part) for number, part in enumerate(cores)]


def _visible_devices() -> list[str]:
    known = os.environ.get(VISIBLE)
    if known is not None:
        return [one for one in known.split(",") if one]
    found = list(_DEVICES.iterdir()) if _DEVICES.is_dir() else []
    return [str(number) for number in range(len(found))]


async def start_frontend(found: FoundModel, listeners: Sequence[CoreListener] = ()) -> Cores:
    """Starts the core, or all replicas. Further clients connect to the listener of each. Raises
    the VllmxError that loading met."""
    if found.config.replica_hosts is not None:
        return await attach_remote(found)
    if found.config.replicas == 1:
        return await ProcessFrontend.start(found, listeners[0] if listeners else None)
    each, own = places(found), list[CoreListener]()
    least = found.config.min_replicas or len(each)
    begun: asyncio.Future[CoreInfo] = asyncio.get_running_loop().create_future()
    if found.config.prefill_replicas and not listeners:  # other replicas connect there
        listeners = own = [CoreListener() for _ in each]

    async def start(number: int, told: Listener) -> Frontend:
        place = each[number]
        mine = msgspec.structs.replace(found, config=place.config, progress=False)
        listener = listeners[number] if listeners else None
        made = ProcessFrontend(mine, listener, cores=place.cores, devices=place.devices)
        made.listener = told
        if number < least:
            await made.begin()
            if number == least - 1:
                begun.set_result(made.info)
        else:
            made.begin_asleep(await begun)
        made.keep_sizes(found.config.memory_fraction)
        return made

    try:
        made = await _replicas(found, len(each), start, [str(one.path) for one in listeners])
    except BaseException:
        close_all(own)
        raise
    made.at_end = partial(close_all, own)
    return made


def close_all(listeners: Iterable[CoreListener]) -> None:
    """Closes the sockets of replicas that have ended."""
    for listener in listeners:
        listener.close()


async def _replicas(
    found: FoundModel, count: int, start: StartChild, paths: Sequence[str]
) -> ReplicaFrontend:
    return await ReplicaFrontend.start(
        found.digest_key if found.config.enable_prefix_caching else b"",
        count,
        start,
        least_remote=found.config.remote_prefill_tokens,
        address=lambda number: paths[number] if paths else "",
        least=found.config.min_replicas,
    )


async def attach_frontend(found: FoundModel, paths: Sequence[str]) -> Frontend:
    """Reaches the core, or all replicas, that another process has started."""
    if found.config.replica_hosts is not None:
        return await attach_remote(found)
    if len(paths) == 1:
        return await AttachedFrontend.start(Path(paths[0]))

    async def start(number: int, told: Listener) -> Frontend:
        return await AttachedFrontend.start(Path(paths[number]), told)

    return await _replicas(found, len(paths), start, paths)
