"""In-situ quantisation: a dense checkpoint whose matrices are quantised when a backend reads them.

Rows are quantised when the backend asks for them, on the thread that asks, so that memory never
holds a second copy of the model. The mixes of `vllmx quantize` choose the type of each matrix; int8
and fp8 do not change the embedding and the head.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from vllmx_core.errors import ConfigError, UnsupportedModelError, WeightFormatError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.plugins.registry import Registry
from vllmx_core.records import Record
from vllmx_core.system.processors import available_processors
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.encoding import Encoder
from vllmx_core.weights.map import name_in
from vllmx_core.weights.part import (
    DENSE,
    Layout,
    SourceOver,
    Span,
    StoredPart,
    WeightPart,
    WeightSource,
)
from vllmx_core.weights.spec import WeightSpec
from vllmx_core.weights.tensor import RawTensor
from vllmx_core.weights.views import View, below, cols_of, entry_of

from vllmx_models.blocks.transposed_experts import lies_across, upright
from vllmx_models.formats.gguf.architecture import DECODER_TENSORS
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.formats.gguf.quantize.encoders import QUANTIZERS, encoder_for, float_rows
from vllmx_models.formats.gguf.quantize.header import architecture_table
from vllmx_models.formats.gguf.quantize.mixes import Layers, type_of
from vllmx_models.quantization.float8 import fp8_layout, fp8_part
from vllmx_models.quantization.int8 import int8_layout, int8_part

logger = logging.getLogger("vllmx.models")
ALIASES: Mapping[str, str] = {"q5_k": "q5_k_m", "q4_k": "q4_k_m", "q3_k": "q3_k_m"}
"""The mixes that llama.cpp means by the bare names."""
ROWS_ALONE = 1024
"""The most rows that the asking thread quantises alone; more are shared among all cores."""


class Encoding(Record):
    """The new form of a matrix: blocks of a GGUF type, "int8" or "fp8"."""

    kind: str
    encoder: Encoder

    def layout(self, cols: int) -> Layout:
        """Returns the layout of rows of a width."""
        if self.kind in _EIGHT_BITS:
            return _EIGHT_BITS[self.kind][0](cols)
        return TYPES_BY_NAME[self.kind].layout

    def encode(self, rows: RawTensor) -> StoredPart:
        """Quantises rows, (rows, cols) in f32, f16 or bf16."""
        found = self.encoder.encode(self.kind, rows)
        if self.kind not in _EIGHT_BITS:
            return weight_part(rows.name, TYPES_BY_NAME[self.kind], rows.shape, found.data)
        assert found.scales is not None
        return _EIGHT_BITS[self.kind][1](rows.name, rows.shape, found.data, found.scales)


_EIGHT_BITS = {"int8": (int8_layout, int8_part), "fp8": (fp8_layout, fp8_part)}


class Quantised(View):
    """A part that is quantised whenever it is read."""

    encoding: Encoding | None = None

    def rows(self, begin: int, end: int) -> StoredPart:
        assert self.encoding is not None
        return _made(self.of, self.encoding, begin, end)

    def dequantize(self, begin: int = 0, end: int | None = None) -> F32:
        return self.rows(begin, self.shape[0] if end is None else end).dequantize()

    def coded_rows(self, begin: int, end: int) -> CodedRows:
        return self.rows(begin, end).coded_rows(0, end - begin)

    def narrowed(self, rows: Span, cols: Span) -> WeightPart | None:
        """See `WeightPart.narrowed`: only blocks do not need the rest of their rows."""
        if self.layout.gguf_type is None or rows != (0, self.shape[0]):
            return None
        assert self.encoding is not None
        return quantised(cols_of(self.of, *cols), self.encoding)

    def entry(self, index: int) -> WeightPart:
        assert self.encoding is not None
        return quantised(entry_of(self.of, index), self.encoding)


def quantised(part: WeightPart, encoding: Encoding) -> WeightPart:
    """Returns a part that is quantised when it is read."""
    layout = encoding.layout(part.shape[-1])
    return Quantised(part.name, part.shape, layout, (part,), encoding=encoding)


def in_situ(name: str, checkpoint: Checkpoint, model: Model, registry: Registry) -> InSituSource:
    """Quantises a checkpoint as it is read: the implementation of a `QuantizerSpec`. Raises
    ConfigError for a checkpoint that is quantised already."""
    specs = [spec for spec in model.weights() if _quantised(spec)]
    checkpoint = replace(checkpoint, weights=upright(checkpoint.weights, specs))
    named = partial(name_in, checkpoint.weights)
    cols = {named(part): spec.cols for spec in specs for part in spec.parts}
    words = [spec for spec in specs if spec.role == "vocabulary"]
    vocabulary = {named(part) for spec in words for part in spec.parts}
    for part_name in cols:
        _check_dense(name, checkpoint.weights.part(part_name))
    across = partial(lies_across, checkpoint.weights)
    for part in (part for spec in specs for part in spec.parts if across(part, spec.cols)):
        raise ConfigError(
            f"--isq {name}: {named(part)!r} is stored with its input features first, across which"
            " blocks and scales would lie: leave --isq out, or give a checkpoint that is quantised"
            " already, such as the one in MXFP4 or a GGUF file",
            param="isq",
        )
    if name in ("int8", "fp8"):
        encoding = Encoding(name, encoder_for(registry, name))
        return InSituSource(checkpoint.weights, {n: encoding for n in cols if n not in vocabulary})
    types = matrix_types(name, checkpoint, model, registry)
    wanted = {kind for kind in types.values() if kind in QUANTIZERS}
    encodings = {kind: Encoding(kind, encoder_for(registry, kind)) for kind in wanted}
    return InSituSource(
        checkpoint.weights,
        {n: encodings[kind] for n, kind in types.items() if kind in encodings},
    )


def matrix_types(
    mix: str, checkpoint: Checkpoint, model: Model, registry: Registry
) -> dict[str, str]:
    """The GGUF type of each matrix in a mix such as q4_k_m, by the matrix's name in the checkpoint,
    of which only names are read."""
    specs = [spec for spec in model.weights() if _quantised(spec)]
    named = partial(name_in, checkpoint.weights)
    words = [spec for spec in specs if spec.role == "vocabulary"]
    heads = {named(part) for spec in words if spec.kind == "linear" for part in spec.parts}
    tables = {named(part) for spec in words if spec.kind == "embedding" for part in spec.parts}
    layers = _layers(checkpoint, model, tied=heads <= tables)
    file_name = _file_names(checkpoint, registry)
    cols = {named(part): spec.cols for spec in specs for part in spec.parts}
    mix = ALIASES.get(mix, mix)
    return {name: type_of(mix, file_name(name), (1, width), layers) for name, width in cols.items()}


def _quantised(spec: WeightSpec) -> bool:
    """True for matrices other than routers, whose few rows decide much."""
    return spec.kind in ("linear", "embedding", "stack") and spec.role != "router"


class InSituSource(SourceOver):
    """A `WeightSource` some of whose matrices are quantised whenever they are read."""

    def __init__(self, source: WeightSource, encodings: Mapping[str, Encoding]) -> None:
        self._source = source
        self._encodings = encodings

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError if `name` is missing, and on reading rows with values that are
        not finite."""
        part = self._source.part(name)
        encoding = self._encodings.get(name)
        return part if encoding is None else quantised(part, encoding)


