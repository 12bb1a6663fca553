"""Images as launches: patches and their positions, features in their store, rotations with axes."""

from __future__ import annotations

from vllmx_core.ops.keep import Keep
from vllmx_core.ops.merge import Merge
from vllmx_core.ops.mix import Mix
from vllmx_core.ops.patches import Patches
from vllmx_core.ops.place import Place
from vllmx_core.ops.tap import Tap

from vllmx_cuda.kernel_specs import vector_width
from vllmx_cuda.kernel_specs.images import axis_words
from vllmx_cuda.program.lowering import Enqueue, Lowering, Rotation
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import (
    FeatureRows,
    KeptRows,
    MixedRows,
    Neighbours,
    PatchValues,
    StepSizes,
    TapRows,
    axis_positions,
)


def turn(rotation: Rotation, to: Lowering) -> Enqueue:
    """Computes the rotation of each token, in front of the ops."""
    rope, axes = rotation
    kernel, table, y = to.variant("turn", VX_VEC=1), to.vector(rope), to.turned(rope, axes)
    half, positions, words = len(axes), axis_positions(axes), axis_words(axes)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count = sizes.tokens * half
        arguments = table, step.arrays[positions], y, count, half, positions.axes, *words
        to.device.launch(kernel, {"count": count}, arguments)

    return enqueue


def patches(op: Patches, to: Lowering) -> Enqueue:
    y, width = to.place(op.out), op.out.width
    kernel = to.variant("patches", VX_VEC=vector_width(width))

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count = sizes.tokens * width
        to.device.launch(kernel, {"count": count}, (step.arrays[PatchValues(width)], y, count))

    return enqueue


def mix(op: Mix, to: Lowering) -> Enqueue:
    (table,) = to.matrix(op.w).segments  # dense: see `plan_weights`
    y, width = to.place(op.out), op.out.width
    kernel = to.variant("mix", VX_VEC=vector_width(width))

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        rows, weights = (step.arrays[MixedRows(weights)] for weights in (False, True))
        to.device.launch(
            kernel,
            {"rows": sizes.tokens, "width": width},
            (table.data, rows, weights, y, width, sizes.taps),
        )

    return enqueue


def merge(op: Merge, to: Lowering) -> Enqueue:
    """Merges neighbouring rows: their mean, or joined, which is a copy as they are contiguous."""
    x, y, width = to.place(op.x), to.place(op.out), op.x.width
    if op.kind == "join":
        row_bytes = to.item_bytes(op.out.width)

        def copy(sizes: StepSizes, step: StepMemory) -> None:
            num_bytes = sizes.logit_rows * row_bytes
            to.device.copy(y.at(0, num_bytes), x.at(0, num_bytes))

        return copy
    kernel = to.variant("pool_mean", VX_VEC=vector_width(width))
    ends = Neighbours(op.count, last=False), Neighbours(op.count, last=True)

    def mean(sizes: StepSizes, step: StepMemory) -> None:
        first, last = (step.arrays[end] for end in ends)
        shape = {"rows": sizes.logit_rows, "width": width}
        to.device.launch(kernel, shape, (x, first, last, y, width))

    return mean


def keep(op: Keep | Tap, to: Lowering) -> Enqueue:
    """The rows of both lie in the store; a negative row is kept nowhere."""
    x, store, width = to.place(op.x), to.features[op.part], op.x.width
    kernel = to.variant("keep", VX_VEC=vector_width(width))
    rows = TapRows() if isinstance(op, Tap) else KeptRows()

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        shape = {"rows": sizes.of(rows.rows), "width": width}
        to.device.launch(kernel, shape, (x, step.arrays[rows], store, width))

    return enqueue


def place(op: Place, to: Lowering) -> Enqueue:
    x, y, width = to.place(op.x), to.place(op.out), op.x.width
    kernel, store = to.variant("place", VX_VEC=vector_width(width)), to.features[op.part]

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        shape = {"rows": sizes.tokens, "width": width}
        arguments = x, step.arrays[FeatureRows(op.own)], store, y, width, int(op.adds)
        to.device.launch(kernel, shape, arguments)

    return enqueue
