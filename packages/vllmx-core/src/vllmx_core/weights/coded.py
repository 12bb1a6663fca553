"""Weights that are small integers with a scale and a zero for each group of input features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllmx_core.plan import F32, I32, AnyArray
from vllmx_core.records import Record

FILLED_UNIT = 32
"""Columns of the units that `filled_order` fills."""


class CodedRows(Record):
    """Rows of a matrix as integers: weight = (code - zero) * scale, the product rounded once.

    The common form of GPTQ, AWQ, int8 and the like once their words are unpacked; backends with a
    kernel for it need no other knowledge of them.
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

    def factors(self, features: I32) -> tuple[F32, AnyArray | None]:
        """The scales (n, len(features)) of these input features, and their zeros likewise."""
        if self.group_of is None:
            group = features // (self.codes.shape[1] // self.scales.shape[1])
        else:
            group = self.group_of[features]
        zeros = None if self.zeros is None else self.zeros[:, group]
        return self.scales[:, group], zeros

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

    def at(self, index: npt.NDArray[np.int64]) -> CodedRows:
        """Returns the rows of an index."""
        zeros = None if self.zeros is None else self.zeros[index]
        return CodedRows(self.codes[index], self.scales[index], zeros, self.group_of)

    def cols(self, wanted: slice | npt.NDArray[np.int64]) -> CodedRows:
        """Returns some columns with their groups."""
        cols, groups = self.codes.shape[1], self.scales.shape[1]
        group_of = self.group_of
        if group_of is None:
            group_of = (np.arange(cols) // (cols // groups)).astype(np.int32)
        of_cols = group_of[wanted]
        first, last = int(of_cols.min()), int(of_cols.max()) + 1
        zeros = None if self.zeros is None else self.zeros[:, first:last]
        return CodedRows(
            self.codes[:, wanted],
            self.scales[:, first:last],
            zeros,
            None if in_equal_groups(of_cols) else of_cols - np.int32(first),
        )

    @staticmethod
    def joined(pieces: Sequence[CodedRows]) -> CodedRows:
        """Returns the rows of several pieces, which share their groups."""
        if len(pieces) == 1:
            return pieces[0]
        zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
        return CodedRows(
            np.concatenate([piece.codes for piece in pieces]),
            np.concatenate([piece.scales for piece in pieces]),
            np.concatenate(zeros) if zeros else None,
            pieces[0].group_of,
        )


def in_equal_groups(groups: AnyArray) -> bool:
    """True if the groups of columns are in order and have the same number of columns each."""
    count = int(groups.max()) - int(groups.min()) + 1
    if len(groups) % count:
        return False
    return np.array_equal(groups - groups.min(), np.arange(len(groups)) // (len(groups) // count))


def filled_order(group_of: AnyArray) -> I32:
    """Sorts input features by their groups and pads each group to whole units of `FILLED_UNIT`
    columns, so that kernels for equal groups in order can multiply uneven ones.

    Args:
        group_of: (cols,) the group of each feature; a group may have none.

    Returns:
        (packed columns,) the feature of each column; ~f of one that fills up the group of feature
        f: it takes f's code, scale and zero, and meets an activation of 0.
    """
    sizes = np.bincount(group_of)
    widths = -(-sizes // FILLED_UNIT) * FILLED_UNIT
    group = np.repeat(np.arange(len(sizes)), widths)  # (packed columns,)
    place = np.arange(len(group)) - (np.cumsum(widths) - widths)[group]  # in the group
    size, first = sizes[group], (np.cumsum(sizes) - sizes)[group]
    features = np.argsort(group_of, kind="stable").astype(np.int32)[first + place % size]
    order: I32 = np.where(place < size, features, ~features)
    return order


def features_of(order: I32) -> I32:
    """(packed columns,) the features whose codes the columns of a `filled_order` take."""
    return np.where(order < 0, ~order, order)
