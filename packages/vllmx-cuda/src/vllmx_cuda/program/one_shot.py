"""Sums over ranks and the norms that follow: through memory that all ranks read, or NCCL."""

from __future__ import annotations

from typing import ClassVar

from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value
from vllmx_core.recorded.passes import num_reads, read_at_once

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.device.ranks import Peers
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant, vector_width
from vllmx_cuda.kernel_specs.types import ITEM_BYTES
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.norm_ops import add_rms_norm, coded
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes


class SummedNorm(AddRmsNorm):
    """`add_rms_norm` of the sum that all ranks' x make, which may take x's place."""

    name: ClassVar[str] = "summed_norm"


def join_norms(steps: OpList) -> OpList:
    """Makes one op of each sum over ranks and the norm behind it that alone reads it."""
    reads = num_reads(steps)
    joined: dict[Op, Op] = {}
    for op, norm in read_at_once(steps):
        if not isinstance(op, AllReduce) or type(norm) is not AddRmsNorm:
            continue
        if norm.x is op.out and op.x.dtype == "model" and reads[op.x] == 1:
            joined[norm] = SummedNorm(op.x, norm.residual, norm.w, norm.eps, norm.out, norm.total)
            joined[op] = joined[norm]
    ops = dict.fromkeys(joined.get(op, op) for op in steps.ops)
    return OpList(tuple(ops), steps.logits, steps.output)


class OneShot:
    """Launches of one_shot.cu for sums of one width."""

    def __init__(self, device: Device, peers: Peers, dtype: str) -> None:
        self._device, self._peers = device, peers
        width = peers.share.width
        options = {"VX_DTYPE": DTYPES[dtype], "VX_VEC": vector_width(width)}
        self._sum = KERNELS["one_shot_sum"].variant(**options)
        self._norm = KERNELS["one_shot_norm"].variant(**options)
        self._told = peers.arguments(ITEM_BYTES[DTYPES[dtype]])

    @property
    def variants(self) -> list[Variant]:
        return [self._sum, self._norm]

    def takes(self, rows: int) -> bool:
        return self._peers.takes(rows, self._peers.share.width)

    def sum(self, rows: int, x: Memory, y: Memory) -> None:
        """y, which may be x: the sum of all ranks' x."""
        shape = {"rows": rows, "width": self._peers.share.width}
        words = self._peers.table, self._peers.stop
        self._device.launch(self._sum, shape, (x, y, *words, shape["width"], *self._told))

    def norm(
        self, rows: int, x: Memory, residual: Memory, weight: Memory | None, y: Memory, eps: float
    ) -> None:
        """residual: with that sum added to it; y: its norm."""
        shape = {"rows": rows, "width": self._peers.share.width}
        words = self._peers.table, self._peers.stop
        arguments = (x, residual, weight, y, *words, shape["width"], eps, *self._told)
        self._device.launch(self._norm, shape, arguments)


def one_shot_of(x: Value, to: Lowering) -> OneShot | None:
    """Returns the launches for small sums of this value; None if NCCL computes all."""
    peers = to.others().peers
    if peers is None or x.dtype != "model" or x.width != peers.share.width:
        return None
    found = OneShot(to.device, peers, to.dtype)
    to.variants.extend(found.variants)
    return found


def all_reduce(op: AllReduce, to: Lowering) -> Enqueue:
    ranks, x, y = to.others(), to.place(op.x), to.place(op.out)
    dtype, one_shot = to.dtype if op.x.dtype == "model" else "f32", one_shot_of(op.x, to)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        rows = sizes.of(op.x.rows)
        if one_shot is not None and one_shot.takes(rows):
            one_shot.sum(rows, x, y)
        else:
            ranks.all_reduce(x, y, rows * op.x.width, dtype)

    return enqueue


def summed_norm(op: SummedNorm, to: Lowering) -> Enqueue:
    """Makes one launch of it where nobody wants the norm as codes."""
    ranks, x, before, y, after = to.others(), *map(to.place, (op.x, op.residual, op.out, op.total))
    one_shot, behind, wanted = (
        one_shot_of(op.x, to),
        add_rms_norm(op, to),
        coded("add_rms_norm_codes", op.out, to),
    )
    weight, width, copies = to.vector(op.w), op.x.width, op.total not in to.in_place

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        rows = sizes.of(op.x.rows)
        if one_shot is None or not one_shot.takes(rows):
            ranks.all_reduce(x, x, rows * width, to.dtype)
            behind(sizes, step)
        elif wanted(rows):
            one_shot.sum(rows, x, x)
            behind(sizes, step)
        else:
            if copies:
                to.device.copy(after, before.at(0, rows * to.item_bytes(width)))
            one_shot.norm(rows, x, after, weight, y, op.eps)

    return enqueue
