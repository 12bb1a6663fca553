"""compressed-tensors against the plain statement of its formats, and against the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.errors import UnsupportedModelError, WeightFormatError

from . import statement
from .checkpoints import BF16, E4M3, assert_same_bits, open_part, open_source

Tensors = dict[str, NDArray[Any]]
RNG = np.random.default_rng(6)


def scales(*shape: int, dtype: Any = BF16) -> NDArray[Any]:
    return np.asarray(RNG.standard_normal(shape) * 0.01, np.float32).astype(dtype)


def words(*shape: int) -> NDArray[np.int32]:
    return RNG.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def config(weights: dict[str, Any], activations: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


def integers(bits: int, strategy: str, group_size: int | None, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
        "observer": "minmax",
        **more,
    }


def packed_module(
    bits: int, rows: int, cols: int, groups: int, *, zeros: str = "none", dtype: Any = BF16
) -> Tensors:
    """Random tensors of module "m"; zeros: none, packed or plain."""
    tensors: Tensors = {
        "m.weight_packed": words(rows, -(-cols * bits // 32)),
        "m.weight_shape": np.array([rows, cols]),
        "m.weight_scale": scales(rows, groups, dtype=dtype),
    }
    if zeros == "packed":
        tensors["m.weight_zero_point"] = words(-(-rows * bits // 32), groups)
    elif zeros == "plain":
        half = 2 ** (bits - 1)
        tensors["m.weight_zero_point"] = RNG.integers(-half, half, (rows, groups), dtype=np.int8)
    return tensors


def plain_packed(
    tensors: Tensors, bits: int, group_size: int, g_idx: Any = None
) -> NDArray[np.float32]:
    rows, cols = tensors["m.weight_shape"].tolist()
    scale = tensors["m.weight_scale"].reshape(-1, 1) if group_size == cols else None
    return statement.pack_quantized(
        tensors["m.weight_packed"],
        (rows, cols),
        tensors["m.weight_scale"] if scale is None else scale,
        tensors.get("m.weight_zero_point"),
        g_idx,
        bits=bits,
        group_size=group_size,
    )


@pytest.mark.parametrize("zeros", ["none", "packed", "plain"])
@pytest.mark.parametrize(("cols", "group_size"), [(64, 32), (50, 16)])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_packed_groups(tmp_path: Path, bits: int, cols: int, group_size: int, zeros: str) -> None:
    tensors = packed_module(bits, 13, cols, -(-cols // group_size), zeros=zeros)
    weights = integers(bits, "group", group_size, symmetric=zeros == "none")
    part = open_part(tmp_path, tensors, config(weights, format="pack-quantized"))
    assert part.shape == (13, cols)
    assert (part.layout.kind, part.layout.bits) == ("pack_int", bits)
    assert part.layout.group_size == group_size
    assert part.layout.options["activations"] == "none"
    assert_same_bits(part.dequantize(), plain_packed(tensors, bits, group_size))


@pytest.mark.parametrize("zeros", ["none", "packed"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, BF16])
def test_packed_channels(tmp_path: Path, dtype: Any, zeros: str) -> None:
    tensors = packed_module(4, 300, 24, 1, zeros=zeros, dtype=dtype)
    weights = integers(4, "channel", None, symmetric=zeros == "none")
    part = open_part(tmp_path, tensors, config(weights))
    assert_same_bits(part.dequantize(), plain_packed(tensors, 4, 24))


def test_packed_tensor(tmp_path: Path) -> None:
    tensors = {**packed_module(4, 9, 24, 1), "m.weight_scale": scales(1)}
    part = open_part(tmp_path, tensors, config(integers(4, "tensor", None)))
    assert_same_bits(part.dequantize(), plain_packed(tensors, 4, 24))


def test_group_index(tmp_path: Path) -> None:
    tensors = packed_module(4, 8, 64, 4)
    g_idx = RNG.permutation(np.arange(64, dtype=np.int32) // 16)
    weights = integers(4, "group", 16, actorder="group")
    part = open_part(tmp_path, {**tensors, "m.weight_g_idx": g_idx}, config(weights))
    assert part.layout.options["act_order"] is True
    assert_same_bits(part.dequantize(), plain_packed(tensors, 4, 16, g_idx))
    unset = {**tensors, "m.weight_g_idx": np.full(64, -1, np.int32)}
    part = open_part(tmp_path, unset, config(weights))
    assert_same_bits(part.dequantize(), plain_packed(tensors, 4, 16))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("strategy", "shape"), [("channel", (11, 1)), ("tensor", (1,)), ("group", (11, 3))]
)
def test_int8(tmp_path: Path, strategy: str, shape: tuple[int, ...], zeros: bool) -> None:
    weight, scale = RNG.integers(-128, 128, (11, 40), dtype=np.int8), scales(*shape)
    tensors: Tensors = {"m.weight": weight, "m.weight_scale": scale}
    zero_point = RNG.integers(-128, 128, shape, dtype=np.int8) if zeros else None
    if zero_point is not None:
        tensors["m.weight_zero_point"] = zero_point
    weights = integers(8, strategy, 16 if strategy == "group" else None, symmetric=not zeros)
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    part = open_part(tmp_path, tensors, config(weights, activations, format="int-quantized"))
    assert part.layout.kind == "int8"
    assert part.layout.options == {
        "strategy": strategy,
        "symmetric": not zeros,
        "activations": "dynamic",
        "activation_bits": 8,
        "activation_type": "int",
        "activation_strategy": "token",
        "activation_symmetric": True,
    }
    grid = (len(scale), scale.size // len(scale))
    expected = statement.int8(
        weight,
        scale.reshape(grid),
        None if zero_point is None else zero_point.reshape(grid),
        group_size=16 if strategy == "group" else 40,
    )
    assert_same_bits(part.dequantize(), expected)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("strategy", "structure", "shape", "block"),
    [
        ("tensor", None, (1,), (20, 36)),
        ("channel", None, (20, 1), (1, 36)),
        ("block", [16, 8], (2, 5), (16, 8)),
        ("block", "16x8", (2, 5), (16, 8)),
    ],
)
def test_fp8(
    tmp_path: Path,
    strategy: str,
    structure: Any,
    shape: tuple[int, ...],
    block: tuple[int, int],
    dynamic: bool,
) -> None:
    codes, scale = RNG.integers(0, 256, (20, 36), dtype=np.uint8), scales(*shape)
    tensors = {"m.weight": codes.view(E4M3), "m.weight_scale": scale}
    if not dynamic:
        tensors["m.input_scale"] = scales(1)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": structure}
    activations = {"num_bits": 8, "type": "float", "dynamic": dynamic, "strategy": "tensor"}
    part = open_part(tmp_path, tensors, config(weights, activations, format="float-quantized"))
    assert (part.layout.kind, part.layout.options["strategy"]) == ("fp8", strategy)
    assert part.layout.options["activations"] == ("dynamic" if dynamic else "static")
    assert ("input_scale" in part.buffers) is not dynamic
    expected = statement.fp8(codes, scale.astype(np.float32).reshape(len(scale), -1), block)
    assert_same_bits(part.dequantize(), expected)


def test_nvfp4_and_mxfp4(tmp_path: Path) -> None:
    packed = RNG.integers(0, 256, (5, 48), dtype=np.uint8)
    nv, mx = (RNG.integers(100, 126, (5, groups), dtype=np.uint8) for groups in (6, 3))
    whole = np.float32(321.5)
    tensors: Tensors = {
        "m.weight_packed": packed,
        "m.weight_scale": nv.view(E4M3),
        "m.weight_global_scale": np.array([whole]),
    }
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    part = open_part(tmp_path, tensors, config(weights, format="nvfp4-pack-quantized"))

    def nv_scale(o: int, group: int) -> Any:
        return np.float32(statement.e4m3(int(nv[o, group]))) / whole

    assert_same_bits(part.dequantize(), statement.fp4(packed, nv_scale, 16))
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    tensors = {"m.weight_packed": packed, "m.weight_scale": mx}
    part = open_part(tmp_path, tensors, config(weights, format="mxfp4-pack-quantized"))
    expected = statement.fp4(packed, lambda o, group: statement.e8m0(int(mx[o, group])), 32)
    assert_same_bits(part.dequantize(), expected)


def test_targets_and_ignored_modules(tmp_path: Path) -> None:
    four = {k.replace("m.", "a.mlp.up."): v for k, v in packed_module(4, 8, 32, 2).items()}
    eight = {k.replace("m.", "a.mlp.down."): v for k, v in packed_module(8, 8, 32, 1).items()}
    two = {k.replace("m.", "a.q."): v for k, v in packed_module(2, 8, 32, 1).items()}
    dense = {"lm_head.weight": np.ones((2, 2), BF16), "a.norm.weight": np.ones(2, BF16)}
    groups = {
        "everything": {"targets": ["Linear"], "weights": integers(2, "channel", None)},
        "mlp": {"targets": [r"re:.*\.mlp\..*"], "weights": integers(4, "group", 16)},
        "one": {"targets": ["a.mlp.down"], "weights": integers(8, "channel", None)},
    }
    tensors = {**four, **eight, **two, **dense}
    options = {**config({}), "config_groups": groups, "ignore": ["lm_head", "re:.*norm"]}
    source = open_source(tmp_path, tensors, options)
    names = {"a.mlp.up.weight", "a.mlp.down.weight", "a.q.weight", *dense}
    assert set(source.names()) == names
    bits = {name: source.part(name).layout.bits for name in names - set(dense)}
    assert bits == {"a.mlp.up.weight": 4, "a.mlp.down.weight": 8, "a.q.weight": 2}
    assert {source.part(name).layout.kind for name in dense} == {"dense"}

    ignoring = open_source(tmp_path, tensors, {**options, "ignore": ["re:a.mlp.*"]})
    with pytest.raises(WeightFormatError, match=r"'a\.mlp\.up' .*not quantised"):
        ignoring.part("a.mlp.up.weight")
    del groups["everything"]
    untargeted = open_source(tmp_path, tensors, options)
    with pytest.raises(UnsupportedModelError, match=r"'a\.q' .*known targets: .re:.*a\.mlp\.down"):
        untargeted.part("a.q.weight")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m.weight_packed": words(13, 9)}, r"'m\.weight_packed' .*\[13, 9\].*\[13, 8\]"),
        ({"m.weight_packed": words(12, 8)}, r"'m\.weight_packed' .*\[12, 8\].*\[13, 8\]"),
        ({"m.weight_shape": np.array([13, 64, 1])}, r"'m\.weight_shape' has shape \[3\]"),
        ({"m.weight_shape": np.array([-13, 64])}, r"'m\.weight_shape' holds \[-13, 64\]"),
        ({"m.weight_shape": np.array([1 << 30, 1 << 30])}, r"'m\.weight_shape' holds"),
        ({"m.weight_scale": scales(13, 3)}, r"'m\.weight_scale' .*\[13, 3\].*\[13, 4\]"),
        ({"m.weight_zero_point": words(2, 3)}, r"'m\.weight_zero_point' .*\[2, 3\].*\[2, 4\]"),
        ({"m.weight_zero_point": scales(13, 4)}, r"'m\.weight_zero_point' is stored as bf16"),
        ({"m.weight_g_idx": np.full(64, 4, np.int32)}, r"'m\.weight_g_idx' holds 4 to 4"),
        ({"m.weight_g_idx": np.zeros(3, np.int32)}, r"'m\.weight_g_idx' has shape \[3\]"),
    ],
)
def test_damaged_tensors(tmp_path: Path, changed: Tensors, message: str) -> None:
    tensors = {**packed_module(4, 13, 64, 4, zeros="packed"), **changed}
    with pytest.raises(WeightFormatError, match=message):
        open_part(tmp_path, tensors, config(integers(4, "group", 16, symmetric=False)))


def test_what_a_format_needs(tmp_path: Path) -> None:
    asymmetric = config(integers(4, "group", 16, symmetric=False))
    tensors = packed_module(4, 13, 64, 4)
    with pytest.raises(WeightFormatError, match=r"'m\.weight_zero_point' is missing"):
        open_part(tmp_path, tensors, asymmetric)
    del tensors["m.weight_shape"]
    with pytest.raises(WeightFormatError, match=r"'m\.weight_shape' is missing"):
        open_part(tmp_path, tensors, asymmetric)
    unscaled: Tensors = {"m.weight": np.ones((2, 2), np.int8)}
    with pytest.raises(WeightFormatError, match=r"'m\.weight' is stored as i8.*\.weight_scale"):
        open_part(tmp_path, unscaled, config(integers(8, "channel", None)))


@pytest.mark.parametrize(
    ("weights", "change", "message"),
    [
        ({}, {"format": "marlin-24"}, "format = marlin-24 .*known: pack-quantized"),
        ({}, {"config_groups": {}}, "config_groups = .*must say"),
        ({}, {"config_groups": {"group_0": 3}}, "must have an object as group_0"),
        ({}, {"sparsity_config": {"format": "sparse-24"}}, "format = sparse-24 .*known: dense"),
        ({}, {"transform_config": {"config_groups": {"u": {}}}}, "transform_config = "),
        ({"num_bits": 9}, {}, "num_bits = 9 .*known: 2, 3, 4, 5, 6, 7, 8"),
        ({"num_bits": 6, "type": "float"}, {}, "num_bits = 6 .*known: 4, 8"),
        ({"type": "complex"}, {}, "type = complex .*known: int, float"),
        ({"strategy": "token"}, {}, "strategy = token .*known: tensor, channel, group"),
        ({"strategy": "block"}, {}, "block_structure = .*two integers"),
        ({"strategy": "block", "block_structure": [2, 0]}, {}, "block_structure = .*above 0"),
        ({"strategy": "block", "block_structure": [2, 2]}, {}, "strategy = block .*integers"),
        ({"strategy": "group"}, {}, "group_size = .*above 0"),
        ({"strategy": "group", "type": "float"}, {}, "strategy = group .*FP8; known: tensor"),
        ({"strategy": "group", "type": "float", "num_bits": 4}, {}, "4-bit floats.*group with 32"),
        ({"dynamic": True}, {}, "dynamic = True .*known: False"),
    ],
)
def test_options_that_are_not_read(
    tmp_path: Path, weights: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    options = {**config({"num_bits": 8, "strategy": "channel", **weights}), **change}
    with pytest.raises(UnsupportedModelError, match=message):
        open_part(tmp_path, {"m.weight_scale": scales(1)}, options)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_against_the_package(tmp_path: Path, bits: int, symmetric: bool) -> None:
    torch = pytest.importorskip("torch")
    package = pytest.importorskip("compressed_tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = integers(bits, "group", 16, symmetric=symmetric)
    args = quantization.QuantizationArgs(**{k: v for k, v in weights.items() if k != "observer"})
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = package.compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    torch.manual_seed(0)
    half = 2 ** (bits - 1)
    state = {
        "weight": torch.randn(24, 48) * 0.1,
        "weight_scale": torch.rand(24, 3) * 0.02 + 0.01,
        "weight_zero_point": torch.randint(-half, half, (24, 3), dtype=torch.int8),
    }
    if symmetric:
        del state["weight_zero_point"]
    compressed = compressor.compress(state, scheme)
    tensors = {f"m.{name}": tensor.numpy() for name, tensor in compressed.items()}
    part = open_part(tmp_path, tensors, config(weights, format="pack-quantized"))
    theirs = compressor.decompress(compressed, scheme)["weight"].numpy()
    np.testing.assert_array_equal(part.dequantize(), theirs)  # they lose the sign of zeros
