"""Shares of ranks: where a row of features may be cut, and each rank's pieces."""

from __future__ import annotations

import math

from vllmx_core.errors import ConfigError
from vllmx_core.records import Record

Piece = tuple[int, int]
"""Features from the first to before the second."""


class Share(Record):
    """Features that one rank has of a value or weight."""

    whole: int
    """Features of all ranks."""
    pieces: tuple[Piece, ...]
    """The pieces that this rank has, in ascending order."""

    @property
    def width(self) -> int:
        return sum(end - begin for begin, end in self.pieces)

    def repeated(self, count: int) -> Share:
        """The same features of each of `count` runs of `whole` features side by side."""
        starts = (run * self.whole for run in range(count))
        pieces = ((at + begin, at + end) for at in starts for begin, end in self.pieces)
        return Share(count * self.whole, tuple(pieces))

    def grouped(self, span: int) -> Share:
        """The groups of `span` neighbouring features, which no cut divides."""
        pieces = tuple((begin // span, end // span) for begin, end in self.pieces)
        return Share(self.whole // span, pieces)

    def spread(self, span: int) -> Share:
        """The same where each feature stands for `span` neighbouring ones."""
        pieces = tuple((begin * span, end * span) for begin, end in self.pieces)
        return Share(self.whole * span, pieces)

    def between(self, begin: int, end: int) -> Share:
        """The share of the features from `begin` to before `end`, numbered from `begin`."""
        cut = ((max(first, begin), min(last, end)) for first, last in self.pieces)
        pieces = tuple((first - begin, last - begin) for first, last in cut if first < last)
        return Share(end - begin, pieces)


class Units(Record):
    """The places where a value may be cut: multiples of `unit` features. With several sections of
    equal size, each belongs to equally many ranks, and no rank has features of two sections."""

    unit: int = 1
    sections: int = 1

    def joined(self, other: Units) -> Units:
        """The cuts that both values allow."""
        unit = math.lcm(self.unit, other.unit)
        return Units(unit, math.lcm(self.sections, other.sections))


def divided(whole: int, units: Units, ranks: int, what: str) -> tuple[Piece, ...]:
    """The contiguous part of each rank, as equal as units allow. Raises ConfigError, which names
    `what`, if a rank would have nothing."""
    sections, unit = units.sections, units.unit
    if ranks % sections or whole % sections:
        raise _indivisible(f"{what}: {sections} sections are not for {ranks} ranks alike")
    size, each = whole // sections, ranks // sections
    count = -(-size // unit)
    if count < each or (sections > 1 and size % unit):
        raise _indivisible(
            f"{what}: {whole} features in units of {unit} are for at most"
            f" {sections * max(1, size // unit)} ranks"
        )
    ends = [min(size, unit * (count * part // each)) for part in range(each + 1)]
    return tuple(
        (section * size + ends[part], section * size + ends[part + 1])
        for section in range(sections)
        for part in range(each)
    )


def _indivisible(text: str) -> ConfigError:
    return ConfigError(text, param="tensor_parallel_size")
