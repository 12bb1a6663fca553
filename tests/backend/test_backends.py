"""The conformance suite on every backend that can run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllmx_core.backend import Backend, LoadedModel
from vllmx_core.model import Model
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.weights.part import WeightSource
from vllmx_testing.attention_checks import AttentionChecks
from vllmx_testing.backend_suite import BackendSuite
from vllmx_testing.compressed_checks import CompressedChecks
from vllmx_testing.harness import Harness
from vllmx_testing.op_checks import OpChecks
from vllmx_testing.sampler_checks import SamplerChecks
from vllmx_testing.step_checks import StepChecks

from tests.usable_backends import backend_spec

REGISTRY: Registry = load_registry()


class _Named(Harness):
    backend = ""

    def make_backend(self) -> Backend:
        backend: Backend = backend_spec(self.backend).load()()
        return backend


class _Suite(_Named, BackendSuite):
    pass


class TestNumpy(_Suite):
    backend = "numpy"
    exact_batches = False  # BLAS chooses its order of sums by the size of the matrix

    def native(self, dtype: str) -> dict[str, Any]:
        return {"dtype": "f32"}


class TestCpu(_Suite):
    backend = "cpu"
    block_sizes = (16, 32, 64, 128)
    kv_share = 0.75  # codes are multiplied as bf16


class _Metal(_Named):
    backend = "metal"
    exact_batches = False  # MLX chooses kernels by the size of the matrix


class TestMetal(_Metal, BackendSuite):
    pass


class TestMetalInPieces(_Metal, AttentionChecks, CompressedChecks, StepChecks):
    """Steps so small that attention is cut into tiles and batches of rows. What pages hold, ops and
    the sampler know nothing of pieces."""

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend_spec("metal").load()
        for name, size in {"TILE_TOKENS": 5, "BATCH_KEYS": 48, "PADDING": 1, "SLACK": 0}.items():
            monkeypatch.setattr(f"vllmx_metal.step.{name}", size)
        monkeypatch.setattr("vllmx_core.backend_kit.compressed._GATHERED", 40)


class _Torch(_Named):
    backend = "torch"
    exact_batches = False  # as in TestNumpy

    @contextmanager
    def loaded(self, model: Model, source: WeightSource, **options: Any) -> Iterator[LoadedModel]:
        """Loads on one thread: small steps beside other tests."""
        with super().loaded(model, source, **({"num_threads": 1} | options)) as loaded:
            yield loaded


class TestTorch(_Torch, BackendSuite):
    pass


class TestTorchInPieces(
    _Torch, OpChecks, AttentionChecks, CompressedChecks, SamplerChecks, StepChecks
):
    """Steps so small that all that the backend cuts into pieces is cut; codes of the KV cache are
    made and read without knowing of pieces."""

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend_spec("torch").load()
        for name, size in {
            "vllmx_torch.step.TILE_TOKENS": 5,
            "vllmx_torch.step.BATCH_KEYS": 48,
            "vllmx_core.backend_kit.compressed._GATHERED": 40,
            "vllmx_core.backend_kit.sampler._CHUNK_VALUES": 300,
            "vllmx_torch.ops._HEAD_VALUES": 100,
            "vllmx_torch.weights._COPY_BYTES": 200,
        }.items():
            monkeypatch.setattr(name, size)
