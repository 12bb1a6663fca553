"""Weights of compressed-tensors.

Integers of fewer than 8 bits, or 8 with format pack-quantized: X.weight_packed (rows, words) int32,
each row a string of bits with input feature i at bit i * bits, values offset by 2 ** (bits - 1);
X.weight_shape; X.weight_scale (rows, groups), (rows, 1) or (1,); X.weight_zero_point packed alike
along the rows, or plain int8; X.weight_g_idx. int8: X.weight with scale and zero point. Float8:
X.weight with a scale for the tensor, a row or a block. Float4: X.weight_packed U8 with scales of 16
(F8_E4M3, divided by X.weight_global_scale) or of 32 (exponents).
"""

from __future__ import annotations

import numpy as np
from vllmx_core.records import Record
from vllmx_core.weights.part import StoredPart, WeightPart
from vllmx_core.weights.tensor import RawTensor

from vllmx_models.quantization.affine import packed_words
from vllmx_models.quantization.float4 import fp4_part
from vllmx_models.quantization.float8 import checkpoint_part
from vllmx_models.quantization.int8 import Int8
from vllmx_models.quantization.options import FLOATS, QuantReader
from vllmx_models.quantization.pack_int import PackInt
from vllmx_models.quantization.scaled import Options, input_scale
from vllmx_models.quantization.source import ModuleTensors

STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


