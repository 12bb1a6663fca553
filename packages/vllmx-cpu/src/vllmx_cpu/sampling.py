"""`SamplingRows` as arguments of the native sampler, and its results as `StepResult`."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import InvalidRequestError
from vllmx_core.plan import (
    F32,
    I32,
    MAX_LISTED_LOGPROBS,
    AnyArray,
    LogprobRows,
    SamplingRows,
    StepResult,
)

from vllmx_cpu.memory import Bytes
from vllmx_cpu.structs import VxSampler

COLUMNS: tuple[tuple[npt.DTypeLike, tuple[str, ...]], ...] = (
    (
        np.float32,
        (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ),
    ),
    (np.int32, ("top_k", "position", "target", "num_logprobs")),
    (np.uint64, ("seed",)),
)
"""The parameters that each row has one of, by type."""


class SamplerCall:
    """The sampler op of one step: copies of the parameters, room for the results."""

    def __init__(self, rows: SamplingRows) -> None:
        if rows.max_logprobs > MAX_LISTED_LOGPROBS:  # VX_MAX_LOGPROBS of native/sampler.h
            raise InvalidRequestError(
                f"num_logprobs must be at most {MAX_LISTED_LOGPROBS}, got {rows.max_logprobs}: ask"
                " for whole rows",
                param="logprobs",
            )
        count, width = rows.num_rows, max(0, rows.max_logprobs)
        self._kept: list[AnyArray] = []
        self.struct = VxSampler(max_logprobs=rows.max_logprobs)
        for dtype, names in COLUMNS:
            self._set_columns(rows, names, dtype)
        self._set_groups(rows)
        self.ids: I32 = np.empty(count, np.int32)
        self._logprobs: LogprobRows | None = None
        self._whole = rows.whole
        self._logits: F32 | None = None
        self.struct.ids = self.ids.ctypes.data
        if rows.max_logprobs >= 0:
            self._logprobs = _logprob_rows(count, width)
            for name in ("chosen", "rank", "top_ids", "top"):
                setattr(self.struct, name, getattr(self._logprobs, name).ctypes.data)

    def _set(self, name: str, values: AnyArray, dtype: npt.DTypeLike) -> None:
        array: npt.NDArray[Any] = np.array(values, dtype, order="C")
        self._kept.append(array)
        setattr(self.struct, name, array.ctypes.data)

    def _set_columns(
        self, rows: SamplingRows, names: tuple[str, ...], dtype: npt.DTypeLike
    ) -> None:
        """Copies them side by side: a copy of each would cost more than what it copies."""
        columns = [getattr(rows, name) for name in names]
        array: npt.NDArray[Any] = np.concatenate(columns, dtype=dtype, casting="unsafe")
        self._kept.append(array)
        address, size = array.ctypes.data, array.nbytes // len(names)
        for name in names:
            setattr(self.struct, name, address)
            address += size

    def _set_groups(self, rows: SamplingRows) -> None:
        if rows.edits is not None:
            self._set("edit_start", rows.edits.start, np.int32)
            self._set("edit_ids", rows.edits.ids, np.int32)
            self._set("edit_values", rows.edits.values, np.float32)
        if rows.counts is not None:
            self._set("count_start", rows.counts.start, np.int32)
            self._set("count_ids", rows.counts.ids, np.int32)
            self._set("output_counts", rows.counts.output_counts, np.int32)
            self._set("pending", rows.counts.pending, np.uint8)
        if rows.mask_index is not None and rows.masks is not None:
            self._set("mask_index", rows.mask_index, np.int32)
            self._set("masks", rows.masks, np.uint32)
        if rows.group_from is not None:
            self._set("group_from", rows.group_from, np.int32)

    def bind(self, logits: int, vocab_size: int, workspace: Bytes) -> None:
        """Sets the address at which the step leaves its (L, V) logits."""
        self.struct.logits = logits
        self.struct.vocab_size = vocab_size
        self.struct.workspace = workspace.ctypes.data
        if self._whole is not None:
            self._logits = np.empty((self._whole.size, vocab_size), np.float32)
            index: I32 = np.full(self.ids.size, -1, np.int32)
            index[self._whole] = np.arange(self._whole.size)
            self._set("whole_index", index, np.int32)
            self.struct.whole = self._logits.ctypes.data

    @property
    def address(self) -> int:
        """The address of the argument struct."""
        return ctypes.addressof(self.struct)

    def result(self, seconds: float) -> StepResult:
        """The result of the step; call when it has finished."""
        return StepResult(self.ids.copy(), self._logprobs, self._logits, seconds)


def _logprob_rows(count: int, width: int) -> LogprobRows:
    chosen: F32 = np.zeros(count, np.float32)
    top: F32 = np.zeros((count, width), np.float32)
    rank: I32 = np.zeros(count, np.int32)
    return LogprobRows(chosen, rank, np.full((count, width), -1, np.int32), top)
