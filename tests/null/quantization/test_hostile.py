"""Any tensors under any options: a part that decodes to its shape, or an error of ours."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from vllmx_core.errors import UnsupportedModelError, VllmxError, WeightFormatError
from vllmx_core.plugins.specs import QuantizationSpec
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.tensor import ITEM_BYTES, DType, RawTensor

from .checkpoints import REGISTRY

PACKED = (".qweight", ".qzeros", ".scales", ".g_idx")
METHODS = {
    "awq": PACKED,
    "compressed-tensors": (
        ".weight",
        ".weight_packed",
        ".weight_shape",
        ".weight_scale",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight_global_scale",
        ".input_scale",
    ),
    "fbgemm_fp8": (".weight", ".weight_scale", ".input_scale"),
    "fp8": (".weight", ".weight_scale", ".weight_scale_inv", ".input_scale"),
    "gptq": PACKED,
    "mlx": (".weight", ".scales", ".biases"),
    "modelopt": (".weight", ".weight_scale", ".weight_scale_2", ".input_scale"),
    "mxfp4": ("_blocks", "_scales"),
}
"""Suffixes of the tensors that matter to each."""
SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 12, 16, 32, 96])
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text("a.*:", max_size=4)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=4,
)
WEIGHTS = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.sampled_from([2, 3, 4, 8]) | ANYTHING,
        "type": st.sampled_from(["int", "float"]) | ANYTHING,
        "strategy": st.sampled_from(["tensor", "channel", "group", "block", "tensor_group"]),
        "group_size": st.sampled_from([-1, 1, 8, 16, 32]) | ANYTHING,
        "block_structure": st.just([2, 2]) | st.just("2x²") | ANYTHING,
        "symmetric": st.booleans() | ANYTHING,
    },
)
GROUP = st.fixed_dictionaries(
    {"targets": st.just(["Linear"]) | ANYTHING, "weights": WEIGHTS | ANYTHING},
    optional={"input_activations": WEIGHTS | ANYTHING, "format": ANYTHING},
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "bits": st.sampled_from([2, 3, 4, 8]) | ANYTHING,
        "group_size": st.sampled_from([-1, 1, 3, 8, 16, 32]) | ANYTHING,
        "sym": st.booleans() | ANYTHING,
        "desc_act": st.booleans(),
        "version": st.sampled_from(["gemm", "gemv"]) | ANYTHING,
        "quant_algo": st.sampled_from(["FP8", "NVFP4", "MIXED_PRECISION"]) | ANYTHING,
        "quantized_layers": ANYTHING,
        "weight_block_size": st.just([2, 3]) | ANYTHING,
        "dynamic": ANYTHING,
        "ignore": ANYTHING,
        "modules_to_not_convert": ANYTHING,
        "config_groups": st.fixed_dictionaries({"g": GROUP | ANYTHING}) | ANYTHING,
        "sparsity_config": ANYTHING,
        "transform_config": ANYTHING,
    },
)


class Tensors:
    """A dense source of random bytes."""

    def __init__(self, shapes: Mapping[str, tuple[DType, tuple[int, ...]]], seed: int) -> None:
        random = np.random.default_rng(seed)
        self._parts = {}
        for name, (dtype, shape) in shapes.items():
            count = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
            data: NDArray[np.uint8] = random.integers(0, 256, count, dtype=np.uint8)
            if name.endswith(("g_idx", "_shape")):
                data.view(f"u{ITEM_BYTES[dtype]}")[:] = random.integers(0, 40)
            raw = RawTensor(name, dtype, shape, data)
            self._parts[name] = StoredPart(name, shape, DENSE, {"weight": raw})

    def names(self) -> Collection[str]:
        return self._parts.keys()

    def part(self, name: str) -> WeightPart:
        if name not in self._parts:
            raise WeightFormatError(f"no tensor {name!r}")
        return self._parts[name]

    def close(self) -> None:
        pass


SHAPES = st.tuples(
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(SIZES, max_size=2).map(tuple) | st.tuples(SIZES, st.just(2), SIZES, st.just(16)),
)


@settings(max_examples=200)
@pytest.mark.parametrize("method", METHODS)
@given(data=st.data(), options=OPTIONS, seed=st.integers(0, 9))
def test_a_part_or_an_error_of_ours(
    method: str, data: st.DataObject, options: dict[str, Any], seed: int
) -> None:
    names = st.sampled_from([f"m{suffix}" for suffix in METHODS[method]])
    shapes = data.draw(st.dictionaries(names, SHAPES))
    implementation = REGISTRY.get(QuantizationSpec, method).load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # random bytes hold NaN
        try:
            source = implementation(Tensors(shapes, seed), {"quant_method": method, **options})
        except UnsupportedModelError:
            return
        for name in source.names():
            try:
                part = source.part(name)
            except VllmxError:
                continue
            values = part.dequantize()
            assert values.dtype == np.float32
            assert values.shape == part.shape


@settings(max_examples=100)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([-1, 8, 16, 24]),
    rows=st.sampled_from([32, 64]),
    cols=st.sampled_from([32, 64, 96]),
    damage=st.sampled_from(["none", "qweight", "qzeros", "scales", "g_idx"]),
    axis=st.integers(0, 1),
    seed=st.integers(0, 9),
)
def test_gptq_with_one_wrong_size(
    bits: int, group_size: int, rows: int, cols: int, damage: str, axis: int, seed: int
) -> None:
    groups = 1 if group_size == -1 else -(-cols // group_size)
    shapes: dict[str, tuple[DType, tuple[int, ...]]] = {
        "qweight": ("i32", (cols * bits // 32, rows)),
        "qzeros": ("i32", (groups, rows * bits // 32)),
        "scales": ("f16", (groups, rows)),
        "g_idx": ("i32", (cols,)),
    }
    if damage != "none":
        dtype, shape = shapes[damage]
        sizes = list(shape)
        sizes[axis % len(sizes)] += 1
        shapes[damage] = dtype, tuple(sizes)
    else:
        del shapes["g_idx"]
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False}
    tensors = Tensors({f"m.{name}": entry for name, entry in shapes.items()}, seed)
    source = REGISTRY.get(QuantizationSpec, "gptq").load()(tensors, config)
    if damage == "none":
        assert source.part("m.weight").shape == (rows, cols)
    else:
        with pytest.raises(WeightFormatError, match=r"tensor 'm\.\w+' (has shape|holds)"):
            source.part("m.weight")
