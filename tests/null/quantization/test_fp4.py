"""MXFP4 and NVFP4 against the plain statement, and MXFP4 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.errors import UnsupportedModelError, WeightFormatError

from . import statement
from .checkpoints import E4M3, assert_same_bits, open_part, open_source

Tensors = dict[str, NDArray[Any]]
RNG = np.random.default_rng(4)
MXFP4 = {"quant_method": "mxfp4"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


def octets(*shape: int, low: int = 0, high: int = 256) -> NDArray[np.uint8]:
    return RNG.integers(low, high, shape, dtype=np.uint8)


def test_mxfp4_experts(tmp_path: Path) -> None:
    blocks, scales = octets(3, 6, 5, 16), octets(3, 6, 5)
    scales[0, 0] = [0, 1, 127, 254, 255]  # least, subnormal product, one, greatest, NaN
    tensors = {"e.up_blocks": blocks, "e.up_scales": scales, "e.up_bias": np.ones((3, 6), "f4")}
    source = open_source(tmp_path, tensors, MXFP4)
    assert set(source.names()) == {"e.up", "e.up_bias"}
    part = source.part("e.up")
    assert (part.shape, part.layout.kind, part.layout.group_size) == ((3, 6, 160), "fp4", 32)
    values = part.dequantize()
    with np.errstate(over="ignore"):
        for expert in range(3):

            def scale(o: int, group: int, expert: int = expert) -> float:
                return statement.e8m0(int(scales[expert, o, group]))

            expected = statement.fp4(blocks[expert].reshape(6, -1), scale, 32)
            assert_same_bits(values[expert], expected)


def test_mxfp4_against_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = octets(2, 8, 3, 16), octets(2, 8, 3, low=100, high=150)
    part = open_part(tmp_path, {"e_blocks": blocks, "e_scales": scales}, MXFP4, "e")
    theirs = module.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    assert_same_bits(part.dequantize(), theirs.transpose(1, 2).contiguous().numpy())


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"])
def test_nvfp4_of_modelopt(tmp_path: Path, algorithm: str) -> None:
    packed, scales = octets(5, 40), octets(5, 5)
    whole = np.float32(0.0123)
    tensors: Tensors = {
        "m.weight": packed,
        "m.weight_scale": scales.view(E4M3),
        "m.weight_scale_2": np.array(whole),
        "m.input_scale": np.array([0.5], np.float32),
    }
    part = open_part(tmp_path, tensors, {**NVFP4, "quant_algo": algorithm})
    assert (part.layout.kind, part.layout.group_size) == ("fp4", 16)
    assert part.layout.options["activations"] == "static"
    assert set(part.buffers) == {"weight", "scale", "global_scale", "input_scale"}

    def scale(o: int, group: int) -> Any:
        return np.float32(statement.e4m3(int(scales[o, group]))) * whole

    assert_same_bits(part.dequantize(), statement.fp4(packed, scale, 16))


def test_mixed_precision_has_both(tmp_path: Path) -> None:
    tensors: Tensors = {
        "a.weight": octets(2, 16),
        "a.weight_scale": octets(2, 2).view(E4M3),
        "a.weight_scale_2": np.ones((), np.float32),
        "b.weight": octets(2, 16).view(E4M3),
        "b.weight_scale": np.ones((), np.float32),
    }
    layers = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    mixed = {**NVFP4, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    source = open_source(tmp_path, tensors, mixed)
    assert set(source.names()) == {"a.weight", "b.weight"}
    assert [source.part(f"{m}.weight").layout.kind for m in "ab"] == ["fp4", "fp8"]
    only = open_source(tmp_path, tensors, NVFP4)
    with pytest.raises(WeightFormatError, match=r"'b\.weight' is stored as f8e4m3.*fp4"):
        only.part("b.weight")
    ignoring = open_source(tmp_path, tensors, {**NVFP4, "exclude_modules": ["a*"]})
    with pytest.raises(WeightFormatError, match="not quantised"):
        ignoring.part("a.weight")


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        ((2, 4, 3, 8), (2, 4, 3), r"'e_blocks' has shape \[2, 4, 3, 8\].*16 bytes"),
        ((2, 4, 3), (2, 4, 3), r"'e_blocks' has shape \[2, 4, 3\].*4 axes"),
        ((2, 4, 3, 16), (2, 4, 2), r"'e_scales' has shape \[2, 4, 2\].*\[2, 4, 3\]"),
    ],
)
def test_damaged_mxfp4(
    tmp_path: Path, blocks: tuple[int, ...], scales: tuple[int, ...], message: str
) -> None:
    tensors = {"e_blocks": octets(*blocks), "e_scales": octets(*scales)}
    with pytest.raises(WeightFormatError, match=message):
        open_part(tmp_path, tensors, MXFP4, "e")
    excluding = {**MXFP4, "modules_to_not_convert": ["e"]}
    with pytest.raises(WeightFormatError, match=r"'e' .*not quantised"):
        open_part(tmp_path, tensors, excluding, "e")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m.weight_scale": octets(5, 4).view(E4M3)}, r"'m\.weight_scale' .*\[5, 4\].*\[5, 5\]"),
        ({"m.weight_scale": octets(5, 5)}, r"'m\.weight_scale' is stored as u8.*f8e4m3"),
        ({"m.weight_scale_2": np.ones(5, np.float32)}, r"'m\.weight_scale_2' has shape \[5\]"),
        ({"m.weight": octets(5, 39)}, r"'m\.weight' has shape \[5, 39\].*multiple of 8"),
    ],
)
def test_damaged_nvfp4(tmp_path: Path, changed: Tensors, message: str) -> None:
    tensors: Tensors = {
        "m.weight": octets(5, 40),
        "m.weight_scale": octets(5, 5).view(E4M3),
        "m.weight_scale_2": np.ones((), np.float32),
        **changed,
    }
    with pytest.raises(WeightFormatError, match=message):
        open_part(tmp_path, tensors, NVFP4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "INT4_AWQ"}, "quant_algo = INT4_AWQ .*known: FP8, .*NVFP4"),
        ({"quant_algo": None}, "quant_algo = None .*known: FP8"),
        ({"group_size": 32}, "group_size = 32 .*known: 16"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"x.y": {"quant_algo": "W4A8"}}},
            r"layer x\.y.*quant_algo = W4A8 .*known: FP8",
        ),
        ({"quantized_layers": {"x": "FP8"}}, r"layer x.*quant_algo = \(absent\)"),
    ],
)
def test_options_that_are_not_read(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_part(tmp_path, {"m.weight": octets(2, 2)}, {**NVFP4, **change})