def _made(part: WeightPart, encoding: Encoding, begin: int, end: int) -> StoredPart:
    if end - begin > ROWS_ALONE and len(part.shape) == 2:
        starts = range(begin, end, ROWS_ALONE)
        with ThreadPoolExecutor(available_processors(), "isq") as pool:
            jobs = (pool.submit(_made, part, encoding, s, min(s + ROWS_ALONE, end)) for s in starts)
            return below(part.name, [job.result() for job in list(jobs)]).stored()
    rows = float_rows(part, begin, end)
    shape = rows.shape
    try:
        made = encoding.encode(replace(rows, shape=(math.prod(shape[:-1]), shape[-1])))
    except WeightFormatError as error:
        raise WeightFormatError(f"{error.message}, or leave --isq out") from error
    if len(shape) == 2:
        return made
    buffers = {
        key: replace(raw, shape=(*shape[:-1], *raw.shape[1:])) for key, raw in made.buffers.items()
    }
    return replace(made, shape=shape, buffers=buffers)


def _check_dense(isq: str, part: WeightPart) -> None:
    if part.layout != DENSE:
        raise ConfigError(
            f"--isq {isq}: {part.name!r} is stored as {part.layout.kind} with {part.layout.bits:g}"
            " bits already, and quantising it again would cost accuracy: leave --isq out, or give"
            " the original checkpoint",
            param="isq",
        )


def _layers(checkpoint: Checkpoint, model: Model, *, tied: bool) -> Layers:
    """Reads the properties that mixes need from config.json."""
    heads = checkpoint.config.get("num_attention_heads")
    kv_heads = checkpoint.config.get("num_key_value_heads") or heads
    shared = heads // kv_heads if isinstance(heads, int) and isinstance(kv_heads, int) else 1
    layers = checkpoint.config.get("num_hidden_layers")
    count = layers if isinstance(layers, int) else len(model.shape.caches)
    experts = max((spec.count for spec in model.weights() if spec.role == "experts"), default=0)
    return Layers(count, shared, tied, experts)


def _file_names(checkpoint: Checkpoint, registry: Registry) -> Callable[[str], str]:
    """Returns a function to names in GGUF files, by which the mixes distinguish roles; those of the
    common decoder if the architecture has no GGUF form."""
    architecture = registry.model_for(checkpoint.config).architectures[0]
    try:
        tensors = architecture_table(registry, architecture)[1].tensors
    except UnsupportedModelError:
        tensors = DECODER_TENSORS
    stems = {ours: theirs for theirs, ours in tensors.items()}

    def name_of(name: str) -> str:
        numbers = re.findall(r"\.(\d+)(?=\.)", name)
        pattern = re.sub(r"\.\d+(?=\.)", ".{}", name.removesuffix(".weight"))
        stem = stems.get(pattern)
        return name if stem is None else f"{stem.format(*numbers[:1])}.weight"

    return name_of
