"""The conformance suite on the GPU, run by run.sh; the tests of the repository run it emulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from devices import opener
from vllmx_core.backend import Backend, LoadedModel
from vllmx_core.model import Model
from vllmx_core.weights.part import WeightSource
from vllmx_cuda.backend import CudaBackend
from vllmx_testing.attention_checks import FEATURES, attention_model
from vllmx_testing.backend_suite import BackendSuite
from vllmx_testing.harness import Harness, mixed_steps


class OnDevice(Harness):
    kv_dtypes = ("f32", "int8", "fp8")
    exact_batches = False
    eager = False
    """Whether nothing is captured where a test does not say so itself; see sanitized.py."""

    def make_backend(self) -> Backend:
        return CudaBackend(opener())

    @contextmanager
    def loaded(self, model: Model, source: WeightSource, **options: Any) -> Iterator[LoadedModel]:
        with super().loaded(model, source, **{"enforce_eager": self.eager, **options}) as loaded:
            yield loaded


class TestCuda(OnDevice, BackendSuite):
    pass


class TestTensorCores(OnDevice):
    """Attention of 16-bit models: prompts in tiles, decodes beside them."""

    @pytest.mark.parametrize("dtype", ["bf16", "f16"])
    @pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
    def test_attention(self, dtype: str, features: dict[str, Any]) -> None:
        model, source = attention_model(**features)
        # what rounding does to scores is magnified by their own size
        spread = features.get("scale", 0.25) * features.get("head_size", 16) ** 0.5
        self.compare(model, source, mixed_steps(), tolerance=0.1 * max(1, spread), dtype=dtype)

    @pytest.mark.parametrize(
        ("size", "group", "kv"),
        [
            (80, 7, "fp8"),
            (96, 5, "int8"),
            (112, 12, "fp8"),
            (192, 16, "int8"),
            (256, 1, "fp8"),
            (256, 8, "auto"),
        ],
    )
    def test_head_sizes(self, size: int, group: int, kv: str) -> None:
        """Sizes that features lack, with groups and codes that fill tiles of heads in part."""
        heads = {"num_heads": 2 * group, "num_kv_heads": 2, "head_size": size}
        model, source = attention_model(**heads, scale=size**-0.5)
        limit = 0.3 if kv == "fp8" else 0.1  # keys of other last bits become neighbouring codes
        options = {"dtype": "bf16", "kv_cache_dtype": kv}
        self.compare(model, source, mixed_steps(), tolerance=limit, **options)
