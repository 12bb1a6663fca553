"""Weights that stay in memory while a model sleeps at level 1."""

from __future__ import annotations

import ctypes
import logging
import mmap
from pathlib import Path

import pytest
from vllmx_core.system.held_files import HeldFiles, weight_files


def test_files_of_weights(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "c.gguf", "config.json"):
        (tmp_path / name).write_bytes(b"x")
    found = [path.name for path in weight_files(tmp_path)]
    assert found == ["a.safetensors", "b.safetensors", "c.gguf"]
    assert weight_files(tmp_path / "c.gguf") == [tmp_path / "c.gguf"]


def test_pages_are_in_memory_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(5 * mmap.PAGESIZE + 3))
    (tmp_path / "empty.gguf").touch()
    held = HeldFiles(weight_files(tmp_path))
    assert held.num_bytes == path.stat().st_size
    before = _locked()
    held.close()
    if before is not None:
        assert before - (_locked() or 0) >= held.num_locked // 1024


def test_what_cannot_be_locked_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x" * 100)

    class Refusing:
        def mlock(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    with caplog.at_level(logging.WARNING, logger="vllmx"):
        held = HeldFiles(weight_files(tmp_path))
    assert held.num_locked == 0
    assert "only 0 of 100 bytes of weights are locked" in caplog.text
    held.close()


def _locked() -> int | None:
    """kB that this process has locked."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmLck")), None)
