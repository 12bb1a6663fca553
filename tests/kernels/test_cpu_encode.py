"""The native quantisers: byte for byte what numpy makes, on every instruction set."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.tensor import DType, RawTensor
from vllmx_cpu.encoder import NativeEncoder
from vllmx_cpu.native import Isa
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME
from vllmx_models.formats.gguf.quantize.encoders import QUANTIZERS, NumpyEncoder

NUMPY = NumpyEncoder()
DTYPES: dict[DType, type] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def raw(values: AnyArray, dtype: DType = "f32") -> RawTensor:
    """Values (rows, cols) as a file holds them."""
    stored = np.ascontiguousarray(values.astype(DTYPES[dtype]))
    return RawTensor("w", dtype, values.shape, stored.reshape(-1).view(np.uint8))


def shapes_of_values(seed: int) -> dict[str, F32]:
    """What a search might stumble over, (rows, 256)."""
    random = np.random.default_rng(seed)
    rows = 37  # two whole tiles of sixteen blocks, and five
    normal = random.standard_normal((rows, 256))
    groups = random.standard_normal((rows * 16, 16))
    found = {
        "normal": normal * 0.02,
        "heavy tails": random.standard_t(3, (rows, 256)) * 0.02,
        "one block": normal[:1],
        "mostly zero": normal * (random.random((rows, 256)) < 0.1),
        "zeros of both signs": np.where(normal < 0, -0.0, 0.0),
        "few values": random.integers(-3, 4, (rows, 256)),
        "no negative": np.abs(normal),
        "no positive": -np.abs(normal),
        "constants": np.repeat(random.standard_normal((rows, 8)), 32, axis=1),
        "beyond float16": normal * 1e6,
        "huge": normal * 1e37,
        "subnormal scales": normal * 1e-7,
        "subnormal": normal * 1e-41,
        "blocks of any size": normal * 10.0 ** random.integers(-9, 6, (rows, 1)),
        "groups of any size": groups * 10.0 ** random.integers(-4, 1, (rows * 16, 1)),
    }
    return {name: v.reshape(-1, 256).astype(np.float32) for name, v in found.items()}


@pytest.mark.parametrize("kind", sorted(QUANTIZERS.keys() - {"MXFP4"}))
def test_blocks_are_those_of_numpy(isa: Isa, kind: str) -> None:
    encoder = NativeEncoder(isa)
    for name, values in shapes_of_values(sum(kind.encode())).items():
        expected, found = (e.encode(kind, raw(values), measure=True) for e in (NUMPY, encoder))
        differ = (expected.data != found.data).reshape(-1, TYPES_BY_NAME[kind].num_bytes)
        assert not differ.any(), f"{name}: bytes {np.unique(np.nonzero(differ)[1])[:8]}"
        assert found.squared_value == pytest.approx(expected.squared_value, rel=1e-12)
        assert found.squared_error == pytest.approx(expected.squared_error, rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K", "Q6_K", "int8", "fp8"])
def test_half_floats_are_read_as_they_are(isa: Isa, kind: str, dtype: DType) -> None:
    rows = raw(np.random.default_rng(1).standard_normal((5, 768)) * 0.1, dtype)
    expected, found = (e.encode(kind, rows) for e in (NUMPY, NativeEncoder(isa)))
    np.testing.assert_array_equal(found.data, expected.data)
    assert (found.scales is None) == (expected.scales is None)


@pytest.mark.parametrize("cols", [1, 15, 16, 77, 1000])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_with_one_scale_are_those_of_numpy(isa: Isa, kind: str, cols: int) -> None:
    random = np.random.default_rng(cols)
    values = random.standard_normal((12, cols)) * np.exp2(random.integers(-12, 12, (12, cols)))
    values[1] = 0
    values[2] *= 1e-42  # no scale can be inverted
    values[3] *= 1e30
    values[4, 0] = -0.0
    values[5] = (np.arange(cols) % 256 - 128) / 16  # ties
    expected, found = (e.encode(kind, raw(values)) for e in (NUMPY, NativeEncoder(isa)))
    np.testing.assert_array_equal(found.data, expected.data)
    assert found.scales is not None
    assert expected.scales is not None
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q6_K", "int8", "fp8"])
def test_values_that_are_not_finite_are_refused(isa: Isa, kind: str, value: float) -> None:
    for at in (0, 300, 511):
        values = np.random.default_rng(2).standard_normal((1, 512))
        values[0, at] = value
        with pytest.raises(WeightFormatError, match="tensor 'w' has a value that is not finite"):
            NativeEncoder(isa).encode(kind, raw(values))
