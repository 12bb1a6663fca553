"""AWQ with 4 bits, as AutoAWQ writes it.

"gemm": X.qweight (in, out / 8) int32, eight output features to a word, in the order 0 2 4 6 1 3 5 7
from the lowest bits up; X.qzeros (groups, out / 8) int32 alike; X.scales (groups, out).
"gemv": X.qweight (out, in / 8), eight input features to a word in their order; X.qzeros (out, z)
and X.scales (out, 8 * z) with the groups along the columns, padded at the end.
weight[o, i] = (q - zero) * scale of the group of i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from vllmx_core.weights.coded import CodedRows
from vllmx_core.weights.part import Index, Span, StoredPart, WeightPart, WeightSource
from vllmx_core.weights.tensor import RawTensor

from vllmx_models.quantization.affine import U8, PackedLayout, group_map, groups_between, unpack
from vllmx_models.quantization.options import FLOATS, QuantReader
from vllmx_models.quantization.source import ModuleTensors, QuantizedSource

VERSIONS = {"gemm": "gemm", "exllama": "gemm", "gemv": "gemv"}
BACKENDS = (
    "auto",
    "auto_trainable",
    "autoawq",
    "exllama_v1",
    "exllama_v2",
    "gemm",
    "gemm_triton",
    "gemv",
    "machete",
    "marlin",
    "torch_awq",
    "torch_fused_awq",
)
"""The programs whose kernels may have run it last; all of them read the same tensors. llm-awq has
its own."""
BITS = 4
PER_WORD = 8
_GEMM_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where feature i of a word lies


class Awq(PackedLayout):
    """Words of eight features; the option "packing" is "gemm" (output) or "gemv" (input)."""

    kind: ClassVar[str] = "awq"

    def codes(self, part: StoredPart, rows: slice | Index) -> CodedRows:
        assert isinstance(rows, slice)
        first, last, cols = rows.start, rows.stop, part.shape[1]
        group_size = self.group_size or cols
        groups = -(-cols // group_size)
        buffers = {key: raw.in_memory() for key, raw in part.buffers.items()}
        qweight, qzeros = (np.asarray(buffers[key].view()) for key in ("qweight", "qzeros"))
        scales = buffers["scales"].to_f32()
        group_of = group_map(cols, group_size)
        if self.options["packing"] == "gemm":
            word, skipped = divmod(first, PER_WORD)
            words = slice(word, -(-last // PER_WORD))
            some = slice(skipped, skipped + last - first)
            codes, zeros = (_gemm_unpack(packed[:, words]).T[some] for packed in (qweight, qzeros))
            return CodedRows(codes, scales.T[first:last], zeros, group_of)
        codes = unpack(qweight[first:last], BITS, cols)
        zeros = unpack(qzeros[first:last], BITS, groups)
        return CodedRows(codes, scales[first:last, :groups], zeros, group_of)

    def cut(self, part: StoredPart, rows: Span, cols: Span) -> StoredPart | None:
        gemm = self.options["packing"] == "gemm"
        groups = groups_between(cols, part.shape[1], self.group_size or part.shape[1])
        packed = (*rows, *cols) if gemm else (*cols, *(groups or ())[:1])
        if groups is None or any(place % PER_WORD for place in packed):
            return None
        buffers = dict(part.buffers)
        if gemm:
            words = (rows[0] // PER_WORD, rows[1] // PER_WORD)
            buffers["qweight"] = buffers["qweight"].rows(*cols).cols(*words)
            buffers["qzeros"] = buffers["qzeros"].rows(*groups).cols(*words)
            buffers["scales"] = buffers["scales"].rows(*groups).cols(*rows)
        else:
            words = (groups[0] // PER_WORD, -(-groups[1] // PER_WORD))
            features = (cols[0] // PER_WORD, cols[1] // PER_WORD)
            buffers["qweight"] = buffers["qweight"].rows(*rows).cols(*features)
            buffers["qzeros"] = buffers["qzeros"].rows(*rows).cols(*words)
            buffers["scales"] = buffers["scales"].rows(*rows).cols(*groups)
        return replace(part, shape=(rows[1] - rows[0], cols[1] - cols[0]), buffers=buffers)


def awq(source: WeightSource, config: Mapping[str, Any]) -> QuantizedSource:
    """The scheme as a `QuantizationSpec` implementation; raises UnsupportedModelError."""
    return QuantizedSource(source, AwqScheme(config))


class AwqScheme:
    weight_suffix = ".weight"
    markers = (".qweight",)
    companions = (".qzeros", ".scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = QuantReader(_modern(config), "awq")
        read.choice("bits", (BITS,))
        read.choice("backend", BACKENDS, "auto")
        read.choice("zero_point", (True,), True)
        version_key = "version" if read.has("version") else "format"
        self._packing = VERSIONS[read.choice(version_key, VERSIONS, "gemm")]
        self._group_size = read.group_size()
        self._excluded = read.modules("modules_to_not_convert")
        self.name = f"awq {self._packing}"

    def excludes(self, module: str) -> bool:
        return self._excluded.match(module)

    def part(self, name: str, tensors: ModuleTensors) -> WeightPart:
        qweight = tensors.need(".qweight", ("i32",), rank=2)
        if self._packing == "gemm":
            cols, rows = qweight.shape[0], qweight.shape[1] * PER_WORD
        else:
            rows, cols = qweight.shape[0], qweight.shape[1] * PER_WORD
        group_size = self._group_size or cols
        groups = -(-cols // group_size)
        if self._packing == "gemm":
            words, scales = (groups, rows // PER_WORD), (groups, rows)
        else:
            width = _gemv_width(groups, group_size)
            words, scales = (rows, width), (rows, width * PER_WORD)
        buffers: dict[str, RawTensor] = {
            "qweight": qweight,
            "qzeros": tensors.shaped(".qzeros", ("i32",), words),
            "scales": tensors.shaped(".scales", FLOATS, scales),
        }
        layout = Awq(BITS, group_size, {"packing": self._packing})
        return StoredPart(name, (rows, cols), layout, buffers)


def _gemm_unpack(words: npt.NDArray[np.int32]) -> U8:
    """(n, 8w) output features of (n, w) words."""
    values = unpack(words, BITS, words.shape[1] * PER_WORD)
    return values.reshape(len(values), -1, PER_WORD)[..., _GEMM_PLACE].reshape(len(values), -1)


def _gemv_width(groups: int, group_size: int) -> int:
    """Words of zero points in a row: groups of 64 and 32 are padded to 2 and 4 words."""
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    return -(-groups // (PER_WORD * multiple)) * multiple


def _modern(config: Mapping[str, Any]) -> dict[str, Any]:
    """AutoAWQ's own quant_config.json has other names for two options."""
    named = dict(config)
    for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")):
        if named.get(new) is None:
            named[new] = named.get(old)
    if isinstance(named.get("version"), str):
        named["version"] = named["version"].lower()
    return named
