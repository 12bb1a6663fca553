"""What loading decides and refuses, alike in the backends cpu and torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllmx_core.backend import Backend, LoadedModel, LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_testing.step_checks import decoder

LIMITS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
}


@pytest.fixture(params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setenv("VLLMX_TORCH_DEVICE", "cpu")
    known = {spec.name: spec for spec in load_registry().all(BackendSpec)}
    spec = known.get(request.param)
    if spec is None or spec.unavailable_reason() is not None:
        pytest.skip(f"the backend {request.param} does not run here")
    made: Backend = spec.load()()
    return made


def load(backend: Backend, dtype: Any = "f32", **options: Any) -> LoadedModel:
    model, source = decoder()
    shape = replace(model.shape, dtype=dtype)
    return backend.load(replace(model, shape=shape), source, LoadOptions(**(LIMITS | options)))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_auto_takes_the_dtype_of_the_checkpoint(backend: Backend, dtype: str) -> None:
    loaded = load(backend, dtype)
    assert loaded.info.dtype == dtype
    loaded.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "f8"}, "dtype 'f8': choose .*bf16"),
        ({"kv_cache_dtype": "int3"}, "'int3': choose auto, bf16.*fp8"),
        ({"block_size": 0}, "block_size.*0"),
        ({"num_threads": 0}, "num_threads.*1.*0"),
    ],
)
def test_options_that_cannot_be_honoured(
    backend: Backend, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(backend, **options)
