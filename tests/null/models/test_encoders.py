"""The choice of who quantises: the plugin that can and has the type, numpy otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import BackendUnavailableError, WeightFormatError
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import EncoderSpec
from vllmx_core.weights.encoding import Encoded
from vllmx_core.weights.part import Layout, StoredPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, decode_blocks
from vllmx_models.formats.gguf.quantize.encoders import NumpyEncoder, encoder_for, float_rows


class Fast:
    """An encoder that has one type."""

    kinds = ("Q8_0",)

    def encode(self, kind: str, rows: RawTensor, *, measure: bool = False) -> Encoded:
        raise NotImplementedError


class Faster(Fast):
    """An encoder that has another type, too."""

    kinds = ("Q8_0", "Q4_K")


def broken() -> Fast:
    raise BackendUnavailableError("there is no compiler")


class Plugin:
    def __init__(self, *specs: EncoderSpec) -> None:
        self._specs = specs

    @hookimpl
    def vllmx_encoders(self) -> tuple[EncoderSpec, ...]:
        return self._specs


def registry(**encoders: int) -> Registry:
    """Names in this module and their priorities."""
    found = Registry()
    specs = (EncoderSpec(name, f"{__name__}:{name}", rank) for name, rank in encoders.items())
    found.add(Plugin(*specs), "test:p")
    return found


def test_the_greatest_priority_that_has_the_type_wins() -> None:
    both = registry(Fast=2, Faster=1)
    assert type(encoder_for(both, "Q8_0")) is Fast
    assert type(encoder_for(both, "Q4_K")) is Faster
    assert type(encoder_for(both, "Q6_K")) is NumpyEncoder
    assert type(encoder_for(Registry(), "Q8_0")) is NumpyEncoder


def test_an_encoder_that_cannot_run_is_passed_over() -> None:
    assert type(encoder_for(registry(Fast=1, broken=2), "Q8_0")) is Fast
    assert type(encoder_for(registry(broken=2), "Q8_0")) is NumpyEncoder


def raw(values: np.ndarray) -> RawTensor:
    return RawTensor("w", "f32", values.shape, values.reshape(-1).view(np.uint8))


def test_numpy_measures_what_it_loses() -> None:
    values = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    found = NumpyEncoder().encode("Q4_0", raw(values), measure=True)
    decoded = decode_blocks(TYPES_BY_NAME["Q4_0"], found.data).reshape(values.shape)
    exact = values.astype(np.float64)
    assert found.squared_error == pytest.approx(np.square(decoded - exact).sum(), rel=1e-12)
    assert found.squared_value == pytest.approx(np.square(exact).sum(), rel=1e-12)
    assert NumpyEncoder().encode("Q4_0", raw(values)).squared_error == 0
    assert NumpyEncoder().encode("F32", raw(values), measure=True).squared_error == 0


@pytest.mark.parametrize("kind", ["Q4_K", "int8", "fp8", "F16"])
def test_numpy_names_the_tensor_that_is_not_finite(kind: str) -> None:
    values = np.zeros((1, 256), np.float32)
    values[0, 9] = np.nan
    with pytest.raises(WeightFormatError, match="tensor 'w' has a value that is not finite"):
        NumpyEncoder().encode(kind, raw(values))


def test_rows_of_a_quantised_part_are_dequantised() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)

    class Mine(Layout):
        kind = "mine"

        def decode(self, part: StoredPart, begin: int, end: int) -> Any:
            return values[begin:end] * 2

    part = StoredPart("w", (3, 4), Mine(4), {})
    rows = float_rows(part, 1, 3)
    assert (rows.dtype, rows.shape) == ("f32", (2, 4))
    np.testing.assert_array_equal(rows.view(), values[1:3] * 2)
