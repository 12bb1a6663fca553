"""Integers of 4 or 8 bits in 32-bit words, as GPTQ, AWQ ("gemm") and compressed-tensors store them:
the device puts them into the order of `kernels/w4_codes.h` while weights are loaded.

`vllmx_models.quantization` describes their layouts. What is not here (other numbers of bits,
AWQ's "gemv", a scale for the whole tensor, formats of plugins) is put into order by the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from vllmx_core.errors import WeightFormatError
from vllmx_core.weights.part import StoredPart, WeightPart
from vllmx_core.weights.tensor import ITEM_BYTES, RawTensor

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.kernel_specs import KERNELS, Variant
from vllmx_cuda.kernel_specs.w4 import (
    PACKED_COLUMNS,
    PACKED_ROWS,
    TILE_ROWS,
    TRANSPOSED,
    ZERO_CODES,
)
from vllmx_cuda.matrices.w4_packing import Packing, scale_refusal, zero_refusal

_NOT_FINITE = 0x7F800000
"""The least fault that is the bits of a scale; the last 16 bits of a lesser one are a zero."""


@dataclass(frozen=True, slots=True)
class Field:
    """A checkpoint's tensor over rows and columns, or over rows and groups."""

    raw: RawTensor
    shape: tuple[int, int]  # (rows / per, n) or, `transposed`, (n, rows / per)
    transposed: bool
    per: int = 1
    """Rows that share an entry."""

    @property
    def tile_bytes(self) -> int:
        """Bytes that 16 rows take."""
        others = self.shape[0 if self.transposed else 1]
        return TILE_ROWS // self.per * others * ITEM_BYTES[self.raw.dtype]

    def steps(self, rows: int) -> tuple[int, int]:
        """The steps of so many rows: from one row's entry to the next, from one column's to the
        next."""
        return (1, rows // self.per) if self.transposed else (self.shape[1], 1)

    def fill(self, begin: int, end: int, buffer: Bytes) -> None:
        first, last = begin // self.per, end // self.per
        if self.transposed:
            found = np.asarray(self.raw.in_memory().view())[:, first:last]
        else:
            rows = np.asarray(self.raw.rows(first, last).view())
            found = rows.reshape(last - first, self.shape[1])
        np.copyto(buffer.view(found.dtype).reshape(found.shape), found)


@dataclass(frozen=True, slots=True)
class StoredWords:
    """`vllmx_cuda.matrices.w4.StoredRows`: codes, scales, then zeros."""

    part: WeightPart
    packing: Packing
    packed: int
    """Value of VX_PACKED."""
    codes: Field
    scales: Field
    zeros: Field | None
    zero_add: int
    columns: Memory | None
    """`Packing.order` on the device."""

    @property
    def fields(self) -> tuple[Field, ...]:
        return (self.codes, self.scales, *((self.zeros,) if self.zeros else ()))

    @property
    def tile_bytes(self) -> int:
        return sum(field.tile_bytes for field in self.fields)

    @property
    def kernel(self) -> Variant:
        in_bytes = int(self.zeros is not None and self.zeros.raw.dtype == "i8")
        return KERNELS["w4_repack_words"].variant(
            **self.packing.options, VX_PACKED=self.packed, VX_ZERO_BYTES=in_bytes
        )

    def fill(self, begin: int, end: int, buffer: Bytes) -> None:
        at = 0
        for field in self.fields:
            size = (end - begin) // TILE_ROWS * field.tile_bytes
            field.fill(begin, end, buffer[at : at + size])
            at += size

    def launch(
        self, tiles: Memory, rows: int, device: Device, stored: Memory, fault: Memory
    ) -> None:
        spans, at = [], 0
        for field in self.fields:
            size = rows // TILE_ROWS * field.tile_bytes
            spans.append(stored.at(at, size))
            at += size
        zeros = spans[2] if self.zeros else None
        pitch = max(self.codes.steps(rows))
        zero_steps = self.zeros.steps(rows) if self.zeros else (0, 0)
        cols = self.part.shape[1]
        arguments = (
            *spans[:2],
            zeros,
            self.columns,
            tiles,
            fault,
            cols,
            self.packing.group_shift,
            pitch,
            *self.scales.steps(rows),
            *zero_steps,
            self.zero_add,
        )
        device.launch(self.kernel, {"outputs": rows, "width": cols}, arguments)

    def refusal(self, fault: int) -> WeightFormatError:
        if fault < _NOT_FINITE:
            zero = int(np.uint16(fault & 0xFFFF).view(np.int16))
            return zero_refusal(self.part, self.packing, zero)
        return scale_refusal(self.part, float(np.uint32(fault).view(np.float32)))


def stored_words(part: WeightPart, packing: Packing, columns: Memory | None) -> StoredWords | None:
    """The words of a part with this packing; None where the kernel does not know its layout, or
    groups are filled up."""
    if not isinstance(part, StoredPart) or part.layout.bits != packing.bits or packing.filled:
        return None
    kind, options, raw = part.layout.kind, part.layout.options, part.buffers
    per = 32 // packing.bits
    if kind == "gptq":
        zeros = _field(raw["qzeros"], True, per) if "qzeros" in raw else None
        return StoredWords(
            part,
            packing,
            TRANSPOSED,
            _field(raw["qweight"], True),
            _field(raw["scales"], True),
            zeros,
            int(options["zero_offset"]),
            columns,
        )
    if kind == "awq" and options["packing"] == "gemm":
        return StoredWords(
            part,
            packing,
            PACKED_ROWS,
            _field(raw["qweight"], True, per),
            _field(raw["scales"], True),
            _field(raw["qzeros"], True, per),
            0,
            columns,
        )
    if kind == "pack_int":
        scales, zeros, add = _by_row(part, raw["scale"]), None, 0
        if packing.zero == ZERO_CODES:
            stored = raw["zero_point"]
            if stored.dtype == "i32":
                zeros = _field(stored, False, per)
            else:
                zeros, add = _by_row(part, stored), 1 << (packing.bits - 1)
        if scales is None or (packing.zero == ZERO_CODES and zeros is None):
            return None
        codes = _field(raw["weight"], False)
        return StoredWords(part, packing, PACKED_COLUMNS, codes, scales, zeros, add, columns)
    return None


def _by_row(part: WeightPart, raw: RawTensor) -> Field | None:
    """(rows, groups) or (rows,); None: one for all rows."""
    if raw.shape[:1] != part.shape[:1]:
        return None
    return Field(raw, (part.shape[0], math.prod(raw.shape[1:])), False)


def _field(raw: RawTensor, transposed: bool, per: int = 1) -> Field:
    """A stored matrix as a field."""
    first, second = raw.shape
    return Field(raw, (first, second), transposed, per)
