"""What a backend says of its memory, and what a model may take of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllmx_core.backend import HasMemory
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.memory import free_memory
from vllmx_core.reference_backend import ReferenceBackend
from vllmx_core.registry import Registry
from vllmx_core.testing import fake
from vllmx_core.testing.fake import FakeBackend
from vllmx_core.testing.fake_checkpoint import FakePlugin, make_fake_checkpoint
from vllmx_engine.core.found_model import find_model
from vllmx_engine.core.load import OpenedModel, load_core, open_model


def gpu_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The fake backend gets a memory of its own. By a class of its own too: Python remembers of a
    class that its objects are a `HasMemory`."""

    class FakeGpu(FakeBackend):
        def free_bytes(self) -> int:
            return free

    monkeypatch.setattr(fake, "FakeBackend", FakeGpu)


def opened(folder: Path, **config: Any) -> OpenedModel:
    registry = Registry()
    registry.add(FakePlugin, "test:fake")
    found = find_model(EngineConfig(model=str(folder), backend="fake", **config), registry)
    made = open_model(found)
    made.checkpoint.weights.close()
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_fake_checkpoint(tmp_path / "model")


def test_the_device_or_else_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllmx_core.memory.free_bytes", lambda: 77)
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
    with pytest.raises(ConfigError, match="each rank has its own: say --memory-fraction"):
        opened(folder, memory_bytes=300, tensor_parallel_size=2)


def test_a_core_tells_what_was_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_of(monkeypatch, 1000)
    registry = Registry()
    registry.add(FakePlugin, "test:fake")
    core, info = load_core(find_model(EngineConfig(model=str(folder), backend="fake"), registry))
    core.close()
    assert info.free_bytes == 1000
