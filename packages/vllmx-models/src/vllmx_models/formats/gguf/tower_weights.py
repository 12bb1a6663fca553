"""Weights of a tower in a GGUF file, with the names and shapes of the original checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.records import Record
from vllmx_core.weights.part import WeightPart, WeightSource, dense_part
from vllmx_core.weights.views import below, rows_of

from vllmx_models.formats.gguf.blocks import weight_part
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.places import deinterleaved, shifted

Make = Callable[[str, Sequence[WeightPart]], WeightPart]
"""A function from the name in the original checkpoint and the file's tensors to the weight."""


# --- forms ----------------------------------------------------------------------------------------
def as_it_is(name: str, parts: Sequence[WeightPart]) -> WeightPart:
    """The tensor, unchanged."""
    (part,) = parts
    return part


def without_offset(name: str, parts: Sequence[WeightPart]) -> WeightPart:
    """The weight of a norm, to which the file has added one."""
    return shifted(parts[0], -1.0)


def pairs_apart(heads: int) -> Make:
    """Returns the rows of queries or keys whose rotated pairs lie next to each other in the file,
    with the halves of each head one behind the other."""

    def make(name: str, parts: Sequence[WeightPart]) -> WeightPart:
        (part,) = parts
        if part.shape[0] % (2 * heads):
            raise WeightFormatError(f"{part.name!r} has {part.shape[0]} rows for {heads} heads")
        return rows_of(part, deinterleaved(part.shape[0], heads))

    return make


def one_below_the_other(name: str, parts: Sequence[WeightPart]) -> WeightPart:
    """Joins the rows of queries, keys and values, which the file stores separately. Rows keep their
    bytes if all parts have the same type."""
    return below(name, parts)


def frames(name: str, parts: Sequence[WeightPart]) -> WeightPart:
    """(E, 3, frames, p, p) of one convolution for each frame."""
    if any(part.shape != parts[0].shape or len(part.shape) != 4 for part in parts):
        raise WeightFormatError(f"{parts[0].name!r} and its other frame have unequal shapes")
    return dense_part(name, np.stack([part.dequantize() for part in parts], axis=2))


def colours_last(name: str, parts: Sequence[WeightPart]) -> WeightPart:
    """(E, p * p * 3) of a convolution (E, 3, p, p)."""
    (part,) = parts
    if len(part.shape) != 4:
        raise WeightFormatError(f"{part.name!r} has shape {list(part.shape)}, not (E, 3, p, p)")
    values = part.dequantize().transpose(0, 2, 3, 1)
    return dense_part(name, np.ascontiguousarray(values.reshape(len(values), -1)))


# --- the source -----------------------------------------------------------------------------------
class Entry(Record):
    """A weight, or a weight and its bias, and the tensors of the file that make it up."""

    name: str
    """The name in the original checkpoint."""
    stored: tuple[str, ...]
    """The names in the file."""
    make: Make = as_it_is
    whole: bool = False
    """True if the names are those of one tensor; otherwise ".weight" and ".bias" are added."""


class TowerSource:
    """A `WeightSource` of a text model and of a tower from another file."""

    def __init__(self, text: WeightSource, file: GGUFFile, entries: Iterable[Entry]) -> None:
        self._text = text
        self._file = file
        self._entries = {entry.name: entry for each in entries for entry in _whole(each)}
        self._found = [
            entry.name
            for entry in self._entries.values()
            if all(name in file.tensors for name in entry.stored)
        ]
        known = {name for entry in self._entries.values() for name in entry.stored}
        strange = sorted(name for name in file.tensors.keys() - known if not _of_sound(name))
        if strange:
            raise UnsupportedModelError(
                f"{file.path} has a tensor {strange[0]!r}, which no tower of this kind has: it is"
                " another variant of it; --limit-images 0 serves the text alone"
            )

    def names(self) -> Collection[str]:
        return {*self._text.names(), *self._found}

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError for a tensor that is missing."""
        entry = self._entries.get(name)
        if entry is None:
            return self._text.part(name)
        missing = [one for one in entry.stored if one not in self._file.tensors]
        if missing:
            raise WeightFormatError(
                f"{self._file.path} has no tensor {missing[0]!r} ({name!r}): the file is incomplete"
                " or made by a converter of another model, download it again; --limit-images 0"
                " serves the text alone"
            )
        return entry.make(name, [self._stored(one) for one in entry.stored])

    def _stored(self, name: str) -> WeightPart:
        info = self._file.tensors[name]
        return weight_part(name, info.kind, info.shape, self._file.stored(name))

    def close(self) -> None:
        """Closes the files; parts must not be used any more."""
        self._text.close()
        self._file.close()


def _whole(entry: Entry) -> Iterable[Entry]:
    """An entry for each tensor."""
    if entry.whole:
        return [entry]
    return [
        Entry(entry.name + end, tuple(name + end for name in entry.stored), entry.make, whole=True)
        for end in (".weight", ".bias")
    ]


def _of_sound(name: str) -> bool:
    """True if a tensor belongs to an audio tower, which is not run."""
    return name.startswith(("a.", "mm.a."))
