"""Any checkpoint that vllmx opens -> one GGUF file of a given type or mix."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllmx_core.checkpoint import Checkpoint, open_checkpoint
from vllmx_core.errors import ConfigError, UnsupportedModelError, WeightFormatError
from vllmx_core.plan import F32
from vllmx_core.registry import Registry

from vllmx_models.gguf.quantize.encode import decode, encode
from vllmx_models.gguf.quantize.header import Target, check, target_of
from vllmx_models.gguf.quantize.mixes import MIXES, Layers, type_of
from vllmx_models.gguf.quantize.vocabulary import tokenizer_metadata
from vllmx_models.gguf.quantize.writer import NewTensor, write_file

QUANTIZATION_VERSION = 2
PIECE_VALUES = 1 << 20
"""Values that a thread takes at once."""
Progress = Callable[[str, int, int], None]
"""Called with a tensor's name, its index and the number of tensors, before each tensor."""


@dataclass(frozen=True, slots=True)
class TypeSummary:
    """All tensors of one type."""

    tensors: int = 0
    values: int = 0
    num_bytes: int = 0
    squared_error: float = 0.0
    squared_value: float = 0.0

    @property
    def rms_error(self) -> float:
        return math.sqrt(self.squared_error / self.values)

    @property
    def relative_error(self) -> float:
        """RMS error over the values' own RMS; 0 where they are all 0."""
        return math.sqrt(self.squared_error / self.squared_value) if self.squared_value else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written."""

    path: Path
    num_bytes: int
    types: Mapping[str, TypeSummary]


def quantize(
    registry: Registry,
    source: Path,
    path: Path,
    mix: str,
    *,
    threads: int,
    pre: str | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Writes `path`. The file appears when it is complete, and replaces one of that name.

    Raises:
        ConfigError: `mix` is not one of `MIXES`, or `path` cannot be a new file.
        UnsupportedModelError: the model, or a trait of it, cannot be stated in a GGUF file.
        WeightFormatError: the checkpoint is damaged, or has values that are not finite.
    """
    if mix not in MIXES:
        raise ConfigError(f"type {mix!r} is not known; known: {', '.join(MIXES)}", param="type")
    if path.suffix != ".gguf" or path.resolve() == source.resolve():
        raise ConfigError(f"{path} must end in .gguf and must not be the source", param="output")
    checkpoint = open_checkpoint(registry, source)
    try:
        return _Conversion(registry, checkpoint, path, mix, pre).run(threads, progress)
    finally:
        checkpoint.weights.close()


