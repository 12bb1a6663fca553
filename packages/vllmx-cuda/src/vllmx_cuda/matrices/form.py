"""The protocol of a form of a matrix, and the types that it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from vllmx_core.weights.part import WeightPart

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.matrices.pieces import Piece


@dataclass(frozen=True, slots=True)
class Target:
    """The device and dtype that forms are chosen for."""

    dtype: str
    """The type of activations and dense weights."""
    arch: int
    """The architecture of the GPU, such as 75 or 90."""


@dataclass(frozen=True, slots=True)
class ScratchBytes:
    """Buffers that a product needs besides its operands; they live within one op."""

    codes: int = 0
    """Activations as codes of 8 bits."""
    scales: int = 0
    """The bytes of the codes' scales."""
    work: int = 0
    """The bytes of everything else: rows in the model's dtype, sums that are not scaled yet."""
    counters: int = 0
    """u32, 0 before and after each product."""

    def __or__(self, other: ScratchBytes) -> ScratchBytes:
        """Enough for either."""
        return ScratchBytes(
            max(self.codes, other.codes),
            max(self.scales, other.scales),
            max(self.work, other.work),
            max(self.counters, other.counters),
        )

    @property
    def num_bytes(self) -> int:
        return self.codes + self.scales + self.work + self.counters


@dataclass(frozen=True, slots=True)
class ProductScratch:
    """The buffers of `ScratchBytes`."""

    codes: Memory
    scales: Memory
    work: Memory
    counters: Memory


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a matrix that lie in one form."""

    form: Form
    data: Memory
    begin: int
    """The piece's first row in the matrix, which is its first column of a product."""
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class InputNorm:
    """An RMS norm that a product takes of its x."""

    weight: Memory | None  # (cols,) float32
    squares: Memory  # (m, count) float32: parts of the sums of the squares of each row
    count: int
    eps: float


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of the product of a segment: its columns of y (m, pitch), and of the matrix's
    bias."""

    x: Memory  # (m, cols)
    y: Memory  # from column `Segment.begin` on
    pitch: int
    """Elements from one row of y to the next."""
    out_dtype: str
    bias: Memory | None = None  # (rows,) float32
    rounded_bias: Memory | None = None  # (rows,) in out_dtype
    residual: Memory | None = None
    """Added to y; may be y. This, `squares` and `norm` are for at most `FUSED_TOKENS` rows, of
    products that have `blocks`."""
    squares: Memory | None = None  # (m, blocks) float32, of y
    norm: InputNorm | None = None
    gate: int = 0
    """VX_GATED: y (m, rows / 2) is act(gate) * up, for at most `FUSED_TOKENS` rows too."""

    @property
    def options(self) -> dict[str, int]:
        """`FUSIONS` of a kernel."""
        return {"VX_NORM": int(self.norm is not None), "VX_GATED": self.gate}

    def fused(self) -> tuple[Memory | int | float | None, ...]:
        """The arguments `FUSED` of a kernel."""
        if self.norm is None:
            return self.residual, self.squares, None, None, 0, 0.0
        norm = self.norm
        return self.residual, self.squares, norm.weight, norm.squares, norm.count, norm.eps


class Launcher(Protocol):
    """Makes launches; `vllmx_cuda.program.lowering.Lowering` is one."""

    @property
    def device(self) -> Device: ...

    @property
    def target(self) -> Target: ...

    @property
    def products(self) -> ProductScratch:
        """The products of the sizes that the forms asked for."""
        ...

    def variant(self, entry: str, **options: int) -> Variant:
        """A kernel for the model's dtype; every one that is used must come from here, at once and
        not when it is launched."""
        ...


@dataclass(frozen=True, slots=True)
class ActivationCodes:
    """Codes that x becomes before a product."""

    kind: str
    """A key of `activations.QUANTISERS`."""
    scale: float = 0.0
    """The scale of all rows, as a checkpoint fixes it; 0: each has its own."""
    groups: bool = False
    """Each row has one for each 128 columns."""

    def pitch(self, m: int) -> int:
        """The pitch of m rows' scales of groups: from one group to the next."""
        return -(-m // 4) * 4 if self.groups else 0


@dataclass(frozen=True, slots=True)
class SegmentProduct:
    """x @ rows.T + bias for any number of rows of x."""

    enqueue: Callable[[int], None]
    """enqueue(m)"""
    codes: ActivationCodes | None = None
    """x as these is in the scratch when it is asked for as many rows as `wants_codes` says yes
    to."""
    wants_codes: Callable[[int], bool] = lambda _: True
    blocks: int | None = None
    """The parts in which it leaves the squares of each row of y; None: it knows neither residuals
    nor norms."""
    gates: bool = False
    """True if it has `Operands.gate`."""


Gather = Callable[[Memory, int], None]
"""gather(ids, count) writes these rows."""


class Form(Protocol):
    """Rows of a matrix as the device holds them. Forms are compared: neighbouring parts with equal
    ones lie in one segment, one below the other. So a form says no more than what its kernels must
    know of all rows."""

    @property
    def gathers(self) -> bool:
        """True if `gather` exists: else no embedding is held so."""
        ...

    def num_bytes(self, rows: int, cols: int) -> int:
        """Device memory that a segment takes."""
        ...

    def scratch(self, rows: int, cols: int, tokens: int) -> ScratchBytes:
        """The memory that the product of at most so many tokens with a segment needs."""
        ...

    def pieces(self, part: WeightPart, data: Memory, first: int, rows: int) -> Iterator[Piece]:
        """Uploads of `part`, which becomes rows from `first` on of a segment of `rows` rows at
        `data`. What a piece fills is decoded for it alone, on some thread."""
        ...

    def product(
        self, launcher: Launcher, segment: Segment, operands: Operands
    ) -> SegmentProduct: ...

    def gather(self, launcher: Launcher, segment: Segment, y: Memory) -> Gather:
        """Rows by number into y (count, cols)."""
        ...


Kind = Callable[[WeightPart, Target], Any]
"""kind(part, target) is the Form of a part, (rows, cols), or None for any other part. Looks at
the layout and not at the buffers: those of a part that is made (`--isq`) are made by looking."""
