"""Opens the tiers below the device for a loaded model (`--kv-host-memory`, `--kv-disk`,
`--kv-connector`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b

from vllmx_core.backend import HasMovableCache, HasPages, LoadedModel, MovableCache
from vllmx_core.config import KV_TIERS, EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.kv_connector import KVConnector
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import KVConnectorSpec

from vllmx_engine.core.disk_store import DiskStore, open_store
from vllmx_engine.core.remote_store import RemoteStore
from vllmx_engine.core.scheduler import Scheduler
from vllmx_engine.core.tiered_prefixes import TieredPrefixes
from vllmx_engine.core.tiers import Tiers

Connect = Callable[[str], KVConnector]
"""Makes the connector of a namespace."""


def connector_of(wanted: str, registry: Registry) -> Connect:
    """The store that `--kv-connector` names. Raises PluginError for a name that no plugin has."""
    name, _, address = wanted.partition(":")
    return partial(registry.get(KVConnectorSpec, name).load(), address)


def open_tiers(
    scheduler: Scheduler, model: LoadedModel, config: EngineConfig, connect: Connect | None = None
) -> TieredPrefixes:
    """Opens the tiers that were asked for. Raises ConfigError for flags that this model or backend
    cannot honour."""
    movable = _movable(model, config)
    store: DiskStore | None = None
    remote: RemoteStore | None = None
    known = repr(scheduler.cache.identity).encode()
    if connect is not None:
        remote = RemoteStore(connect(blake2b(known, digest_size=16).hexdigest()))
        remote = remote if remote.open() else None
    if remote is not None:
        known += remote.key  # names depend on it
    if config.kv_disk is not None:
        identity = blake2b(known, digest_size=32).digest()
        store = open_store(config.kv_disk, identity, config.kv_disk_size)
    for one in (store, remote):
        if one is not None:
            scheduler.cache.key = one.key
    return TieredPrefixes(
        Tiers(store, config.kv_host_memory, remote),
        movable,
        scheduler.prefixes,
        scheduler.cache,
        scheduler.pool,
        None if scheduler.states is None else scheduler.states.pool,
        scheduler.cost,
    )


def _movable(model: LoadedModel, config: EngineConfig) -> MovableCache:
    flag = next((one for one in KV_TIERS if getattr(config, one)), "role")
    name = "--prefill-replicas or --role" if flag == "role" else "--" + flag.replace("_", "-")
    if not config.enable_prefix_caching:
        raise ConfigError(
            f"{name}: its blocks are those of the prefix cache, which is off: leave"
            " --no-enable-prefix-caching out",
            param=flag,
        )
    if not isinstance(model, HasMovableCache):
        raise ConfigError(
            f"{name}: the KV cache of {model.info.backend} on {model.info.device} cannot be copied"
            " out: run it in one process, on the backend cpu, cuda, metal, torch or numpy",
            param=flag,
        )
    shares_pages = config.speculate.startswith("layers:") and isinstance(model, HasPages)
    if config.drafts_by_model and not shares_pages:
        raise ConfigError(
            f"{name} keeps no blocks of a drafter with pages of its own, as --speculate"
            f" {config.speculate} has here: choose ngram, suffix or off",
            param=flag,
        )
    movable = model.movable_cache
    if movable.states is None and model.info.num_state_slots:
        raise ConfigError(
            f"{name}: this model keeps caches of transformers, which cannot be copied out: leave"
            f" {name} out",
            param=flag,
        )
    if movable.in_host_memory and config.kv_host_memory:
        raise ConfigError(
            f"--kv-host-memory: the KV cache of {model.info.backend} is in the host's memory"
            " already: give it more blocks by --kv-cache-memory-bytes",
            param="kv_host_memory",
        )
    return movable
