"""FP8 of Hugging Face and ModelOpt against the plain statement, and against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.errors import UnsupportedModelError, WeightFormatError

from . import statement
from .checkpoints import BF16, E4M3, E5M2, E8M0, assert_same_bits, open_part, open_source

Tensors = dict[str, NDArray[Any]]
RNG = np.random.default_rng(8)


def codes(rows: int, cols: int) -> NDArray[Any]:
    """Any byte, NaN as well."""
    return RNG.integers(0, 256, (rows, cols), dtype=np.uint8).view(E4M3)


def scales(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.asarray(RNG.standard_normal(shape) * 1e-3, np.float32).astype(dtype)


def config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **more}


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    ("rows", "cols", "block"),
    [
        (256, 128, (128, 128)),
        (200, 130, (128, 128)),
        (7, 300, (128, 128)),
        (33, 20, (16, 8)),
        (5, 64, (1, 32)),
    ],
)
def test_blocks(tmp_path: Path, rows: int, cols: int, block: tuple[int, int], dtype: Any) -> None:
    weight = codes(rows, cols)
    grid = scales(-(-rows // block[0]), -(-cols // block[1]), dtype=dtype)
    tensors = {"m.weight": weight, "m.weight_scale_inv": grid}
    part = open_part(tmp_path, tensors, config(weight_block_size=list(block), fmt="e4m3"))
    assert part.layout.kind == "fp8"
    assert part.layout.options == {
        "strategy": "block",
        "block_rows": block[0],
        "block_cols": block[1],
        "activations": "dynamic",
        "activation_bits": 8,
        "activation_strategy": "group",
        "dtype": "f8e4m3",
    }
    assert part.buffers["weight"].dtype == "f8e4m3"
    expected = statement.fp8(weight.view(np.uint8), grid.astype(np.float32), block)
    assert_same_bits(part.dequantize(), expected)


def test_exponent_scales(tmp_path: Path) -> None:
    weight, exponents = codes(20, 40), RNG.integers(90, 140, (2, 3), dtype=np.uint8)
    grid = np.array([[statement.e8m0(int(code)) for code in row] for row in exponents])
    options = config(weight_block_size=[16, 16], scale_fmt="ue8m0")
    expected = statement.fp8(weight.view(np.uint8), grid, (16, 16))
    for stored in (exponents.view(E8M0), exponents, grid.astype(np.float32)):
        tensors = {"m.weight": weight, "m.weight_scale_inv": stored}
        assert_same_bits(open_part(tmp_path, tensors, options).dequantize(), expected)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6,), (6, 1)])
def test_one_scale_or_one_for_each_row(tmp_path: Path, shape: tuple[int, ...], suffix: str) -> None:
    weight, scale = codes(6, 50), scales(*shape)
    tensors = {"m.weight": weight, f"m.{suffix}": scale, "m.input_scale": scales(1)}
    part = open_part(tmp_path, tensors, config(activation_scheme="static"))
    whole = scale.size == 1
    assert part.layout.options["strategy"] == ("tensor" if whole else "channel")
    assert part.layout.options["activations"] == "static"
    assert part.buffers["input_scale"].shape == (1,)
    block = (6, 50) if whole else (1, 50)
    expected = statement.fp8(weight.view(np.uint8), scale.reshape(-1, 1), block)
    assert_same_bits(part.dequantize(), expected)


def test_fbgemm(tmp_path: Path) -> None:
    weight, scale = codes(6, 50), scales(6, 1)
    options = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    part = open_part(tmp_path, {"m.weight": weight, "m.weight_scale": scale}, options)
    assert part.layout.options["activation_strategy"] == "token"
    expected = statement.fp8(weight.view(np.uint8), scale, (1, 50))
    assert_same_bits(part.dequantize(), expected)


def test_e5m2(tmp_path: Path) -> None:
    weight, scale = RNG.integers(0, 256, (4, 9), dtype=np.uint8).view(E5M2), scales(4, 1)
    part = open_part(tmp_path, {"m.weight": weight, "m.weight_scale": scale}, config())
    with np.errstate(invalid="ignore"):  # signalling NaN
        assert_same_bits(part.dequantize(), weight.astype(np.float32) * scale)


def test_modelopt(tmp_path: Path) -> None:
    weight, scale = codes(6, 50), scales()
    tensors = {"m.weight": weight, "m.weight_scale": scale, "m.input_scale": scales()}
    part = open_part(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "FP8"})
    assert part.layout.options["activations"] == "static"
    expected = statement.fp8(weight.view(np.uint8), scale.reshape(1, 1), (6, 50))
    assert_same_bits(part.dequantize(), expected)


def test_against_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, grid = codes(256, 384), scales(2, 3)
    tensors = {"m.weight": weight, "m.weight_scale_inv": grid}
    part = open_part(tmp_path, tensors, config(weight_block_size=[128, 128]))
    theirs = module.Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn), torch.from_numpy(grid)
    )
    assert_same_bits(part.dequantize(), theirs.float().numpy())


def test_modules_left_alone(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.gate.weight": np.ones((2, 2), BF16),
        "model.layers.0.up.weight": codes(2, 2),
        "model.layers.0.up.weight_scale": scales(),
        "lm_head.weight": codes(2, 2),
    }
    source = open_source(tmp_path, tensors, config(modules_to_not_convert=["mlp.gate"]))
    assert set(source.names()) == set(tensors) - {"model.layers.0.up.weight_scale"}
    assert source.part("model.layers.0.mlp.gate.weight").layout.kind == "dense"
    with pytest.raises(WeightFormatError, match=r"'lm_head\.weight' is stored as f8e4m3.*_scale"):
        source.part("lm_head.weight")
    for key in ("modules_to_not_convert", "ignored_layers"):
        wrong = open_source(tmp_path, tensors, config(**{key: ["model.layers.0"]}))
        with pytest.raises(WeightFormatError, match=r"'model\.layers\.0\.up' .*not quantised"):
            wrong.part("model.layers.0.up.weight")


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"m.weight_scale_inv": np.ones((2, 3), np.float32)}, {}, r"\[2, 3\].*\[2, 2\]"),
        ({"m.weight_scale_inv": np.ones((2, 2), np.int32)}, {}, "stored as i32.*f16 or bf16"),
        ({"m.weight": np.ones((20, 20), np.float32)}, {}, r"'m\.weight' is stored as f32.*f8e4m3"),
        ({"m.weight": codes(20, 20).reshape(2, 10, 20)}, {}, r"\[2, 10, 20\].*2 axes"),
        ({"m.input_scale": np.ones(2, np.float32)}, {}, r"'m\.input_scale' has shape \[2\]"),
        (
            {"m.weight_scale_inv": np.ones((4, 1), np.float32)},
            {"weight_block_size": None},
            r"\[4, 1\].*\[\] or \[1\] or \[20\] or \[20, 1\]",
        ),
    ],
)
def test_damaged_tensors(
    tmp_path: Path, changed: Tensors, options: dict[str, Any], message: str
) -> None:
    tensors = {"m.weight": codes(20, 20), "m.weight_scale_inv": scales(2, 2), **changed}
    with pytest.raises(WeightFormatError, match=message):
        open_part(tmp_path, tensors, {**config(weight_block_size=[16, 16]), **options})


def test_a_scale_without_its_weight(tmp_path: Path) -> None:
    with pytest.raises(WeightFormatError, match=r"'m\.weight' is missing"):
        open_part(tmp_path, {"m.weight_scale": scales()}, config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_scheme": "magic"}, "activation_scheme = magic .*known: dynamic, static"),
        ({"fmt": "e3m4"}, "fmt = e3m4 .*known: e4m3"),
        ({"scale_fmt": "ue5m3"}, "scale_fmt = ue5m3 .*known: float, ue8m0"),
        ({"expert_dtype": "int4"}, "expert_dtype = int4 .*known: fp8, fp4"),
        ({"moe_quant_algo": "NVFP4"}, "moe_quant_algo = NVFP4 .*known: FP8"),
        ({"weight_block_size": [128]}, "weight_block_size = .*two integers"),
        ({"weight_block_size": [128, 0]}, "weight_block_size = .*above 0"),
    ],
)
def test_options_that_are_not_read(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_part(tmp_path, {"m.weight": codes(2, 2)}, config(**change))
