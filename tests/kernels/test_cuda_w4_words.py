"""Integers of GPTQ, AWQ and compressed-tensors on their way into the order of fragments: bytes of a
checkpoint through a piece, the kernel on the emulator, and beside it what the host makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.spec import RankShare
from vllmx_core.weights.tensor import RawTensor
from vllmx_core.weights.views import share_of
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.loading.streaming import stream
from vllmx_cuda.matrices import pieces
from vllmx_cuda.matrices.w4 import stored_pieces
from vllmx_cuda.matrices.w4_packing import packed_rows, packing_of
from vllmx_cuda.matrices.w4_words import stored_words
from vllmx_models.quantization.awq import awq
from vllmx_models.quantization.compressed_tensors import compressed_tensors
from vllmx_models.quantization.gptq import gptq
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulated_products import array
from vllmx_testing.cuda.emulator import Emulator

from .cuda_arrays import Array

KINDS = {
    "int32": "i32",
    "float16": "f16",
    "float32": "f32",
    "bfloat16": "bf16",
    "int8": "i8",
    "int64": "i64",
}


class Tensors:
    """A `WeightSource` of the arrays of one module."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = {f"w.{suffix}": array for suffix, array in arrays.items()}

    def names(self) -> Any:
        return self._arrays

    def part(self, name: str) -> WeightPart:
        values = np.ascontiguousarray(self._arrays[name])
        kind: Any = KINDS[values.dtype.name]
        raw = RawTensor(name, kind, values.shape, values.reshape(-1).view(np.uint8))
        return StoredPart(name, values.shape, DENSE, {"weight": raw})

    def close(self) -> None: ...


def words(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)


