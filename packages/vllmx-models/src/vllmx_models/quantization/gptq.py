"""GPTQ, as AutoGPTQ and GPTQModel write it.

X.qweight (in * bits / 32, out) int32: each column is a row of bits, input feature i at bit
i * bits. X.qzeros (groups, out * bits / 32) int32: the same along the output features; format
"gptq" stores the zero point minus one (modulo 2 ** bits), "gptq_v2" the zero point. X.scales
(groups, out). X.g_idx (in,) int32: the group of each input feature.
weight[o, i] = (q[i, o] - zero[g_idx[i], o]) * scale[g_idx[i], o].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from vllmx_core.plan import AnyArray
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import Index, Span, StoredPart, WeightPart, WeightSource
from vllmx_core.weights.tensor import RawTensor

from vllmx_models.quantization.affine import (
    PackedLayout,
    group_map,
    groups_between,
    packed_words,
    unpack,
)
from vllmx_models.quantization.modules import compiled
from vllmx_models.quantization.options import FLOATS, QuantReader
from vllmx_models.quantization.patterns import Pattern
from vllmx_models.quantization.source import ModuleTensors, QuantizedSource

BITS = (2, 3, 4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> the number to add to a stored zero point."""


class Gptq(PackedLayout):
    """Words of input features of one output feature each."""

    kind: ClassVar[str] = "gptq"
    gathers_codes: ClassVar[bool] = True

    def codes(self, part: StoredPart, rows: slice | Index) -> CodedRows:
        (out, cols), bits = part.shape, int(self.bits)
        buffers = {key: raw.in_memory() for key, raw in part.buffers.items()}
        qweight = np.asarray(buffers["qweight"].view())
        scales = buffers["scales"].to_f32().T
        if "qzeros" in buffers:
            stored = unpack(np.asarray(buffers["qzeros"].view()), bits, out)
            mask = np.uint8((1 << bits) - 1)
            zeros: AnyArray = ((stored + np.uint8(self.options["zero_offset"])) & mask).T
        else:
            zeros = np.broadcast_to(np.uint8(1 << (bits - 1)), scales.shape)
        g_idx = buffers["g_idx"].view() if "g_idx" in buffers else None
        return CodedRows(
            unpack(qweight[:, rows].T, bits, cols),
            scales[rows],
            zeros[rows],
            group_map(cols, self.group_size or cols, g_idx),
        )

    def cut(self, part: StoredPart, rows: Span, cols: Span) -> StoredPart | None:
        """See `Layout.cut`. All groups stay where features are not in the order of groups."""
        buffers, bits = dict(part.buffers), int(self.bits)
        (first, last), (begin, end) = rows, cols
        span = groups_between(cols, part.shape[1], self.group_size or part.shape[1])
        if any(place * bits % 32 for place in (*rows, *cols)):
            return None
        if self.options["act_order"]:
            span = (0, buffers["scales"].shape[0])
            buffers["g_idx"] = buffers["g_idx"].rows(*cols)
        elif span is None:
            return None
        else:
            buffers.pop("g_idx", None)
        words = (begin * bits // 32, end * bits // 32)
        buffers["qweight"] = buffers["qweight"].rows(*words).cols(*rows)
        buffers["scales"] = buffers["scales"].rows(*span).cols(*rows)
        if "qzeros" in buffers:
            words = (first * bits // 32, last * bits // 32)
            buffers["qzeros"] = buffers["qzeros"].rows(*span).cols(*words)
        return replace(part, shape=(last - first, end - begin), buffers=buffers)


def gptq(source: WeightSource, config: Mapping[str, Any]) -> QuantizedSource:
    """The scheme as a `QuantizationSpec` implementation; raises UnsupportedModelError."""
    return QuantizedSource(source, GptqScheme(config))


class GptqScheme:
    weight_suffix = ".weight"
    markers = (".qweight",)
    companions = (".qzeros", ".scales", ".g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = QuantReader(config, "gptq")
        format_key = "checkpoint_format" if read.has("checkpoint_format") else "format"
        self._zero_offset = FORMATS[read.choice(format_key, FORMATS, "gptq")]
        read.choice("is_marlin_format", (False,), False)
        read.choice("pack_dtype", ("int32", "torch.int32"), "int32")
        self._read = read
        self._excluded = read.modules("modules_to_not_convert")
        self._dynamic = _dynamic(read)
        self.name = f"gptq {read.choice('bits', BITS)} bit"
        read.group_size()

    def excludes(self, module: str) -> bool:
        return self._excluded.match(module) or self._override(module) is None

    def part(self, name: str, tensors: ModuleTensors) -> WeightPart:
        override = self._override(tensors.stem) or {}
        read = QuantReader({**self._read.config, **override}, f"gptq module {tensors.stem}")
        bits = read.choice("bits", BITS)
        symmetric = read.flag("sym", True)
        qweight = tensors.need(".qweight", ("i32",), rank=2)
        words, out = qweight.shape
        cols = words * 32 // bits
        if cols * bits != words * 32 or out * bits % 32:
            multiple = 32 // math.gcd(32, bits)
            expected = f"whole {bits}-bit integers and a multiple of {multiple} columns"
            raise tensors.error(".qweight", f"has shape {list(qweight.shape)}", expected)
        group_size = read.group_size() or cols
        groups = -(-cols // group_size)
        buffers = {
            "qweight": qweight,
            "scales": tensors.shaped(".scales", FLOATS, (groups, out)),
        }
        if not symmetric or tensors.get(".qzeros") is not None:
            shape = (groups, packed_words(out, bits))
            buffers["qzeros"] = tensors.shaped(".qzeros", ("i32",), shape)
        g_idx = _group_index(tensors, cols, groups, needed=read.flag("desc_act", False))
        if g_idx is not None:
            buffers["g_idx"] = g_idx
        in_order = np.arange(cols) // group_size
        act_order = g_idx is not None and not np.array_equal(g_idx.view(), in_order)
        options: dict[str, str | int | float | bool] = {
            "zero_offset": self._zero_offset,
            "symmetric": symmetric,
            "act_order": act_order,
        }
        return StoredPart(name, (out, cols), Gptq(bits, group_size, options), buffers)

    def _override(self, module: str) -> Mapping[str, Any] | None:
        """Options of this module that differ; None: it is not quantised."""
        for search, options in self._dynamic:
            if search.match(module):
                return options
        return {}


def _group_index(
    tensors: ModuleTensors, cols: int, groups: int, *, needed: bool
) -> RawTensor | None:
    if tensors.get(".g_idx") is None and (not needed or groups == 1):
        return None
    return tensors.groups(".g_idx", cols, groups)


def _dynamic(read: QuantReader) -> list[tuple[Pattern, Mapping[str, Any] | None]]:
    """GPTQModel's overrides: a pattern after "-:" takes modules out, others change options."""
    rules: list[tuple[Pattern, Mapping[str, Any] | None]] = []
    for pattern, options in read.mapping("dynamic").items():
        search = compiled(pattern.removeprefix("-:").removeprefix("+:"), read.source)
        if not isinstance(options, Mapping):
            raise read.error("dynamic", "must map patterns to objects of options")
        rules.append((search, None if pattern.startswith("-:") else options))
    return rules
