"""What each replica runs on, and what is refused before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.llm import LLM
from vllmx_engine.replicas import start
from vllmx_engine.replicas.start import places


def always() -> None:
    """A backend that can run here."""


class Backends:
    @hookimpl
    def vllmx_backends(self) -> tuple[BackendSpec, ...]:
        where = f"{__name__}:always"
        return (
            BackendSpec("host", where, probe=where, priority=1),
            BackendSpec("device", where, probe=where, priority=2, own_devices=True),
        )


@pytest.fixture
def found() -> Callable[..., FoundModel]:
    registry = Registry()
    registry.add(Backends(), "test:backends")

    def make(**fields: Any) -> FoundModel:
        return FoundModel(EngineConfig(**fields), Path("m"), registry, progress=False)

    return make


def test_cores_and_memory_are_divided(
    found: Callable[..., FoundModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "available_processors", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(start, "divided_processors", lambda count: [(0, 1), (2, 3)][:count])
    both = places(found(backend="host", replicas=2, memory_bytes=100))
    assert [one.cores for one in both] == [(0, 1), (2, 3)]
    assert {one.config.memory_fraction for one in both} == {0.45}
    assert {(one.config.memory_bytes, one.config.num_threads) for one in both} == {(50, None)}
    with pytest.raises(
        ConfigError, match=r"more than the 4 cores .* choose at most 4, or set --nu"
    ):
        places(found(backend="host", replicas=5))
    monkeypatch.setattr(start, "divided_processors", lambda count: [()] * count)
    assert places(found(backend="host", replicas=5, num_threads=10))[4].config.num_threads == 2
    monkeypatch.setattr(start, "available_processors", lambda: 3)  # a quota
    quota = places(found(backend="host", replicas=2))
    assert [(one.cores, one.config.num_threads) for one in quota] == [((), 1)] * 2


def test_each_replica_has_its_own_gpus(
    found: Callable[..., FoundModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    wanted = {"backend": "device", "tensor_parallel_size": 2}
    both = places(found(replicas=2, **wanted))
    assert [one.devices for one in both] == ["4,5", "6,GPU-7"]
    assert both[0].config.memory_fraction == 0.9
    with pytest.raises(ConfigError, match="need 6 GPUs, 4 are visible: choose at most 2"):
        places(found(replicas=3, **wanted))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(start, "_DEVICES", Path("/no/such/folder"))
    with pytest.raises(ConfigError, match="need 2 GPUs, 0 are visible"):
        places(found(replicas=2, backend="device"))


async def test_what_cannot_be_is_refused_first() -> None:
    with pytest.raises(ConfigError, match="--replicas must be between 1 and 1024, got 0"):
        EngineConfig(replicas=0)
    config = EngineConfig(model="no such model", replicas=2)
    with pytest.raises(ConfigError, match="no replicas: leave it out, or use `vllmx serve`"):
        LLM("no such model", replicas=2)
    with pytest.raises(ConfigError, match="no replicas: leave it out"):
        await AsyncLLM.start(config, in_process=True)
    with pytest.raises(ConfigError, match="serves one core: leave it or --replicas out"):
        await AsyncLLM.start(replace(config, rank_hosts="host:1"))
    with pytest.raises(ConfigError, match="names blocks by a key of its own"):
        await AsyncLLM.start(replace(config, kv_connector="redis:localhost"))


def test_the_first_replicas_compute_prompts(found: Callable[..., FoundModel]) -> None:
    each = places(found(backend="host", replicas=3, prefill_replicas=1, num_threads=3))
    assert [one.config.role for one in each] == ["prefill", "decode", "decode"]
    each = places(found(backend="host", replicas=2, num_threads=2))
    assert [one.config.role for one in each] == ["both", "both"]


def test_each_replica_has_its_part_of_a_folder(found: Callable[..., FoundModel]) -> None:
    each = places(
        found(backend="host", replicas=2, num_threads=2, kv_disk="blocks", kv_disk_size=100)
    )
    folders = [(one.config.kv_disk, one.config.kv_disk_size) for one in each]
    assert folders == [("blocks/0", 50), ("blocks/1", 50)]


async def test_somebody_must_generate() -> None:
    with pytest.raises(ConfigError, match="2 of --replicas 2 leaves none that generates: set"):
        await AsyncLLM.start(EngineConfig(model="no such model", replicas=2, prefill_replicas=2))
    hosts = EngineConfig(model="no such model", replica_hosts="a:1", prefill_replicas=1)
    with pytest.raises(ConfigError, match="start each `vllmx core` with --role prefill or --role"):
        await AsyncLLM.start(hosts)
    for least, most, prefill in ((3, 2, 0), (1, 2, 1), (2, 1, 0)):
        config = EngineConfig(
            model="no such model", replicas=most, min_replicas=least, prefill_replicas=prefill
        )
        with pytest.raises(ConfigError, match=rf"--min-replicas {least} must be above --prefill"):
            await AsyncLLM.start(config)
    with pytest.raises(ConfigError, match="nobody here starts the cores of --replica-hosts a:1"):
        await AsyncLLM.start(EngineConfig(model="x", replica_hosts="a:1", min_replicas=1))
