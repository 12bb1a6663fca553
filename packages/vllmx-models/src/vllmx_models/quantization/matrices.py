"""Parts of float8 and float4 matrices, alike in all schemes that have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.weights.part import DType, QuantLayout, RawTensor, WeightPart, float8_to_f32
from vllmx_core.weights.picks import decoded_entries

from vllmx_models.quantization.options import FLOATS
from vllmx_models.quantization.scaled import apply_scales, e2m1_to_f32, scales_to_f32
from vllmx_models.quantization.source import ModuleTensors

Options = Mapping[str, str | int | float | bool]
SCALES: tuple[DType, ...] = (*FLOATS, "f8e8m0", "u8")


def fp8_part(
    name: str,
    tensors: ModuleTensors,
    scale_suffix: str,
    block: tuple[int, int] | None,
    activations: Options,
) -> WeightPart:
    """X.weight (rows, cols) in float8 times its scale: of each block, the edge ones smaller, or
    where `block` is None one for the tensor or for each row. A stack of matrices has one for each
    row."""
    weight = tensors.need(".weight", ("f8e4m3", "f8e5m2"))
    if block is None and len(weight.shape) == 3:
        return _fp8_stack(name, tensors, scale_suffix, activations)
    rows, cols = tensors.need(".weight", (weight.dtype,), rank=2).shape
    options = {**activations, "dtype": weight.dtype}
    if block is None:
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (rows,), (rows, 1), (1, 1))
        scale = tensors.shaped(scale_suffix, SCALES, *shapes)
        whole = math.prod(scale.shape) == 1
        options["strategy"] = "tensor" if whole else "channel"
        options["block_rows"], options["block_cols"] = rows if whole else 1, cols
    else:
        shape = (-(-rows // block[0]), -(-cols // block[1]))
        scale = tensors.shaped(scale_suffix, SCALES, shape)
        options["strategy"], options["block_rows"], options["block_cols"] = "block", *block
    buffers = {"weight": weight, "scale": scale, **input_scale(tensors)}
    return WeightPart(name, weight.shape, QuantLayout("fp8", 8, None, options), buffers, decode_fp8)


def _fp8_stack(
    name: str, tensors: ModuleTensors, scale_suffix: str, activations: Options
) -> WeightPart:
    """X.weight (count, rows, cols) and scales (count, rows, 1)."""
    weight = tensors.need(".weight", ("f8e4m3", "f8e5m2"), rank=3)
    count, rows, cols = weight.shape
    scale = tensors.shaped(scale_suffix, SCALES, (count, rows, 1))
    options = {
        **activations,
        "dtype": weight.dtype,
        "strategy": "channel",
        "block_rows": 1,
        "block_cols": cols,
    }
    layout = QuantLayout("fp8", 8, None, options)
    return WeightPart(name, weight.shape, layout, {"weight": weight, "scale": scale}, decode_fp8)


def decode_fp8(part: WeightPart, first: int, last: int) -> F32:
    """Entries of the first dimension as float32; one rounding."""
    weight, options = part.buffers["weight"], part.layout.options
    if len(part.shape) == 3:
        return decoded_entries(part, first, last)
    scales = scales_to_f32(part.buffers["scale"].in_memory())
    if options["strategy"] != "block":
        scales = np.broadcast_to(scales.reshape(-1, 1), (part.shape[0], 1))
        values = float8_to_f32(np.asarray(weight.rows(first, last).view()), weight.dtype)
        return apply_scales(values, scales[first:last], (1, max(part.shape[1], 1)))
    rows, width = int(options["block_rows"]), int(options["block_cols"])
    start = first // rows * rows  # blocks are decoded whole
    stop = min(-(-last // rows) * rows, part.shape[0])
    values = float8_to_f32(np.asarray(weight.rows(start, stop).view()), weight.dtype)
    found = apply_scales(values, scales[start // rows : -(-stop // rows)], (rows, width))
    return found[first - start : last - start]


def fp4_part(
    name: str,
    weight: RawTensor,
    scale: RawTensor,
    shape: tuple[int, ...],
    *,
    global_scale: RawTensor | None = None,
    combine: Literal["none", "multiply", "divide"] = "none",
    extra: Mapping[str, RawTensor] | None = None,
    activations: Options | None = None,
) -> WeightPart:
    """Matrices of e2m1 values, two to a byte along the last axis of `shape`, times a scale for each
    group, which is `combine`d with the global one first. The caller has checked the sizes."""
    groups = scale.shape[-1]
    group_size = shape[-1] // groups if groups else None
    buffers = {"weight": weight, "scale": scale, **(extra or {})}
    if global_scale is not None:
        buffers["global_scale"] = global_scale
    options = {**(activations or {}), "global_scale": combine}
    layout = QuantLayout("fp4", 4, group_size, options)
    return WeightPart(name, shape, layout, buffers, decode_fp4)


def decode_fp4(part: WeightPart, first: int, last: int) -> F32:
    """Entries of the first dimension as float32; the group's scale is rounded when it is combined
    with the global one, the product once more."""
    cols = part.shape[-1]
    packed = np.asarray(part.buffers["weight"].rows(first, last).view()).reshape(-1, cols // 2)
    scales = scales_to_f32(part.buffers["scale"].rows(first, last)).reshape(len(packed), -1)
    if part.layout.options["global_scale"] != "none":
        whole = part.buffers["global_scale"].to_f32().reshape(())
        multiply = part.layout.options["global_scale"] == "multiply"
        scales = scales * whole if multiply else scales / whole
    values = e2m1_to_f32(packed)
    found = apply_scales(values, scales, (1, part.layout.group_size or 1))
    return found.reshape(last - first, *part.shape[1:])


def input_scale(tensors: ModuleTensors, suffix: str = ".input_scale") -> dict[str, RawTensor]:
    """The static scale of the activations, where the checkpoint has one."""
    if tensors.get(suffix) is None:
        return {}
    return {"input_scale": tensors.shaped(suffix, FLOATS, (), (1,))}
