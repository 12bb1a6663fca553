"""Weights of one small integer each, with a scale and a zero for each group of input features."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import F32, I32, AnyArray
from vllmx_core.records import Record


class CodedRows(Record):
    """Rows of a matrix as integers: weight = (code - zero) * scale, the product rounded once.

    What GPTQ, AWQ, int8 and their like have in common once their words are unpacked: a backend with
    a kernel for it needs to know nothing else of them.
    """

    codes: npt.NDArray[np.uint8]
    """(n, cols)"""
    scales: F32
    """(n, groups)"""
    zeros: AnyArray | None
    """(n, groups) integers; None: 0"""
    group_of: I32 | None
    """(cols,) group of each input feature; None: groups of equal size, which divides cols, in
    order"""

    def to_f32(self) -> F32:
        """(n, cols)"""
        values: F32 = self.codes.astype(np.float32)
        count, groups = self.scales.shape
        for stored, apply in ((self.zeros, np.subtract), (self.scales, np.multiply)):
            if stored is None:
                continue
            operand = stored.astype(np.float32, copy=False)
            if self.group_of is not None:
                apply(values, operand[:, self.group_of], out=values)
            else:
                grouped = values.reshape(count, groups, -1)
                apply(grouped, operand[:, :, None], out=grouped)
        return values
