"""A linear and the gated activation behind it: for few tokens one launch, which makes the same
bits."""

from __future__ import annotations

from typing import ClassVar

from vllmx_core.ops.activation import Activation
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value, WeightRef
from vllmx_core.recorded.passes import read_at_once

from vllmx_cuda.kernel_specs import Variant, has_tensor_cores
from vllmx_cuda.kernel_specs.linear import MMA_K, MMA_TILES, MMA_TOKENS, splits
from vllmx_cuda.kernel_specs.rows import GATED, GATES
from vllmx_cuda.matrices.dense import Dense
from vllmx_cuda.matrices.matrix import Matrix
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes


class GatedProduct(Op):
    """act(gate) * up of gate_up = x @ w.T + bias. `out` is gate_up, which larger steps need."""

    name: ClassVar[str] = "gated_product"
    results: ClassVar[tuple[str, ...]] = ("out", "gated")
    x: Value
    w: WeightRef
    kind: Activation
    out: Value
    gated: Value


def join_gates(steps: OpList) -> OpList:
    """Makes one op of each linear and the gated activation behind it that alone reads it."""
    joined: dict[Op, Op] = {}
    for op, act in read_at_once(steps):
        if type(op) is Linear and isinstance(act, GatedAct) and act.kind in GATED:
            joined[op] = joined[act] = GatedProduct(op.x, op.w, act.kind, op.out, act.out)
    ops = dict.fromkeys(joined.get(op, op) for op in steps.ops)
    return OpList(tuple(ops), steps.logits, steps.output)


def gated_product(op: GatedProduct, to: Lowering, product: Enqueue, act: Enqueue) -> Enqueue:
    """`product` and `act` are the launches of steps that gated_mma does not take."""
    matrix = to.matrix(op.w)
    kernels = _kernels(op, matrix, to)
    x, y, data = to.place(op.x), to.place(op.gated), matrix.segments[0].data

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count, width = sizes.of(op.x.rows), op.gated.width
        if not kernels or count > MMA_TOKENS:
            product(sizes, step)
            act(sizes, step)
            return
        kernel = kernels[(count - 1) * len(kernels) // MMA_TOKENS]
        shape = {"tokens": count, "outputs": width, "width": matrix.cols}
        arguments = (x, data, matrix.bias, y, count, width, matrix.cols)
        to.device.launch(kernel, shape, arguments)

    return enqueue


def _kernels(op: GatedProduct, matrix: Matrix, to: Lowering) -> list[Variant]:
    """The kernels for equal parts of `MMA_TOKENS` tokens; none for a matrix that gated_mma does not
    take. A product that is split over blocks keeps its order of sums."""
    segments, processors = matrix.segments, to.device.info.num_processors
    dense = len(segments) == 1 and isinstance(segments[0].form, Dense)
    able = matrix.cols % MMA_K == 0 and has_tensor_cores(to.dtype, to.target.arch)
    if not (dense and able) or splits(matrix.rows, matrix.cols, processors) > 1:
        return []
    act = GATES[op.kind]
    return [to.variant("gated_mma", VX_TILES=tiles, VX_ACT=act) for tiles in MMA_TILES]
