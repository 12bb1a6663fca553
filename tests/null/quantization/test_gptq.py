"""GPTQ against the plain statement of its format, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllmx_core.errors import UnsupportedModelError, WeightFormatError

from . import statement
from .checkpoints import BF16, assert_same_bits, open_part, open_source

Tensors = dict[str, NDArray[Any]]


def words(random: np.random.Generator, *shape: int) -> NDArray[np.int32]:
    """Any 32 bits."""
    return random.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def module(
    bits: int,
    rows: int,
    cols: int,
    group_size: int,
    *,
    g_idx: str = "none",
    scale_dtype: Any = np.float16,
    seed: int = 0,
) -> Tensors:
    """Random tensors of module "m"; every word is a valid one."""
    random = np.random.default_rng(seed)
    groups = -(-cols // (group_size if group_size > 0 else cols))
    tensors: Tensors = {
        "m.qweight": words(random, cols * bits // 32, rows),
        "m.qzeros": words(random, groups, rows * bits // 32),
        "m.scales": random.standard_normal((groups, rows)).astype(np.float32).astype(scale_dtype),
    }
    in_order = np.arange(cols, dtype=np.int32) // (group_size if group_size > 0 else cols)
    if g_idx == "in order":
        tensors["m.g_idx"] = in_order
    elif g_idx == "shuffled":
        tensors["m.g_idx"] = random.permutation(in_order)
    return tensors


def plain(
    tensors: Tensors, bits: int, group_size: int, *, minus_one: bool = True
) -> NDArray[np.float32]:
    cols = tensors["m.qweight"].shape[0] * 32 // bits
    return statement.gptq(
        tensors["m.qweight"],
        tensors.get("m.qzeros"),
        tensors["m.scales"],
        tensors.get("m.g_idx"),
        bits=bits,
        group_size=group_size if group_size > 0 else cols,
        stored_minus_one=minus_one,
    )


def config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False, **more}


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group_size", [-1, 32, 40])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bits_groups_and_zero_points(
    tmp_path: Path, bits: int, group_size: int, version: str
) -> None:
    tensors = module(bits, 64, 96, group_size, seed=bits)  # 40 does not divide 96
    part = open_part(tmp_path, tensors, config(bits, group_size, checkpoint_format=version))
    assert part.shape == (64, 96)
    assert (part.layout.kind, part.layout.bits) == ("gptq", bits)
    assert part.layout.group_size == (96 if group_size == -1 else group_size)
    expected = plain(tensors, bits, group_size, minus_one=version == "gptq")
    assert_same_bits(part.dequantize(), expected)


@pytest.mark.parametrize("scale_dtype", [np.float16, np.float32, BF16])
@pytest.mark.parametrize("g_idx", ["in order", "shuffled"])
@pytest.mark.parametrize("bits", [3, 4])
def test_group_index(tmp_path: Path, bits: int, g_idx: str, scale_dtype: Any) -> None:
    tensors = module(bits, 32, 64, 16, g_idx=g_idx, scale_dtype=scale_dtype)
    part = open_part(tmp_path, tensors, config(bits, 16, desc_act=g_idx == "shuffled"))
    assert part.layout.options["act_order"] is (g_idx == "shuffled")
    assert set(part.buffers) == {"qweight", "qzeros", "scales", "g_idx"}
    assert_same_bits(part.dequantize(), plain(tensors, bits, 16))


@pytest.mark.parametrize("rows", [8, 264, 776])
def test_more_rows_than_are_unpacked_at_once(tmp_path: Path, rows: int) -> None:
    tensors = module(4, rows, 32, 8)
    assert_same_bits(open_part(tmp_path, tensors, config(4, 8)).dequantize(), plain(tensors, 4, 8))


def test_symmetric_without_zero_points(tmp_path: Path) -> None:
    tensors = module(4, 16, 32, 8)
    del tensors["m.qzeros"]
    part = open_part(tmp_path, tensors, {**config(4, 8), "sym": True})
    assert_same_bits(part.dequantize(), plain(tensors, 4, 8))
    with pytest.raises(WeightFormatError, match=r"'m\.qzeros' is missing"):
        open_part(tmp_path, tensors, config(4, 8))


def test_three_bits_cross_words(tmp_path: Path) -> None:
    """Value 10 has its low two bits at the end of the first word, value 21 one at the second's."""
    values = [0] * 32
    values[10], values[21] = 0b110, 0b101
    qweight = np.array([[0b10 << 30], [0b1 | (0b1 << 31)], [0b10]], np.int64)
    tensors = {
        "m.qweight": np.repeat(qweight, 32, axis=1).astype(np.uint32).view(np.int32),
        "m.qzeros": np.zeros((1, 3), np.int32),
        "m.scales": np.ones((1, 32), np.float16),
    }
    part = open_part(tmp_path, tensors, config(3, -1, checkpoint_format="gptq_v2"))
    np.testing.assert_array_equal(part.dequantize(), np.tile(np.float32(values), (32, 1)))


