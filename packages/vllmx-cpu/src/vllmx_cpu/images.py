"""The additions for models that see images: the arrays of a step, as native ops find them,
rotations with axes, and the store of features."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Structure, c_void_p

import numpy as np
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.cross_attention import CrossAttention
from vllmx_core.ops.op import Op
from vllmx_core.ops.place import Place
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.tap import Tap
from vllmx_core.ops.values import WeightRef
from vllmx_core.plan import F32, I32, AnyArray, StepPlan
from vllmx_core.records import Record

from vllmx_cpu.memory import Bytes, allocate
from vllmx_cpu.structs import ints, pointers


class VxImages(Structure):
    """The arrays of a step; native/images.h."""

    _fields_ = [
        *pointers("feature_rows rope_positions patches table_rows table_weights keep"),
        *pointers("visible_to own_rows tap_rows windows cross_rows"),
        *ints("taps num_windows"),
    ]


_OF_STEP = (
    "feature_rows", "rope_positions", "visible_to", "own_rows", "tap_rows", "cross_rows",
)  # fmt: skip


class VxSee(Structure):
    """Arguments of `see`; native/images.cpp."""

    _fields_ = [("ops", c_void_p), ("step", VxImages)]
    arrays: Mapping[str, AnyArray]
    """The arrays that `step` points to."""


def see(plan: StepPlan, ops: VxImages) -> VxSee:
    """The first op of a step: its arguments keep copies of the plan's arrays."""
    arrays: dict[str, AnyArray] = {}
    for name in _OF_STEP:
        if (given := getattr(plan, name)) is not None:
            arrays[name] = np.array(given, np.int32, order="C")
    step = VxImages()
    if plan.patches is not None:
        rows = plan.patches
        arrays["patches"] = np.array(rows.values, np.float32, order="C")
        arrays["table_rows"] = np.array(rows.table_rows, np.int32, order="C")
        arrays["table_weights"] = np.array(rows.table_weights, np.float32, order="C")
        arrays["keep"] = np.array(rows.keep, np.int32, order="C")
        step.taps = rows.table_rows.shape[1]
        if rows.windows is not None:
            arrays["windows"] = np.array(rows.windows, np.int32, order="C")
            step.num_windows = len(rows.windows) - 1
    for name, array in arrays.items():
        setattr(step, name, array.ctypes.data)
    arguments = VxSee(ctypes.addressof(ops), step)
    arguments.arrays = arrays
    return arguments


def reads_images(ops: Iterable[Op]) -> bool:
    """True if any op reads arrays of a step that `see` brings, in a model without a tower."""
    for op in ops:
        if isinstance(op, Attention | SegmentAttention) and op.spec.rope_axes:
            return True
        if isinstance(op, Attention) and op.spec.spans:
            return True
        if isinstance(op, Place | Tap | CrossAttention):
            return True
    return False


Rotation = tuple[str, tuple[int, ...]]
"""A table of rotations by name, and the axis that turns each of its frequencies."""


class Turned(Record):
    """The cosines and sines of each token of a step, for attention to read row by row."""

    table: WeightRef
    axes: I32
    values: Bytes
    rows: I32
    """0, 1, 2 ..."""


def allocate_turned(ops: Iterable[Op], max_tokens: int) -> Mapping[Rotation, Turned]:
    """Room for each rotation with axes among the ops, which all layers share."""
    found: dict[Rotation, Turned] = {}
    rows: I32 = np.arange(max_tokens, dtype=np.int32)
    for op in ops:
        if isinstance(op, Attention | SegmentAttention) and op.rope and op.spec.rope_axes:
            values = allocate(max_tokens * op.spec.rotary_dim * 4)
            axes: I32 = np.array(op.spec.rope_axes, np.int32)
            found.setdefault((op.rope.name, op.spec.rope_axes), Turned(op.rope, axes, values, rows))
    return found


def allocate_features(shapes: Sequence[tuple[int, int]]) -> tuple[F32, ...]:
    """(rows, E) of each part of the store."""
    return tuple(
        allocate(4 * rows * width).view(np.float32).reshape(rows, width) for rows, width in shapes
    )
