"""A model's weight map: the tensors that make up each weight, and how ranks share them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllmx_core.records import Record


class RowRuns(Record):
    """Every `stride`-th row from `begin` on, `length` rows at a time: `RowRuns(0, D, 2 * D)` takes
    the first half of each pair of heads, `RowRuns(1, 1, 2)` every other row."""

    begin: int
    length: int
    stride: int

    def index(self, rows: int) -> npt.NDArray[np.int64]:
        """(rows,) rows of the tensor, `rows` being a multiple of `length`."""
        first = self.begin + self.stride * np.arange(rows // self.length)
        return (first[:, None] + np.arange(self.length)).reshape(-1)


class RankShare(Record):
    """One rank's share of a part, taken after all other picks. The sharding of a model sets it."""

    whole_rows: int
    whole_cols: int
    """Columns of the whole weight; `whole_rows` are the part's."""
    rows: tuple[tuple[int, int], ...] | None = None
    """[first, end) of each run of the part's rows; None: all."""
    cols: tuple[int, int] | None = None
    """[first, end) of the weight's columns; None: all."""
    order: bytes = b""
    """int32 permutation in which `rows` or `cols` number the part's rows or columns; empty: the
    identity."""


class PartSpec(Record):
    """A checkpoint tensor, or a slice of one, that becomes `rows` consecutive rows of a weight.

    `vllmx_core.weights.map.parts_of` applies the picks in this order: an entry of the first axis,
    the transpose, rows, columns, the transpose of what was picked.
    """

    name: str
    rows: int
    bias: str | None = None
    """Checkpoint name of the part's (rows,) bias; `entry` and `runs` apply to it too."""
    alternatives: tuple[str | PartSpec, ...] = ()
    """Other names of the same tensor, or parts that replace this one. The first that the checkpoint
    has is taken."""
    entry: int | None = None
    """Entry of a tensor with one more axis in front, such as the expert of a stack."""
    transposed: bool | None = False
    """True if the tensor is stored as (input features, output features); None: if its shape does
    not fit otherwise."""
    runs: RowRuns | None = None
    """Rows that are taken; None: all."""
    first_col: int | None = None
    """First column that is taken; None: all columns are."""
    turned: bool = False
    """True if the weight is the transpose of the rows that `runs` picks, one for each of its
    columns. Quantised rows become float32."""
    share: RankShare | None = None
    """This rank's share; `rows` counts the share alone."""


Shard = Literal["none", "column", "row", "vocab", "expert", "head"]
Role = Literal["", "vocabulary", "experts", "heads", "router", "ids"]
"""The meaning of a weight's rows, beyond features. Those of a "router", the scores of experts,
decide much and keep their stored precision. "ids" are integers, not codes of a quantisation."""


class WeightSpec(Record):
    """One line of a model's weight map: logical name, where it comes from, how it may be split.

    kind "linear": a (rows, cols) matrix for `Ops.linear` or `Ops.logits`; "embedding": a
    (rows, cols) table for `Ops.embedding`; "vector": (rows,) float values for norms and sinks;
    "stack": `count` matrices of (rows, cols), such as the experts of a layer.
    A table that is tied to the LM head is named by two specs with the same part; a backend may
    hold it once.
    """

    name: str
    kind: Literal["linear", "embedding", "vector", "stack"]
    parts: tuple[PartSpec, ...]
    """The tensors that make up the weight; for a stack those of its first matrix, then those of the
    second ..."""
    cols: int = 0
    shard: Shard = "none"
    """The split for tensor parallelism: column = output features of each part, row = input features
    followed by an all-reduce, vocab = output features of table and head, expert = whole matrices of
    a stack, head = the rows of whole heads."""
    offset: float = 0.0
    """Added to a vector at load (Gemma stores norm weights minus one)."""
    role: Role = ""
    count: int = 1
    """Matrices of a stack."""
    shape: tuple[int, ...] | None = None
    """The shape of each tensor with more axes than the weight, which is flattened row-major. For a
    "vector", such as the taps of a convolution, `rows` counts values and `runs` picks along the
    first axis; for a "linear" or an "embedding" each part is (rows, cols). Axes of length 1 in the
    file are ignored. A first axis of 0 is as long as the part's `rows` ask for."""
    axes: tuple[int, ...] | None = None
    """The order in which the axes of `shape` are flattened; None: as they are stored."""

    @property
    def rows(self) -> int:
        """Rows of the weight, or of each matrix of a stack."""
        return sum(part.rows for part in self.parts) // self.count

    def shape_of(self, part: PartSpec) -> tuple[int, ...] | None:
        """`shape` of the tensor of a whole part."""
        if self.shape is None or self.shape[0]:
            return self.shape
        rest = self.shape[1:]
        return (part.rows // math.prod(rest), *rest)

    @property
    def matrices(self) -> tuple[WeightSpec, ...]:
        """The matrices of a stack as linears of their own; any other weight itself."""
        if self.kind != "stack":
            return (self,)
        each = len(self.parts) // self.count
        return tuple(
            replace(
                self,
                name=f"{self.name}[{index}]",
                kind="linear",
                count=1,
                parts=self.parts[index * each : (index + 1) * each],
            )
            for index in range(self.count)
        )
