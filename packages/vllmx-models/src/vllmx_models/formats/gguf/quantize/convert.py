"""Any checkpoint that vllmx opens -> one GGUF file of a given type or mix."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import ConfigError, WeightFormatError
from vllmx_core.plugins.checkpoint import Checkpoint, open_checkpoint
from vllmx_core.plugins.registry import Registry
from vllmx_core.records import Record
from vllmx_core.weights.encoding import Encoded
from vllmx_core.weights.file_names import shard_names
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.tensor import RawTensor

from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME
from vllmx_models.formats.gguf.places import is_norm, shifted, split_name
from vllmx_models.formats.gguf.quantize import losses
from vllmx_models.formats.gguf.quantize.encoders import encoder_for, float_rows
from vllmx_models.formats.gguf.quantize.header import kept_metadata, pooling_metadata, target_of
from vllmx_models.formats.gguf.quantize.mixes import MIXES, Layers, type_of
from vllmx_models.formats.gguf.quantize.origins import (
    as_vector,
    is_stack,
    origins_of,
    shape_of,
    stacked_rows,
)
from vllmx_models.formats.gguf.quantize.readback import check
from vllmx_models.formats.gguf.quantize.vocabulary import StatedTokenizer, tokenizer_metadata
from vllmx_models.formats.gguf.quantize.writer import NewTensor, write_file
from vllmx_models.formats.merged import merged

MXFP4 = "MXFP4"
_NAN = 255
"""The exponent of a block of NaNs."""

QUANTIZATION_VERSION = 2
PIECE_VALUES = 1 << 20
"""Values of one job of a thread."""
Progress = Callable[[str, int, int], None]
"""Called with a tensor's name, its index and the number of tensors, before each tensor."""


class TypeSummary(Record):
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


class Summary(Record):
    """Figures about a written file."""

    path: Path
    num_bytes: int
    types: Mapping[str, TypeSummary]
    lost: tuple[str, ...] = ()
    """A line for each thing that the checkpoint has and the file does not."""