class _Conversion:
    """One run; everything is decided in the constructor, before a tensor is read."""

    def __init__(
        self, registry: Registry, checkpoint: Checkpoint, path: Path, mix: str, pre: str | None
    ) -> None:
        self._path = path
        self._weights = checkpoint.weights
        self._target = target = target_of(registry, checkpoint)
        self._origins = _origins(target, checkpoint)
        spec = target.spec
        layers = Layers(len(spec.layers), spec.num_heads // spec.num_kv_heads, spec.tied_embeddings)
        shapes = {name: self._weights.part(part).shape for name, part in self._origins.items()}
        shapes |= {name: values.shape for name, values in target.extra.items()}
        self._tensors = [
            NewTensor(name, type_of(mix, name, shape, layers), shape)
            for name, shape in shapes.items()
        ]
        check(registry, target, self._tensors, path)
        tokenizer = checkpoint.tokenizer
        if tokenizer is None:
            tokenizer = tokenizer_metadata(checkpoint.path, spec.vocab_size, pre)
        self._metadata: dict[str, Any] = {
            "general.architecture": target.name,
            "general.name": checkpoint.path.resolve().stem,
            "general.file_type": MIXES[mix].file_type,
            "general.quantization_version": QUANTIZATION_VERSION,
            **target.metadata,
            **{key: value for key, value in tokenizer.items() if key.startswith("tokenizer.")},
        }
        self._types: dict[str, TypeSummary] = {}

    def run(self, threads: int, progress: Progress | None) -> Summary:
        with ThreadPoolExecutor(threads, "quantize") as pool:
            data = (
                self._pieces(tensor, index, pool, threads, progress)
                for index, tensor in enumerate(self._tensors)
            )
            try:
                size = write_file(self._path, self._metadata, self._tensors, data)
            except OSError as error:
                raise ConfigError(
                    f"{self._path} cannot be written: {error.strerror}", param="output"
                ) from error
        return Summary(self._path, size, self._types)

    def _pieces(
        self,
        tensor: NewTensor,
        index: int,
        pool: ThreadPoolExecutor,
        threads: int,
        progress: Progress | None,
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of a tensor in order; a few pieces are under way at a time."""
        if progress is not None:
            progress(tensor.name, index, len(self._tensors))
        rows = self._values(tensor).reshape(-1, tensor.shape[-1])
        step = max(PIECE_VALUES // rows.shape[1], 1)
        under_way: deque[Future[_Piece]] = deque()
        pieces = []
        for first in range(0, len(rows), step):
            under_way.append(pool.submit(_encode, tensor, rows[first : first + step]))
            if len(under_way) > 2 * threads:
                pieces.append(under_way.popleft().result())
                yield pieces[-1].data
        while under_way:
            pieces.append(under_way.popleft().result())
            yield pieces[-1].data
        self._add(tensor, pieces)

    def _values(self, tensor: NewTensor) -> F32:
        if tensor.name in self._target.extra:
            return self._target.extra[tensor.name]
        values = self._weights.part(self._origins[tensor.name]).dequantize()
        pattern = ".".join("{}" if part.isdigit() else part for part in tensor.name.split(".")[:-1])
        group = self._target.table.interleaved.get(pattern)
        if group is None:
            return values
        spec = self._target.spec
        return interleave(values, spec.num_heads if group == "heads" else spec.num_kv_heads)

    def _add(self, tensor: NewTensor, pieces: Sequence[_Piece]) -> None:
        old = self._types.get(tensor.type, TypeSummary())
        self._types[tensor.type] = TypeSummary(
            old.tensors + 1,
            old.values + math.prod(tensor.shape),
            old.num_bytes + tensor.num_bytes,
            old.squared_error + sum(piece.squared_error for piece in pieces),
            old.squared_value + sum(piece.squared_value for piece in pieces),
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    data: npt.NDArray[np.uint8]
    squared_error: float
    squared_value: float


def _encode(tensor: NewTensor, rows: F32) -> _Piece:
    try:
        data = encode(tensor.type, rows)
    except WeightFormatError as error:
        raise WeightFormatError(f"tensor {tensor.name!r}: {error.message}") from error
    found = decode(tensor.type, data)
    flat = rows.reshape(-1).astype(np.float64)
    return _Piece(data, float(np.square(found - flat).sum()), float(np.square(flat).sum()))


def interleave(rows: F32, heads: int) -> F32:
    """Reorders whole rows of each head from halves (i, i + D / 2) to pairs (2i, 2i + 1)."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _origins(target: Target, checkpoint: Checkpoint) -> dict[str, str]:
    """Name in the file -> name in the checkpoint, in the order of the layers."""
    names: dict[str, str] = {}
    present = set(checkpoint.weights.names())
    layers = range(len(target.spec.layers))
    for pattern, original in target.table.tensors.items():
        for layer in layers if "{}" in pattern else [0]:
            for suffix in (".weight", ".bias"):
                name = original.format(layer) + suffix
                if name in present:
                    names[pattern.format(layer) + suffix] = name
    unused = present - set(names.values())
    if target.spec.tied_embeddings:
        names.pop("output.weight", None)
    strange = sorted(name for name in unused if not name.endswith(".rotary_emb.inv_freq"))
    if strange:
        raise UnsupportedModelError(
            f"{checkpoint.path} has a tensor {strange[0]!r}, which the GGUF architecture"
            f" {target.name!r} has no name for"
        )
    return dict(sorted(names.items(), key=lambda pair: _order(pair[0])))


def _order(name: str) -> tuple[int, str]:
    parts = name.split(".")
    return (int(parts[1]) if parts[0] == "blk" else -1, name)
