"""Dequantisation against the `gguf` package, to the bit."""

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from vllmx_models.formats.gguf.blocks import (
    FOREIGN_TYPES,
    TENSOR_TYPES,
    TYPES_BY_NAME,
    decode_blocks,
    weight_part,
)

QUANTISED = [name for name, kind in TYPES_BY_NAME.items() if kind.dense is None]
HALVES = {  # where the float16 numbers of a block lie
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
EXTREMES = np.array(
    [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, np.inf, -np.inf, np.nan], np.float16
)


def reference(name, data):
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        return gguf.dequantize(data.reshape(-1, TYPES_BY_NAME[name].num_bytes), kind).reshape(-1)


def random_blocks(name, count, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, TYPES_BY_NAME[name].num_bytes), dtype=np.uint8)


@pytest.mark.parametrize("name", QUANTISED)
def test_random_blocks_decode_as_in_the_gguf_package(name):
    blocks = random_blocks(name, 3000, seed=1)
    ours = decode_blocks(TYPES_BY_NAME[name], blocks.reshape(-1))
    np.testing.assert_array_equal(ours.view(np.uint32), reference(name, blocks).view(np.uint32))


@pytest.mark.parametrize("name", QUANTISED)
def test_extreme_scales_decode_as_in_the_gguf_package(name):
    blocks = random_blocks(name, 400, seed=2)
    rng = np.random.default_rng(3)
    for at in HALVES[name]:
        blocks[:, at : at + 2] = rng.choice(EXTREMES, 400)[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:256, 0] = np.arange(256)  # every exponent
    ours = decode_blocks(TYPES_BY_NAME[name], blocks.reshape(-1))
    np.testing.assert_array_equal(ours.view(np.uint32), reference(name, blocks).view(np.uint32))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_a_tensor_longer_than_one_pass_decodes_whole(name):
    kind = TYPES_BY_NAME[name]
    rows, cols = 640, 1024
    data = random_blocks(name, rows * cols // kind.values, seed=4).reshape(-1)
    part = weight_part("w", kind, (rows, cols), data)
    assert part.layout.kind == "gguf"
    assert part.layout.options == {"type": name}
    assert part.buffers["weight"].shape == (rows, cols // kind.values * kind.num_bytes)
    assert part.buffers["weight"].data is data
    expected = reference(name, data).reshape(rows, cols)
    np.testing.assert_array_equal(part.dequantize().view(np.uint32), expected.view(np.uint32))


def test_the_table_of_types_agrees_with_the_gguf_package():
    for code, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(code)
        assert (theirs.name, *GGML_QUANT_SIZES[theirs]) == (kind.name, kind.values, kind.num_bytes)
    for code, name in FOREIGN_TYPES.items():
        assert gguf.GGMLQuantizationType(code).name == name


def test_layouts_name_their_bits():
    bits = {name: TYPES_BY_NAME[name].layout.bits for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K")}
    assert bits == {"Q4_0": 4.5, "Q8_0": 8.5, "Q4_K": 4.5, "Q6_K": 6.5625}
    assert TYPES_BY_NAME["BF16"].layout.kind == "dense"