def quantize(
    registry: Registry,
    source: Path,
    path: Path,
    mix: str,
    *,
    threads: int,
    pre: str | None = None,
    lora: Path | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Writes `path`. The file appears when it is complete, and replaces one of that name.

    Raises:
        ConfigError: `mix` is not one of `MIXES`, or `path` cannot be a new file.
        UnsupportedModelError: the model, or a trait of it, cannot be stated in a GGUF file.
        WeightFormatError: the checkpoint is damaged, or has values that are not finite.
        AdapterError: `lora`, an adapter to merge into the weights, does not fit them.
    """
    if mix not in MIXES:
        raise ConfigError(f"type {mix!r} is not known; known: {', '.join(MIXES)}", param="type")
    if path.suffix != ".gguf":
        raise ConfigError(f"{path} is not a name for a GGUF file: end it in .gguf", param="output")
    if path.exists() and any(path.samefile(file) for file in _files_of(source)):
        raise ConfigError(f"{path} belongs to the source: choose another name", param="output")
    checkpoint = open_checkpoint(registry, source)
    try:
        if lora is not None:
            checkpoint = merged(registry, checkpoint, lora)
        return _Conversion(registry, checkpoint, path, mix, pre).run(threads, progress)
    finally:
        checkpoint.weights.close()


def _files_of(source: Path) -> list[Path]:
    """All files of a model: its folder's, or the file and the others of its set."""
    if source.is_dir():
        return list(source.iterdir())
    files = (source.with_name(name) for name in shard_names(source.name))
    return [file for file in files if file.exists()]


class _Conversion:
    """One conversion; the constructor decides everything before a tensor is read."""

    def __init__(
        self, registry: Registry, checkpoint: Checkpoint, path: Path, mix: str, pre: str | None
    ) -> None:
        self._path = path
        self._weights = checkpoint.weights
        self._target = target = target_of(registry, checkpoint)
        self._origins, passed = origins_of(target, checkpoint)
        spec = target.spec
        shapes = {}
        self._kept: set[str] = set()
        layers = self._layers()
        kinds: dict[str, str] = {}
        for name in self._origins:
            parts = self._parts(name)
            shapes[name] = shape_of(target, name, parts)
            kinds[name] = type_of(mix, name, shapes[name], layers)
            if is_kept(parts, kinds[name]):
                kinds[name] = MXFP4
                self._kept.add(name)
        for name, values in target.extra.items():
            shapes[name], kinds[name] = values.shape, "F32"
        self._tensors = [NewTensor(name, kinds[name], shape) for name, shape in shapes.items()]
        check(registry, target, self._tensors, path)
        stated = _tokenizer(checkpoint, spec.vocab_size, pre)
        pooling, unpooled = pooling_metadata(registry, checkpoint, target.name)
        self._lost: tuple[str, ...] = (
            *losses.of_config(checkpoint.config),
            *passed,
            *losses.of_generation_config(checkpoint.generation_config, target.sampling),
            *stated.lost,
        )
        self._metadata: dict[str, Any] = {
            "general.architecture": target.name,
            "general.name": os.fsencode(checkpoint.path.resolve().stem).decode("utf-8", "replace"),
            "general.file_type": MIXES[mix].file_type,
            "general.quantization_version": QUANTIZATION_VERSION,
            **target.metadata,
            **stated.metadata,
            **pooling,
        }
        kept, unkept = kept_metadata(checkpoint, self._metadata)
        self._metadata |= kept
        self._lost += (*unpooled, *unkept)
        made = {tensor.type for tensor in self._tensors if tensor.name not in self._kept}
        self._encoders = {kind: encoder_for(registry, kind) for kind in sorted(made)}
        self._types: dict[str, TypeSummary] = {}

    def _parts(self, name: str) -> list[WeightPart]:
        """Opens the parts that make up a tensor of the file."""
        return [origin.open(self._weights) for origin in self._origins[name]]

    def _layers(self) -> Layers:
        target = self._target
        heads = target.mixer.num_heads // target.num_kv_heads
        count = len(target.layers)
        values = [
            number for number in range(count) if f"blk.{number}.attn_v.weight" in self._origins
        ]
        return Layers(count, heads, target.spec.tied_embeddings, target.experts, tuple(values))

    def run(self, threads: int, progress: Progress | None) -> Summary:
        with ThreadPoolExecutor(threads, "quantize") as pool:
            pieces = _in_order(pool, self._jobs(), 2 * threads)
            data = (
                self._taken(tensor, index, pieces, progress)
                for index, tensor in enumerate(self._tensors)
            )
            try:
                size = write_file(self._path, self._metadata, self._tensors, data)
            except OSError as error:
                raise ConfigError(
                    f"{self._path} cannot be written: {error.strerror}", param="output"
                ) from error
        return Summary(self._path, size, self._types, self._lost)

    def _jobs(self) -> Iterator[Callable[[], Encoded]]:
        """The pieces of all tensors in their order."""
        for tensor in self._tensors:
            make: Callable[[int, int], Encoded]
            if tensor.name in self._kept:
                make = partial(stored_blocks, self._parts(tensor.name))
            else:
                make = partial(self._encode, tensor, self._reader(tensor))
            for begin, end in self._ranges(tensor):
                yield partial(make, begin, end)

    def _ranges(self, tensor: NewTensor) -> list[tuple[int, int]]:
        """Rows of each job; whole heads if the rows of a head are reordered."""
        count, unit = tensor.shape[0], 1
        if (heads := self._interleaved_heads(tensor)) is not None:
            unit = count // heads
        step = max(PIECE_VALUES // math.prod(tensor.shape[1:]) // unit, 1) * unit
        return [(first, min(first + step, count)) for first in range(0, count, step)]

    def _taken(
        self,
        tensor: NewTensor,
        index: int,
        pieces: Iterator[Encoded],
        progress: Progress | None,
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the bytes of a tensor from the next pieces."""
        if progress is not None:
            progress(tensor.name, index, len(self._tensors))
        own = []
        for piece in islice(pieces, len(self._ranges(tensor))):
            own.append((piece.squared_error, piece.squared_value))
            yield piece.data
        self._add(tensor, own)

    def _interleaved_heads(self, tensor: NewTensor) -> int | None:
        """Returns the number of heads with interleaved rows, or None."""
        pattern = ".".join("{}" if part.isdigit() else part for part in tensor.name.split(".")[:-1])
        group = self._target.table.interleaved.get(pattern)
        if group is None:
            return None
        target = self._target
        return target.mixer.num_heads if group == "heads" else target.num_kv_heads

    def _reader(self, tensor: NewTensor) -> Callable[[int, int], RawTensor]:
        """Returns a function that reads rows of a tensor for the encoder."""
        extra = self._target.extra.get(tensor.name)
        if extra is not None:
            raw = RawTensor(tensor.name, "f32", extra.shape, extra.reshape(-1).view(np.uint8))
            return raw.rows
        parts = self._parts(tensor.name)
        if is_stack(self._target, tensor.name):
            return partial(stacked_rows, parts)
        part = as_vector(parts[0]) if len(tensor.shape) == 1 else parts[0]
        plain = split_name(tensor.name)[0] in self._target.table.plain_norms
        if len(tensor.shape) == 1 and is_norm(tensor.name) and not plain:
            part = shifted(part, self._target.table.norm_offset)
        if (heads := self._interleaved_heads(tensor)) is None:
            return partial(float_rows, part)
        head_rows = tensor.shape[0] // heads

        def interleaved(begin: int, end: int) -> RawTensor:
            return interleave(float_rows(part, begin, end), (end - begin) // head_rows)

        return interleaved

    def _encode(
        self, tensor: NewTensor, read: Callable[[int, int], RawTensor], begin: int, end: int
    ) -> Encoded:
        rows = replace(read(begin, end), name=tensor.name)
        return self._encoders[tensor.type].encode(tensor.type, rows, measure=True)

    def _add(self, tensor: NewTensor, sums: Sequence[tuple[float, float]]) -> None:
        """`sums` are squared error and value of each piece."""
        old = self._types.get(tensor.type, TypeSummary())
        self._types[tensor.type] = TypeSummary(
            old.tensors + 1,
            old.values + math.prod(tensor.shape),
            old.num_bytes + tensor.num_bytes,
            old.squared_error + sum(error for error, _ in sums),
            old.squared_value + sum(value for _, value in sums),
        )


def _tokenizer(checkpoint: Checkpoint, vocab_size: int, pre: str | None) -> StatedTokenizer:
    """The tokenizer's metadata: copied from another GGUF file, or converted from a folder."""
    stated = checkpoint.tokenizer
    if stated is not None:
        return StatedTokenizer({k: v for k, v in stated.items() if k.startswith("tokenizer.")})
    ends = checkpoint.generation_config.get("eos_token_id")
    ends = checkpoint.config.get("eos_token_id") if ends is None else ends
    ends = ends if isinstance(ends, list) else [ends]
    ids = [index for index in ends if type(index) is int]
    return tokenizer_metadata(checkpoint.path, vocab_size, pre, ids)


def _in_order(
    pool: ThreadPoolExecutor, jobs: Iterable[Callable[[], Encoded]], ahead: int
) -> Iterator[Encoded]:
    """Yields the jobs' results in order and keeps `ahead` more in flight."""
    under_way: deque[Future[Encoded]] = deque()
    for job in jobs:
        under_way.append(pool.submit(job))
        if len(under_way) > ahead:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def interleave(rows: RawTensor, heads: int) -> RawTensor:
    """Reorders whole rows of each head from halves (i, i + D / 2) to pairs (2i, 2i + 1)."""
    count = rows.shape[0]
    halves = rows.data.reshape(heads, 2, count // heads // 2, -1)
    data = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)
    return replace(rows, stored=data)


def is_kept(parts: Sequence[WeightPart], kind: str) -> bool:
    """True if a tensor stays in MXFP4 although a mix gives it the type `kind`: a type of as many
    bits or more would only add bytes."""
    block = TYPES_BY_NAME[MXFP4]
    bits = block.num_bytes * 8 / block.values
    asked = TYPES_BY_NAME[kind]
    return asked.num_bytes * 8 / asked.values >= bits and all(_is_stored(part) for part in parts)


def _is_stored(part: WeightPart) -> bool:
    layout = part.layout
    if layout.gguf_type is not None:
        return layout.gguf_type == MXFP4
    alone = layout.options.get("global_scale") == "none"
    return layout.kind == "fp4" and layout.group_size == 32 and alone


def stored_blocks(parts: Sequence[WeightPart], begin: int, end: int) -> Encoded:
    """The concatenated blocks of whole matrices. Raises WeightFormatError for invalid exponents."""
    return Encoded(np.concatenate([_blocks(part) for part in parts[begin:end]]))


def _blocks(part: WeightPart) -> npt.NDArray[np.uint8]:
    buffers = part.stored().buffers
    weight = buffers["weight"]
    if part.layout.gguf_type is not None:
        blocks = weight.data.reshape(-1, TYPES_BY_NAME[MXFP4].num_bytes)
        exponents = blocks[:, :1]
    else:
        scale = buffers["scale"]
        if scale.dtype not in ("u8", "f8e8m0"):
            raise WeightFormatError(
                f"tensor {part.name!r} has groups of 32 with scales of {scale.dtype}, MXFP4 has"
                " exponents: convert the checkpoint from its unquantised form"
            )
        exponents = scale.data.reshape(-1, 1)
        packed = weight.data.reshape(-1, 16)
        values = np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1, 32)
        blocks = np.concatenate((exponents, values[:, :16] | values[:, 16:] << 4), axis=1)
    if (exponents == _NAN).any():
        raise WeightFormatError(
            f"tensor {part.name!r} has a value that is not finite, which {MXFP4} cannot express:"
            " repair the checkpoint"
        )
    return blocks.reshape(-1)
