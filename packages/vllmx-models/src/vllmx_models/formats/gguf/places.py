"""Finds each weight of the original checkpoint in GGUF files.

Most tensors are one weight. The rows of queries, keys and values may be one tensor, and a layer's
experts always are: (X, rows, columns). Such tensors are split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import UnsupportedModelError, WeightFormatError
from vllmx_core.records import Record
from vllmx_core.weights.part import WeightPart, dense_part

from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.file import GGUFFile, TensorInfo

_LAYER = re.compile(r"((?:enc\.|dec\.)?blk\.)(0|[1-9][0-9]{0,4})\.(.+)")
FUSED = "blk.{}.attn_qkv"
"""The rows of queries, keys and values in one tensor, for architectures that keep them apart."""
_FUSED_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "blk.{}.ffn_gate_up_exps": ("blk.{}.ffn_gate_exps", "blk.{}.ffn_up_exps"),
}
"""Gate and up of experts in one tensor: the rows of the gate, then of up, for each expert."""
ONE_ROW = ("blk.{}.ffn_gate_inp_shexp",)
"""Matrices of one row, which files store as vectors."""
_VECTORS = ("blk.{}.ssm_a", "blk.{}.ssm_d", "blk.{}.ssm_norm")
"""Vectors, which files may store as matrices; `ssm_a` of Mamba 1 is one."""
MOST_EXPERTS = 1 << 14


class Heads(Record):
    """Rows of the attention's matrices: `query` or `kv` heads of `size` each."""

    query: int
    kv: int
    size: int

    def count(self, group: Literal["heads", "kv_heads"]) -> int:
        return self.query if group == "heads" else self.kv

    @property
    def fused(self) -> dict[str, int]:
        """Rows of each tensor in `FUSED`, in their order."""
        rows = {"q": self.query, "k": self.kv, "v": self.kv}
        return {f"blk.{{}}.attn_{name}": count * self.size for name, count in rows.items()}


class Place(Record):
    """The tensor that has a weight, and the weight's range in it."""

    file: GGUFFile
    info: TensorInfo
    begin: int
    end: int
    """Bytes of the tensor."""
    shape: tuple[int, ...]
    heads: int | None = None
    """The number of heads if rows are interleaved within each head; None: they are not."""


def places_of(files: Sequence[GGUFFile], table: GGUFArchitecture, heads: Heads) -> dict[str, Place]:
    """The place of each weight by its name in the original checkpoint. Raises UnsupportedModelError
    for a tensor that the architecture does not have, WeightFormatError for one that occurs twice or
    cannot be split."""
    places: dict[str, Place] = {}
    for file in files:
        for info in file.tensors.values():
            if info.name in table.unused:
                continue
            for name, place in _weights(file, info, table, heads):
                if name in places:
                    raise WeightFormatError(
                        f"{file.path}: {info.name!r} is there twice, also as"
                        f" {places[name].info.name!r} of {places[name].file.path}: the files are"
                        " not of one model"
                    )
                places[name] = place
    return places


def split_name(name: str) -> tuple[str, str, str]:
    """("blk.{}.attn_q", "3", ".weight") of blk.3.attn_q.weight; a few names have no suffix."""
    stem, dot, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = name, "", ""
    match = _LAYER.fullmatch(stem)
    if match is None:
        return stem, "", dot + suffix
    return f"{match[1]}{{}}.{match[3]}", match[2], dot + suffix


