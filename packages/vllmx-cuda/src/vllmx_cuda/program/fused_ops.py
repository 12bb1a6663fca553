"""Products of few tokens that take in their neighbours: a gated activation, a residual, a norm.

Larger steps launch each op on its own. With `VLLMX_CUDA_UNFUSED=1` all do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from vllmx_core.ops.activation import Activation
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value, WeightRef
from vllmx_core.recorded.passes import read_at_once

from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs.rows import GATED, GATES
from vllmx_cuda.kernel_specs.types import FUSED_TOKENS
from vllmx_cuda.matrices.form import InputNorm
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


class NormedProduct(Op):
    """A product, the norm of its sum with a residual, and the product that alone reads that norm.
    Larger steps need the values between them."""

    name: ClassVar[str] = "normed_product"
    first: Linear
    norm: AddRmsNorm
    second: Linear | GatedProduct

    @property
    def parts(self) -> tuple[Linear, AddRmsNorm, Linear | GatedProduct]:
        return self.first, self.norm, self.second

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.first.x, self.norm.residual

    @property
    def writes(self) -> tuple[Value, ...]:
        return tuple(value for part in self.parts for value in part.writes)

    @property
    def weights(self) -> tuple[WeightRef, ...]:
        return tuple(ref for part in self.parts for ref in part.weights)


def join_products(steps: OpList) -> OpList:
    """Makes one op of each linear and the gated activation behind it that alone reads it, then of
    the products around a norm."""
    gated: dict[Op, Op] = {}
    for op, act in read_at_once(steps):
        if type(op) is Linear and isinstance(act, GatedAct) and act.kind in GATED:
            gated[op] = gated[act] = GatedProduct(op.x, op.w, act.kind, op.out, act.out)
    steps = _joined(steps, gated)
    following = dict(read_at_once(steps))
    normed: dict[Op, Op] = {}
    for op, norm in following.items():
        last = following.get(norm)
        if type(op) is not Linear or type(norm) is not AddRmsNorm or norm.x is not op.out:
            continue
        if type(last) in (Linear, GatedProduct) and op not in normed:
            assert isinstance(last, Linear | GatedProduct)
            normed[op] = normed[norm] = normed[last] = NormedProduct(op, norm, last)
    return _joined(steps, normed)


def _joined(steps: OpList, joined: dict[Op, Op]) -> OpList:
    ops = dict.fromkeys(joined.get(op, op) for op in steps.ops)
    return OpList(tuple(ops), steps.logits, steps.output)


def parts_of(op: Op) -> tuple[Op, ...]:
    """The ops that a joined one consists of; any other itself."""
    return op.parts if isinstance(op, NormedProduct) else (op,)


def gated_product(op: GatedProduct, to: Lowering, product: Enqueue, act: Enqueue) -> Enqueue:
    """`product` and `act` are the launches of steps that the fused kernel does not take."""
    fused = _gated(op, to, to.place(op.x), None)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        if fused is not None and sizes.of(op.x.rows) <= FUSED_TOKENS:
            fused(sizes, step)
            return
        product(sizes, step)
        act(sizes, step)

    return enqueue


def _gated(op: GatedProduct, to: Lowering, x: Memory, norm: InputNorm | None) -> Enqueue | None:
    """The gate in its product; None if no kernel has that for the matrix."""
    gate, matrix = 1 + GATES[op.kind], to.matrix(op.w)
    product = matrix.product(to, x, to.place(op.gated), to.dtype, norm=norm, gate=gate)
    if product.alone is None or not product.alone.gates:
        return None
    return lambda sizes, step: product.enqueue(sizes.of(op.x.rows))


def normed_product(
    op: NormedProduct, to: Lowering, parts: Sequence[Enqueue], act: Enqueue | None
) -> Enqueue:
    """Two launches for few tokens.

    Args:
        parts: the launches of larger steps.
        act: the launch of a gate that its product does not take.
    """
    first, norm, second = op.parts
    total, squares = to.place(norm.total), to.scratch.squares
    residual = to.place(norm.residual)
    before = to.matrix(first.w).product(
        to, to.place(first.x), total, to.dtype, residual=residual, squares=squares
    )
    behind = None
    if before.alone is not None and before.alone.blocks is not None:
        taken = InputNorm(to.vector(norm.w), squares, before.alone.blocks, norm.eps)
        behind = _normed(second, to, total, taken, act)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count = sizes.of(first.x.rows)
        if behind is None or count > FUSED_TOKENS:
            for launch in parts:
                launch(sizes, step)
            return
        before.enqueue(count)
        behind(sizes, step)

    return enqueue


def _normed(
    op: Linear | GatedProduct, to: Lowering, x: Memory, norm: InputNorm, act: Enqueue | None
) -> Enqueue | None:
    """The product that normalises its own x; None if no kernel has that for the matrix."""
    if isinstance(op, GatedProduct) and (fused := _gated(op, to, x, norm)):
        return fused
    product = to.matrix(op.w).product(to, x, to.place(op.out), to.dtype, norm=norm)
    if not product.takes_norms:
        return None

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        product.enqueue(sizes.of(op.x.rows))
        if act is not None:
            act(sizes, step)

    return enqueue
