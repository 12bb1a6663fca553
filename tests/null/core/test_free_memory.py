"""What a backend says of its memory, and what a model may take of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.backend import HasMemory, free_memory
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_engine.core.found_model import find_model
from vllmx_engine.core.load import OpenedModel, load_core, open_model
from vllmx_testing import fake
from vllmx_testing.fake import FakeBackend
from vllmx_testing.fake_checkpoint import FakePlugin, make_fake_checkpoint


def gpu_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The fake backend gets a memory of its own. By a class of its own too: Python remembers of a
    class that its objects are a `HasMemory`."""

    class FakeGpu(FakeBackend):
        def free_bytes(self) -> int:
            return free

    monkeypatch.setattr(fake, "FakeBackend", FakeGpu)


def own_devices() -> bool:
    return True


class PluginOfDevices(FakePlugin):
    """Each rank of its backend has a device of its own."""

    @staticmethod
    @hookimpl
    def vllmx_backends() -> tuple[BackendSpec, ...]:
        (spec,) = FakePlugin.vllmx_backends()
        return (replace(spec, own_devices=f"{__name__}:own_devices"),)


def opened(
    folder: Path,
    plugin: type[FakePlugin] = FakePlugin,
    told: int | None = None,
    **config: Any,
) -> OpenedModel:
    registry = Registry()
    registry.add(plugin, "test:fake")
    found = find_model(EngineConfig(model=str(folder), backend="fake", **config), registry)
    made = open_model(found, told)
    made.checkpoint.weights.close()
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_fake_checkpoint(tmp_path / "model")


def test_the_device_or_else_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllmx_core.backend.free_bytes", lambda: 77)
    assert not isinstance(ReferenceBackend(), HasMemory)
    assert free_memory(ReferenceBackend()) == 77
    gpu_of(monkeypatch, 1000)
    assert free_memory(fake.FakeBackend()) == 1000


def test_a_limit_in_bytes_is_a_share_of_what_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(monkeypatch, 1000)
    for most, share in ((None, 0.9), (300, 0.3), (5000, 0.9)):
        found = opened(folder, memory_bytes=most)
        assert found.options.memory_fraction == share
        assert found.free_bytes == 1000


@pytest.mark.parametrize("ways", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_have_devices_or_share_one(
    ways: dict[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(monkeypatch, 1000)
    found = opened(folder, PluginOfDevices, **ways)
    assert (found.free_bytes, found.options.free_bytes) == (0, None)  # of all devices together
    with pytest.raises(ConfigError, match="each rank has its own: say --memory-fraction"):
        opened(folder, PluginOfDevices, memory_bytes=300, **ways)
    found = opened(folder, memory_bytes=300, **ways)
    assert (found.free_bytes, found.options.memory_fraction) == (1000, 0.3)


def test_ranks_that_share_a_memory_go_by_what_the_first_one_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(monkeypatch, 1000)
    first = opened(folder, memory_bytes=300, tensor_parallel_size=2)
    assert first.options.free_bytes == 1000
    gpu_of(monkeypatch, 600)  # the first one has loaded
    late = opened(folder, told=first.free_bytes, memory_bytes=300, tensor_parallel_size=2)
    assert late.options == first.options
    assert opened(folder).options.free_bytes is None  # a process alone finds out when it loads


def test_a_core_tells_what_was_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_of(monkeypatch, 1000)
    registry = Registry()
    registry.add(FakePlugin, "test:fake")
    core, info = load_core(find_model(EngineConfig(model=str(folder), backend="fake"), registry))
    core.close()
    assert info.free_bytes == 1000