def scales(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    return (rng.standard_normal(shape) / 8).astype(dtype)


def gptq_part(
    rng: np.random.Generator,
    rows: int,
    cols: int,
    group: int,
    *,
    bits: int,
    v2: bool = False,
    shuffled: bool = False,
    symmetric: bool = False,
    dtype: Any = np.float16,
) -> WeightPart:
    groups, per = -(-cols // group), 32 // bits
    arrays = {
        "qweight": words(rng, cols // per, rows),
        "qzeros": words(rng, groups, rows // per),
        "scales": scales(rng, dtype, groups, rows),
        "g_idx": rng.permutation(np.arange(cols, dtype=np.int32) // group),
    }
    if not shuffled:
        del arrays["g_idx"]
    if symmetric:
        del arrays["qzeros"]
    config = {
        "bits": bits,
        "group_size": group if groups > 1 else -1,
        "desc_act": shuffled,
        "sym": symmetric,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return gptq(Tensors(arrays), config).part("w.weight")


def awq_part(rng: np.random.Generator, rows: int, cols: int, group: int) -> WeightPart:
    arrays = {
        "qweight": words(rng, cols, rows // 8),
        "qzeros": words(rng, cols // group, rows // 8),
        "scales": scales(rng, np.float16, cols // group, rows),
    }
    config = {"bits": 4, "group_size": group, "version": "gemm"}
    return awq(Tensors(arrays), config).part("w.weight")


def packed_part(
    rng: np.random.Generator,
    rows: int,
    cols: int,
    group: int | None,
    *,
    bits: int,
    zeros: str,
    dtype: Any = ml_dtypes.bfloat16,
    low: int = -8,
    **changed: Array,
) -> WeightPart:
    """group: None: a scale a row; 0: one for all."""
    groups, per = cols // group if group else 1, 32 // bits
    arrays = {
        "weight_packed": words(rng, rows, cols // per),
        "weight_shape": np.array([rows, cols]),
        "weight_scale": scales(rng, dtype, rows, groups),
    }
    if zeros == "words":
        arrays["weight_zero_point"] = words(rng, rows // per, groups)
    elif zeros == "bytes":
        found = rng.integers(low, 100, (rows, groups)).astype(np.int8)
        arrays["weight_zero_point"] = found
    weights = {
        "num_bits": bits,
        "strategy": {None: "channel", 0: "tensor"}.get(group, "group"),
        "group_size": group or None,
        "symmetric": zeros == "none",
    }
    config = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    source = compressed_tensors(Tensors({**arrays, **changed}), config)
    return source.part("w.weight")


def repacked(emulator: Emulator, part: WeightPart) -> Array:
    """(row tiles, bytes) as the device has them."""
    packing = packing_of(part)
    assert packing is not None
    device = EmulatedDevice(emulator=emulator)
    columns = device.empty(len(packing.order)) if packing.order else None
    if columns is not None:
        array(columns, np.uint8)[...] = np.frombuffer(packing.order, np.uint8)
    stored = stored_words(part, packing, columns)
    assert stored is not None
    assert stored.kernel.kernel.entry == "w4_repack_words"
    rows, cols = part.shape
    size = rows // 16 * packing.row_tile_bytes(cols)
    tiles = device.empty(size)
    staging: Memory = device.empty(max(pieces.PIECE_BYTES, stored.tile_bytes))
    stream(list(stored_pieces(stored, rows, tiles)), device, staging)
    return array(tiles, np.uint8).reshape(rows // 16, -1)


RNG = np.random.default_rng(3)
BF16 = ml_dtypes.bfloat16
PARTS = {
    "gptq": gptq_part(RNG, 48, 96, 32, bits=4),
    "gptq v2, one group": gptq_part(RNG, 272, 32, 32, bits=4, v2=True, dtype=BF16),
    "gptq desc_act": gptq_part(RNG, 32, 576, 64, bits=4, shuffled=True),
    "gptq 8 bit": gptq_part(RNG, 48, 256, 128, bits=8, dtype=np.float32),
    "gptq 8 bit desc_act": gptq_part(RNG, 16, 128, 32, bits=8, v2=True, shuffled=True),
    "gptq symmetric": gptq_part(RNG, 16, 288, 288, bits=4, symmetric=True),
    "awq": awq_part(RNG, 48, 96, 32),
    "awq wide": awq_part(RNG, 16, 640, 128),
    "awq tall": awq_part(RNG, 272, 64, 64),
    "packed": packed_part(RNG, 48, 96, 32, bits=4, zeros="words"),
    "packed, bytes": packed_part(RNG, 32, 576, 64, bits=4, zeros="bytes", dtype=np.float16),
    "packed, a scale a row": packed_part(RNG, 272, 32, None, bits=4, zeros="none"),
    "packed 8 bit": packed_part(RNG, 32, 160, 32, bits=8, zeros="words", dtype=np.float32),
    "packed 8 bit, bytes": packed_part(RNG, 16, 128, 64, bits=8, zeros="bytes", low=-128),
}
PARTS |= {
    f"{what} of a rank's {axis}": share_of(PARTS[what], RankShare(*PARTS[what].shape, **share))
    for what in ("gptq", "awq", "packed")
    for axis, share in {"rows": {"rows": ((16, 32),)}, "columns": {"cols": (64, 96)}}.items()
}


@pytest.mark.parametrize("name", PARTS)
def test_words_of_a_checkpoint(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Byte for byte what the host makes of it, as a whole and in pieces of 32 rows."""
    part = PARTS[name]
    packing = packing_of(part)
    assert packing is not None
    want = packed_rows(part, packing, 0, part.shape[0])
    np.testing.assert_array_equal(repacked(emulator, part), want)
    stored = stored_words(part, packing, None)
    assert stored is not None
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2 * stored.tile_bytes)
    np.testing.assert_array_equal(repacked(emulator, part), want)


def damaged(what: str, value: float) -> WeightPart:
    """A matrix with a fault in the last row, with groups of 64."""
    rng = np.random.default_rng(4)
    if what == "zero":
        zeros = np.zeros((32, 3), np.int8)
        zeros[31, 2] = value
        return packed_part(rng, 32, 192, 64, bits=4, zeros="bytes", weight_zero_point=zeros)
    found = scales(rng, np.float16, 32, 3)
    found[31, 2] = value
    return packed_part(rng, 32, 192, 64, bits=4, zeros="words", weight_scale=found)


DAMAGED = [
    ("zero", -9, "'w.weight' has a zero point of -1,.* within 0 and 127"),
    ("zero", 120, "'w.weight' has a zero point of 128,.* within 0 and 127"),
    ("scale", np.nan, "'w.weight' has a scale of nan"),
    ("scale", -np.inf, "'w.weight' has a scale of -?inf"),
]


@pytest.mark.parametrize(("what", "value", "message"), DAMAGED)
def test_what_no_checkpoint_has_is_refused(
    emulator: Emulator, what: str, value: float, message: str
) -> None:
    part = damaged(what, value)
    with pytest.raises(WeightFormatError, match=message):
        repacked(emulator, part)
    packing = packing_of(part)
    assert packing is not None
    with pytest.raises(WeightFormatError, match=message):
        packed_rows(part, packing, 0, 32)


@pytest.mark.parametrize(
    "part",
    [
        gptq_part(RNG, 32, 64, 32, bits=2),
        packed_part(RNG, 32, 64, 0, bits=4, zeros="none", weight_scale=np.ones((1,), "f2")),
    ],
    ids=["2 bits", "one scale"],
)
def test_the_host_puts_the_rest_into_order(part: WeightPart) -> None:
    packing = packing_of(part)
    assert packing is not None
    assert stored_words(part, packing, None) is None
