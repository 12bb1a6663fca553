"""Matrices whose input features are in groups of any sizes (act-order), and what they mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.tensor import DType, RawTensor
from vllmx_models.quantization.compressed_tensors import compressed_tensors
from vllmx_models.quantization.gptq import gptq

from ..integration.quantizers import ct_config, pack_rows  # noqa: TID252 - no package to name

DTYPES: Mapping[str, DType] = {"int32": "i32", "float16": "f16", "int64": "i64", "int8": "i8"}
assert set(DTYPES.values()) <= set(get_args(DType))
UNEVEN = (1, 31, 32, 0, 33, 64, 100, 123)
"""Features of each group, filled up 480 columns: seven tiles of 64 and a half."""
WHOLE = (64, 32, 96)
"""Uneven, and nothing is to be filled up."""


class Tensors:
    """A `WeightSource` of arrays."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = arrays

    def names(self) -> Collection[str]:
        return self._arrays

    def part(self, name: str) -> WeightPart:
        array = np.ascontiguousarray(self._arrays[name])
        data = array.reshape(-1).view(np.uint8)
        raw = RawTensor(name, DTYPES[array.dtype.name], array.shape, data)
        return StoredPart(name, array.shape, DENSE, {"weight": raw})

    def close(self) -> None: ...


@dataclass(frozen=True)
class Case:
    part: WeightPart
    codes: NDArray[np.float64]  # (rows, cols) code times scale
    zeros: NDArray[np.float64]  # (rows, cols) zero times scale

    @property
    def weights(self) -> NDArray[np.float64]:
        return self.codes - self.zeros


def act_order(
    kind: str,
    bits: int,
    sizes: Sequence[int] = UNEVEN,
    *,
    symmetric: bool = False,
    shuffled: bool = True,
    rows: int = 80,
) -> Case:
    """Random integers as GPTQ ("gptq") or compressed-tensors ("pack_int") has them: zeros of GPTQ
    are codes, those of the other also lie beyond."""
    random = np.random.default_rng([bits, symmetric, *sizes])
    groups, cols, top = len(sizes), sum(sizes), 1 << bits
    group_of = np.repeat(np.arange(groups, dtype=np.int32), sizes)
    if shuffled:
        group_of = random.permutation(group_of)
    codes = random.integers(0, top, (rows, cols))
    scales = (random.uniform(0.5, 2, (rows, groups)) / 100).astype(np.float16)
    most = min(top + 12, 256) if kind == "pack_int" else top
    zeros = random.integers(0, most, (rows, groups))
    if symmetric:
        zeros[...] = top // 2
    make = _gptq if kind == "gptq" else _pack_int
    part = make(codes, scales, None if symmetric else zeros, group_of, bits, cols // groups)
    wide = scales.astype(np.float64)[:, group_of]
    return Case(part, codes * wide, zeros[:, group_of] * wide)


def _gptq(codes: Any, scales: Any, zeros: Any, group_of: Any, bits: int, size: int) -> WeightPart:
    arrays = {"w.qweight": pack_rows(codes, bits).T, "w.scales": scales.T, "w.g_idx": group_of}
    if zeros is not None:
        arrays["w.qzeros"] = pack_rows((zeros.T - 1) % (1 << bits), bits)
    config = {"bits": bits, "group_size": size, "desc_act": True, "sym": zeros is None}
    return gptq(Tensors(arrays), config).part("w.weight")


def _pack_int(
    codes: Any, scales: Any, zeros: Any, group_of: Any, bits: int, size: int
) -> WeightPart:
    arrays = {
        "w.weight_packed": pack_rows(codes, bits),
        "w.weight_shape": np.array(codes.shape),
        "w.weight_scale": scales,
        "w.weight_g_idx": group_of,
    }
    if zeros is not None:
        arrays["w.weight_zero_point"] = (zeros - (1 << (bits - 1))).astype(np.int8)
    weights = {"num_bits": bits, "strategy": "group", "group_size": size, "actorder": "group"}
    config = ct_config({**weights, "symmetric": zeros is None})
    return compressed_tensors(Tensors(arrays), config).part("w.weight")


CASES = {
    f"{kind} {bits} bit{' symmetric' * symmetric}": act_order(kind, bits, symmetric=symmetric)
    for kind in ("gptq", "pack_int")
    for bits in (4, 8)
    for symmetric in (False, True)
}
CASES["gptq 3 bit"] = act_order("gptq", 3, rows=96)
CASES["whole units"] = act_order("pack_int", 4, WHOLE)
