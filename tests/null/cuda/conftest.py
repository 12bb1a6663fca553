"""A device on a stand-in for CuPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllmx_cuda.device import cupy_device as module
from vllmx_cuda.device.cupy_device import CupyDevice
from vllmx_cuda.device.driver import DeviceFacts

from .cupy_fakes import FakeDriver, FakeLt, FakeNvrtc, fake_cupy


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def device(log: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CupyDevice:
    monkeypatch.setenv("VLLMX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "include_folders", lambda newest: [str(tmp_path)])
    facts = DeviceFacts(1, "Fake H200", (9, 0), 1 << 37)
    made = fake_cupy(log), facts, FakeNvrtc(), FakeLt, FakeDriver(log)
    return CupyDevice(*made)  # type: ignore[arg-type]
