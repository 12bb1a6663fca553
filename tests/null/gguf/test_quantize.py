"""Our quantisers beside llama.cpp's, and what they do with odd values."""

import gguf
import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, decode_blocks
from vllmx_models.formats.gguf.quantize.encoders import QUANTIZERS, encode

LLAMA_CPP_RMS = {
    "Q8_0": (1.0730e-04, 2.0305e-04),
    "Q4_0": (1.7237e-03, 3.2500e-03),
    "Q4_1": (1.5631e-03, 2.6175e-03),
    "Q5_0": (8.5518e-04, 1.6229e-03),
    "Q5_1": (7.6035e-04, 1.2744e-03),
    "Q2_K": (5.9186e-03, 9.5829e-03),
    "Q3_K": (3.0280e-03, 5.1586e-03),
    "Q4_K": (1.4286e-03, 2.4269e-03),
    "Q5_K": (7.2504e-04, 1.2352e-03),
    "Q6_K": (3.5581e-04, 6.3787e-04),
}
"""RMS errors of llama.cpp's quantisers (ggml-quants.c of llama-cpp-python's sources, without an
importance matrix) on `tensor(seed)` of seeds 0 (normal) and 1 (heavy tails)."""
FINE = [name for name in QUANTIZERS if name != "MXFP4"]
"""Whose scales are no powers of two."""
SIMPLE = ("MXFP4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def tensor(seed):
    """(64, 1024) values of the size of weights."""
    rng = np.random.default_rng(seed)
    draw = rng.standard_normal if seed == 0 else lambda size: rng.standard_t(4, size)
    return (draw((64, 1024)) * 0.02).astype(np.float32)


def rms(name, values, data):
    found = decode_blocks(TYPES_BY_NAME[name], data).reshape(values.shape)
    return float(np.sqrt(np.square(found.astype(np.float64) - values).mean()))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FINE)
def test_error_is_at_most_that_of_llama_cpp(name, seed):
    values = tensor(seed)
    assert rms(name, values, encode(name, values)) <= LLAMA_CPP_RMS[name][seed]


@pytest.mark.parametrize("name", SIMPLE)
def test_error_is_at_most_that_of_the_gguf_package(name):
    values = tensor(2)
    theirs = gguf.quantize(values, gguf.GGMLQuantizationType[name]).reshape(-1)
    assert rms(name, values, encode(name, values)) <= rms(name, values, theirs)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_gguf_package_decodes_the_same_values(name):
    data = encode(name, tensor(1))
    theirs = gguf.dequantize(
        data.reshape(-1, TYPES_BY_NAME[name].num_bytes), gguf.GGMLQuantizationType[name]
    )
    ours = decode_blocks(TYPES_BY_NAME[name], data)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.reshape(-1).view(np.uint32))


def decoded(name, values):
    values = np.asarray(values, np.float32)
    return decode_blocks(TYPES_BY_NAME[name], encode(name, values)).reshape(values.shape)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_zeros_stay_zeros(name):
    assert (decoded(name, np.zeros(512)) == 0).all()
    assert (decoded(name, np.full(256, -0.0)) == 0).all()


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("value", [0.7, -0.7, 1e-3, -1000.0])
def test_a_constant_comes_back_within_half_a_percent(name, value):
    np.testing.assert_allclose(decoded(name, np.full(256, value)), value, rtol=5e-3)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_one_value_among_zeros_comes_back(name):
    for value in (1.0, -1.0):
        values = np.zeros(256)
        values[77] = value
        np.testing.assert_allclose(decoded(name, values), values, atol=5e-3)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("scale", [3e38, 1e20, 1e9])
def test_huge_values_are_cut_to_finite_ones(name, scale):
    values = np.linspace(-1, 1, 256) * scale
    found = decoded(name, values)
    assert np.isfinite(found).all()
    assert found[0] < -60000 < 60000 < found[-1]


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("scale", [1e-6, 1e-20, 1e-44])
def test_tiny_values_come_back_no_larger(name, scale):
    values = (np.linspace(-1, 1, 256) * scale).astype(np.float32)
    found = decoded(name, values)
    assert np.abs(found - values).max() <= max(scale, 1e-7)


@pytest.mark.parametrize("name", [*QUANTIZERS, "F16", "BF16", "F32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(name, value):
    values = np.ones(256, np.float32)
    values[3] = value
    with pytest.raises(WeightFormatError, match="not finite"):
        encode(name, values)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_result_does_not_depend_on_the_neighbours(name):
    values = tensor(1)
    whole = encode(name, values).reshape(64, -1)
    np.testing.assert_array_equal(encode(name, values[5:9]), whole[5:9].reshape(-1))