class WeightArgs(Record):
    """`config_groups.*.weights`."""

    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None

    def part(self, name: str, tensors: ModuleTensors, activations: Options) -> WeightPart:
        """The weight of one module; raises WeightFormatError."""
        if self.is_float and self.bits == 4:
            return self._fp4(name, tensors, activations)
        if self.is_float:
            return checkpoint_part(name, tensors, ".weight_scale", self.block, activations)
        if tensors.get(".weight_packed") is not None:
            return self._packed(name, tensors, activations)
        return self._int8(name, tensors, activations)

    def _packed(self, name: str, tensors: ModuleTensors, activations: Options) -> WeightPart:
        packed = tensors.need(".weight_packed", ("i32",), rank=2)
        rows, cols = _stored_shape(tensors)
        if packed.shape != (rows, packed_words(cols, self.bits)):
            expected = f"{[rows, packed_words(cols, self.bits)]} ({self.bits} bits of {cols})"
            found = f"has shape {list(packed.shape)}"
            raise tensors.error(".weight_packed", found, expected)
        groups = self._groups(cols)
        scale = tensors.shaped(".weight_scale", FLOATS, *self._grid(rows, groups))
        buffers = {"weight": packed, "scale": scale, **input_scale(tensors)}
        if not self.symmetric:
            words = (packed_words(rows, self.bits), groups)
            stored = tensors.need(".weight_zero_point", ("i32", "i8"))
            shapes = [words] if stored.dtype == "i32" else self._grid(rows, groups)
            zero_point = tensors.shaped(".weight_zero_point", ("i32", "i8"), *shapes)
            buffers["zero_point"] = zero_point
        g_idx = _group_index(tensors, cols, groups)
        if g_idx is not None:
            buffers["g_idx"] = g_idx
        options = {**activations, "symmetric": self.symmetric, "act_order": g_idx is not None}
        group_size = self.group_size if self.strategy == "group" else cols
        return StoredPart(name, (rows, cols), PackInt(self.bits, group_size, options), buffers)

    def _int8(self, name: str, tensors: ModuleTensors, activations: Options) -> WeightPart:
        weight = tensors.need(".weight", ("i8",), rank=2)
        rows, cols = weight.shape
        grid = self._grid(rows, self._groups(cols))
        scale = tensors.shaped(".weight_scale", FLOATS, *grid)
        buffers = {"weight": weight, "scale": scale, **input_scale(tensors)}
        if not self.symmetric:
            buffers["zero_point"] = tensors.shaped(".weight_zero_point", ("i8",), *grid)
        options = {**activations, "strategy": self.strategy, "symmetric": self.symmetric}
        group_size = self.group_size if self.strategy == "group" else cols
        return StoredPart(name, (rows, cols), Int8(self.bits, group_size, options), buffers)

    def _fp4(self, name: str, tensors: ModuleTensors, activations: Options) -> WeightPart:
        packed = tensors.need(".weight_packed", ("u8",), rank=2)
        rows, cols = packed.shape[0], packed.shape[1] * 2
        group = self.group_size or 1
        if cols % group:
            found = f"has shape {list(packed.shape)}"
            raise tensors.error(".weight_packed", found, f"a multiple of {group // 2} in a row")
        nvfp4 = self.strategy == "tensor_group"
        scale_shape = (rows, cols // group)
        if not nvfp4:
            scale = tensors.shaped(".weight_scale", ("u8", "f8e8m0"), scale_shape)
            return fp4_part(name, packed, scale, (rows, cols), activations=activations)
        return fp4_part(
            name,
            packed,
            tensors.shaped(".weight_scale", ("f8e4m3",), scale_shape),
            (rows, cols),
            global_scale=tensors.shaped(".weight_global_scale", ("f32",), (), (1,)),
            combine="divide",
            extra=input_scale(tensors, ".input_global_scale"),
            activations=activations,
        )

    def _groups(self, cols: int) -> int:
        if self.strategy != "group" or self.group_size is None:
            return 1
        return -(-cols // self.group_size)

    def _grid(self, rows: int, groups: int) -> list[tuple[int, ...]]:
        """Shapes that scales may have."""
        if self.strategy == "tensor":
            return [(1,), (), (1, 1)]
        if self.strategy == "channel":
            return [(rows, 1), (rows,)]
        return [(rows, groups)]


def read_weight_args(read: QuantReader) -> WeightArgs:
    """Raises UnsupportedModelError for what is not read here."""
    is_float = read.choice("type", ("int", "float"), "int") == "float"
    bits = read.choice("num_bits", (4, 8) if is_float else (2, 3, 4, 5, 6, 7, 8), 8)
    read.choice("dynamic", (False,), False)
    group_size = read.group_size()
    default = "channel" if group_size is None else "group"
    strategy = read.choice("strategy", STRATEGIES, default)
    block = _block(read) if strategy == "block" else None
    if (
        is_float
        and bits == 4
        and (strategy, group_size) not in (("tensor_group", 16), ("group", 32))
    ):
        raise read.error(
            "strategy",
            "is not read for 4-bit floats with this group_size; known: tensor_group"
            " with 16, group with 32",
        )
    if is_float and bits == 8 and strategy not in ("tensor", "channel", "block"):
        raise read.error("strategy", "is not read for FP8; known: tensor, channel, block")
    if not is_float and strategy not in ("tensor", "channel", "group"):
        raise read.error("strategy", "is not read for integers; known: tensor, channel, group")
    if strategy == "group" and group_size is None:
        raise read.error("group_size", "must be above 0 where strategy is group")
    return WeightArgs(bits, is_float, read.flag("symmetric", True), strategy, group_size, block)


def read_activations(read: QuantReader) -> Options:
    """`input_activations` as options of a layout."""
    if not read.config:
        return {"activations": "none"}
    dynamic = read.choice("dynamic", (True, False, "local"), False)
    return {
        "activations": "static" if dynamic is False else "dynamic",
        "activation_bits": read.choice("num_bits", (4, 8), 8),
        "activation_type": read.choice("type", ("int", "float"), "int"),
        "activation_strategy": read.choice("strategy", (*STRATEGIES, "token"), "tensor"),
        "activation_symmetric": read.flag("symmetric", True),
    }


def _block(read: QuantReader) -> tuple[int, int]:
    value = read.config.get("block_structure")
    if isinstance(value, str):  # early versions: "128x128"
        value = [int(size) if size.isdecimal() else 0 for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2:
        raise read.error("block_structure", "must be two integers")
    if any(type(size) is not int or not 0 < size <= 1 << 24 for size in value):
        raise read.error("block_structure", "must be two integers above 0")
    return value[0], value[1]


def _stored_shape(tensors: ModuleTensors) -> tuple[int, int]:
    stored = tensors.shaped(".weight_shape", ("i64", "i32"), (2,))
    rows, cols = (int(size) for size in np.asarray(stored.view()))
    if rows < 1 or cols < 1 or rows * cols > 1 << 40:
        raise tensors.error(".weight_shape", f"holds {[rows, cols]}", "the shape of a matrix")
    return rows, cols


def _group_index(tensors: ModuleTensors, cols: int, groups: int) -> RawTensor | None:
    """None where there is none, or one that holds -1: it was never set."""
    if tensors.get(".weight_g_idx") is None:
        return None
    if (tensors.need(".weight_g_idx", ("i32", "i64")).view() == -1).any():
        return None
    return tensors.groups(".weight_g_idx", cols, groups)
