"""The end of a step that samples nothing: its vectors, copied out before the next step runs."""

from __future__ import annotations

import ctypes

import numpy as np
from vllmx_core.plan import F32, I32, StepResult

from vllmx_cpu.structs import VxElementwise


class VectorsCall:
    """The op "scale" by one, behind the tape, over the step's logit rows: the next step may write
    into the arena before this one's result is read.

    Args:
        rows: L
    """

    function = "scale"

    def __init__(self, rows: int, width: int) -> None:
        self.ids: I32 = np.zeros(0, np.int32)
        self._vectors: F32 = np.empty((rows, width), np.float32)
        self.struct = VxElementwise(y=self._vectors.ctypes.data, width=width, factor=1.0)

    def bind(self, vectors: int) -> None:
        """Sets the address at which the step leaves its (L, width) vectors."""
        self.struct.x = vectors

    @property
    def address(self) -> int:
        """The address of the argument struct."""
        return ctypes.addressof(self.struct)

    def result(self, seconds: float) -> StepResult:
        """The result of the step; call when it has finished."""
        return StepResult(self.ids, elapsed_s=seconds, vectors=self._vectors)