def _weights(
    file: GGUFFile, info: TensorInfo, table: GGUFArchitecture, heads: Heads
) -> Iterator[tuple[str, Place]]:
    """The weights in one tensor with their places."""
    pattern, layer, suffix = split_name(info.name)
    whole = Place(file, info, 0, info.num_bytes, info.shape)
    fused = _FUSED_EXPERTS.get(pattern, (pattern,))
    if table.name_of(fused[0], suffix).count("{}") == 2:
        for expert, entry in enumerate(_entries(whole)):
            rows = [entry.shape[0] // len(fused)] * len(fused)
            for piece, place in zip(fused, _cut(entry, rows), strict=True):
                yield _known(file, info, table, piece, suffix).format(layer, expert), place
        return
    pieces = {pattern: info.shape[0]}
    if pattern == FUSED and not table.name_of(pattern, suffix):
        pieces = heads.fused
        if sum(pieces.values()) != info.shape[0] or not _has_rows(info):
            raise _uncut(whole, f"{heads.query} + 2 * {heads.kv} heads of {heads.size}")
    for piece, place in zip(pieces, _cut(whole, list(pieces.values())), strict=True):
        name = _known(file, info, table, piece, suffix).format(layer)
        shape = (1, *place.shape) if piece in ONE_ROW and len(place.shape) == 1 else place.shape
        if piece in _VECTORS and (1 in place.shape or piece != "blk.{}.ssm_a"):
            shape = (math.prod(shape),)
        group = table.interleaved.get(piece)
        count = None if group is None else heads.count(group)
        if count is not None and (shape[0] % (2 * count) or not _has_rows(info)):
            raise _uncut(whole, f"{count} heads")
        yield name, Place(file, info, place.begin, place.end, shape, count)


def _known(
    file: GGUFFile, info: TensorInfo, table: GGUFArchitecture, piece: str, suffix: str
) -> str:
    name = table.name_of(piece, suffix)
    if not name:
        raise UnsupportedModelError(
            f"{file.path} has a tensor {info.name!r}, which a model of {table.architecture}"
            " does not have: it is another variant of the architecture"
        )
    return name


def _entries(stack: Place) -> list[Place]:
    """The matrices, or vectors, of a tensor with an axis of experts in front."""
    count = stack.shape[0]
    if len(stack.shape) < 2 or not 0 < count <= MOST_EXPERTS or not _has_rows(stack.info):
        raise _uncut(stack, f"experts, of which there may be {MOST_EXPERTS}")
    return [
        Place(one.file, one.info, one.begin, one.end, one.shape[1:])
        for one in _cut(stack, [1] * count)
    ]


def _cut(place: Place, sizes: Sequence[int]) -> list[Place]:
    """Pieces with these numbers of entries of the first dimension."""
    count = place.shape[0]
    if len(sizes) == 1 and sizes[0] == count:
        return [place]
    each, rest = divmod(place.end - place.begin, count)
    if sum(sizes) != count or rest:
        raise _uncut(place, f"pieces of {', '.join(map(str, sizes[:4]))} rows")
    pieces, first = [], place.begin
    for size in sizes:
        shape = (size, *place.shape[1:])
        pieces.append(Place(place.file, place.info, first, first + size * each, shape))
        first += size * each
    return pieces


def _uncut(place: Place, wanted: str) -> WeightFormatError:
    info = place.info
    return WeightFormatError(
        f"{place.file.path}: tensor {info.name!r}, {info.kind.name} {list(info.shape)}, cannot be"
        f" cut into {wanted}: the file is damaged"
    )


def _has_rows(info: TensorInfo) -> bool:
    """True if each entry of the first dimension takes whole bytes."""
    return len(info.shape) > 1 or info.kind.values == 1


# --- vectors that files store in another form -----------------------------------------------------


def is_norm(name: str) -> bool:
    """True if a tensor of a file is the weight of a norm."""
    return name.endswith("norm.weight")


def shifted(part: WeightPart, offset: float) -> WeightPart:
    """A vector with `offset` added to each value."""
    if offset == 0:
        return part
    return dense_part(part.name, part.dequantize() + np.float32(offset))


def log_of_negated(part: WeightPart) -> WeightPart:
    """The logarithms of a vector's values times -1."""
    with np.errstate(all="ignore"):  # the sampler reports NaN of damaged values
        return dense_part(part.name, np.log(-part.dequantize()))


def deinterleaved(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """(rows,) the row in the file of each row: pairs (2i, 2i + 1) of each head come from halves
    (i, i + D / 2)."""
    pairs = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
