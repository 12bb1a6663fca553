"""Weights that stay in memory while a model sleeps at level 1."""

from __future__ import annotations

import ctypes
import logging
import mmap
from pathlib import Path

import pytest
from vllmx_core.system.held_files import HeldFiles
from vllmx_core.weights.file_names import weight_files


@pytest.mark.parametrize(
    ("there", "path", "wanted"),
    [
        ("b.safetensors a.safetensors config.json", "", "a.safetensors b.safetensors"),
        ("model.safetensors other.safetensors", "", "model.safetensors"),
        ("consolidated.safetensors model-1.safetensors", "", "model-1.safetensors"),
        ("consolidated.safetensors params.json", "", "consolidated.safetensors"),
        ("c.gguf config.json", "", "c.gguf"),
        ("c.gguf d.gguf", "c.gguf", "c.gguf"),
        (
            "c-00001-of-00002.gguf c-00002-of-00002.gguf d.gguf",
            "c-00001-of-00002.gguf",
            "c-00001-of-00002.gguf c-00002-of-00002.gguf",
        ),
    ],
)
def test_files_of_weights(tmp_path: Path, there: str, path: str, wanted: str) -> None:
    for name in there.split():
        (tmp_path / name).write_text("{}")
    assert weight_files(tmp_path / path) == [tmp_path / name for name in wanted.split()]


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


def test_a_system_that_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Windows, whose ctypes opens no library without a name. A file that is gone is named."""
    (tmp_path / "model.gguf").write_bytes(b"x" * 100)

    def refuse(*_: object, **__: object) -> None:
        raise TypeError

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.delattr(mmap, "PROT_READ", raising=False)
    held = HeldFiles([tmp_path / "gone.gguf", tmp_path / "model.gguf"])
    assert (held.num_bytes, held.num_locked) == (100, 0)
    assert "gone.gguf cannot stay in memory (No such file" in caplog.text
    held.close()


def _locked() -> int | None:
    """kB that this process has locked."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmLck")), None)
