"""A weight file that shrinks while a backend loads it ends the load, not the process."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import WeightFormatError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.weights.files import Bytes, WeightFile
from vllmx_demo.source import MODEL_FOLDER
from vllmx_models.formats.gguf.quantize.convert import quantize

from tests.usable_backends import backend_spec

OPTIONS = LoadOptions(
    max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64, num_kv_blocks=16, num_threads=2
)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.fixture(params=["safetensors", "gguf"])
def path(request: pytest.FixtureRequest, registry: Registry, tmp_path: Path) -> Path:
    """The file of weights of a model."""
    if request.param == "gguf":
        quantize(registry, MODEL_FOLDER, tmp_path / "x.gguf", "q8_0", threads=1)
        return tmp_path / "x.gguf"
    shutil.copytree(MODEL_FOLDER, tmp_path / "model")
    return tmp_path / "model" / "model.safetensors"


def shrinking(path: Path, after: int) -> Callable[..., Bytes]:
    """Reads a file that is cut in half when `after` reads have begun."""
    original, lock, begun = WeightFile.read, threading.Lock(), 0

    def read(self: WeightFile, begin: int, end: int, room: Bytes | None = None) -> Bytes:
        nonlocal begun
        with lock:
            begun += 1
            if begun == after:
                os.truncate(path, path.stat().st_size // 2)
        return original(self, begin, end, room)

    return read


@pytest.mark.parametrize("name", ["numpy", "cpu", "torch", "metal"])
@pytest.mark.parametrize("after", [1, 6])
def test_the_error_names_the_file(
    registry: Registry, path: Path, name: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = backend_spec(name)
    checkpoint = open_checkpoint(registry, path)
    model, threads = build_model(registry, checkpoint), threading.active_count()
    monkeypatch.setattr(WeightFile, "read", shrinking(path, after))
    with pytest.raises(WeightFormatError, match=path.name):
        spec.load()().load(model, checkpoint.weights, OPTIONS)
    checkpoint.weights.close()
    assert threading.active_count() == threads