def test_overrides_of_single_modules(tmp_path: Path) -> None:
    eight = {key.replace("m.", "a.up."): v for key, v in module(8, 16, 32, 16).items()}
    four = {key.replace("m.", "a.down."): v for key, v in module(4, 16, 32, 8).items()}
    dynamic = {r"+:.*\.up$": {"bits": 8, "group_size": 16}, r"-:.*\.gate$": {}}
    dense = {"a.gate.weight": np.ones((2, 2), np.float16)}
    source = open_source(tmp_path, {**eight, **four, **dense}, config(4, 8, dynamic=dynamic))
    assert set(source.names()) == {"a.up.weight", "a.down.weight", "a.gate.weight"}
    for name, bits, group_size in (("up", 8, 16), ("down", 4, 8)):
        part = source.part(f"a.{name}.weight")
        expected = plain(module(bits, 16, 32, group_size), bits, group_size)
        assert_same_bits(part.dequantize(), expected)
    assert source.part("a.gate.weight").layout.kind == "dense"
    gate = {key.replace("m.", "a.gate."): v for key, v in module(4, 16, 32, 8).items()}
    refusing = open_source(tmp_path / "b", gate, config(4, 8, dynamic=dynamic))
    with pytest.raises(WeightFormatError, match=r"'a\.gate' .*not quantised"):
        refusing.part("a.gate.weight")


DAMAGED: dict[str, tuple[Tensors, str]] = {
    "no scales": ({"m.scales": np.zeros(0)}, r"'m\.scales' is missing.*complete"),
    "short scales": (
        {"m.scales": np.ones((3, 16), np.float16)},
        r"'m\.scales' has shape \[3, 16\].*\[4, 16\]",
    ),
    "wide zeros": (
        {"m.qzeros": np.ones((4, 3), np.int32)},
        r"'m\.qzeros' has shape \[4, 3\].*\[4, 2\]",
    ),
    "dtype": ({"m.qweight": np.ones((4, 16), np.float16)}, r"'m\.qweight' is stored as f16.*i32"),
    "scale dtype": ({"m.scales": np.ones((4, 16), np.int8)}, r"'m\.scales' is stored as i8.*f16"),
    "rank": ({"m.qweight": np.ones(4, np.int32)}, r"'m\.qweight' has shape \[4\].*2 axes"),
    "empty": ({"m.qweight": np.ones((0, 16), np.int32)}, r"'m\.qweight' .*none of them empty"),
    "odd columns": (
        {"m.qweight": np.ones((4, 15), np.int32)},
        r"'m\.qweight' has shape \[4, 15\].*multiple of 8",
    ),
    "index too large": (
        {"m.g_idx": np.full(32, 4, np.int32)},
        r"'m\.g_idx' holds 4 to 4.*from 0 to 3",
    ),
    "index negative": ({"m.g_idx": np.full(32, -1, np.int32)}, r"'m\.g_idx' holds -1"),
    "index too short": (
        {"m.g_idx": np.zeros(31, np.int32)},
        r"'m\.g_idx' has shape \[31\].*\[32\]",
    ),
    "no index": ({"m.g_idx": np.zeros(0)}, r"'m\.g_idx' is missing"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors(tmp_path: Path, case: str) -> None:
    changed, message = DAMAGED[case]
    tensors = {**module(4, 16, 32, 8, g_idx="shuffled"), **changed}
    kept = {name: value for name, value in tensors.items() if value.dtype != np.float64}
    with pytest.raises(WeightFormatError, match=message):
        open_part(tmp_path, kept, config(4, 8, desc_act=True))


def test_three_bits_need_whole_triples(tmp_path: Path) -> None:
    tensors = {**module(3, 32, 32, 8), "m.qweight": np.ones((4, 32), np.int32)}
    with pytest.raises(WeightFormatError, match=r"\[4, 32\].*3-bit"):
        open_part(tmp_path, tensors, config(3, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, r"bits = 5 .*known: 2, 3, 4, 8"),
        ({"bits": True}, "bits = True"),
        ({"bits": 4.0}, "bits = 4.0"),
        ({"bits": [4]}, r"bits = \[4\]"),
        ({"bits": None}, r"bits = None .*known: 2"),
        ({"group_size": 0}, "group_size = 0 must be an integer"),
        ({"group_size": "128"}, "group_size = 128 must be"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format = marlin .*known: gptq, gptq_v2"),
        ({"format": "bitblas"}, r"format = bitblas .*known: gptq, gptq_v2"),
        ({"is_marlin_format": True}, "is_marlin_format = True"),
        ({"pack_dtype": "int16"}, r"pack_dtype = int16 .*int32"),
        ({"sym": 1}, "sym = 1 must be true or false"),
        ({"dynamic": []}, "dynamic = .* must be an object"),
        ({"dynamic": {"x": 4}}, "dynamic = .*objects of options"),
        ({"dynamic": {"(x": {}}}, "not a regular expression"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of strings"),
    ],
)
def test_options_that_are_not_read(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_part(tmp_path, module(4, 16, 32, 8), {**config(4, 8), **change})
