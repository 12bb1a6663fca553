"""RMS norms as launches, straight to codes where the product behind one wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.head_norm import HeadNorm
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.values import Value

from vllmx_cuda.kernel_specs import Variant, vector_width
from vllmx_cuda.kernel_specs.codes8 import CODES
from vllmx_cuda.kernel_specs.norms import head_runs
from vllmx_cuda.matrices.form import ActivationCodes
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes


@dataclass(frozen=True, slots=True)
class CodedNorm:
    """A norm that writes codes."""

    kernel: Variant
    codes: ActivationCodes


def rms_norm(op: RmsNorm, to: Lowering) -> Enqueue:
    source, y, width, eps = to.place(op.x), to.place(op.out), op.x.width, op.eps
    weight, kernel = to.vector(op.w), to.variant("rms_norm", VX_VEC=vector_width(width))
    by_codes = coded("rms_norm_codes", op.out, to)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count = sizes.of(op.x.rows)
        shape, norm = {"rows": count, "width": width}, by_codes(count)
        if norm is None:
            to.device.launch(kernel, shape, (source, weight, y, width, eps))
            return
        out = to.products.codes, to.products.scales
        codes = norm.codes
        arguments = (source, weight, *out, width, eps, codes.scale, codes.pitch(count))
        to.device.launch(norm.kernel, shape, arguments)

    return enqueue


def head_norm(op: HeadNorm, to: Lowering) -> Enqueue:
    spec, size = op.spec, op.spec.head_size
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    kernel = to.variant("head_norm", VX_VEC=vector_width(size))
    shape = {
        "runs": head_runs(heads, kv_heads, spec.across),
        "width": heads * size if spec.across else size,
    }
    arguments = (
        to.place(op.qkv),
        to.vector(op.q_norm),
        to.vector(op.k_norm),
        to.place(op.out),
        heads,
        kv_heads,
        size,
        int(spec.across),
        int(spec.kind == "layer"),
        int(spec.values),
        spec.eps,
    )

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        to.device.launch(kernel, {"rows": sizes.tokens, **shape}, arguments)

    return enqueue


def add_rms_norm(op: AddRmsNorm, to: Lowering) -> Enqueue:
    """The kernel adds in place: where the residual is still wanted, into a copy of it."""
    source, before, y, after = map(to.place, (op.x, op.residual, op.out, op.total))
    weight, width, eps = to.vector(op.w), op.x.width, op.eps
    kernel = to.variant("add_rms_norm", VX_VEC=vector_width(width))
    by_codes = coded("add_rms_norm_codes", op.out, to)
    copies = op.total not in to.in_place

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        count = sizes.of(op.x.rows)
        if copies:
            to.device.copy(after, before.at(0, count * to.item_bytes(width)))
        shape, norm = {"rows": count, "width": width}, by_codes(count)
        if norm is None:
            to.device.launch(kernel, shape, (source, after, weight, y, width, eps))
            return
        written = to.products.codes, to.products.scales
        fixed, pitch = norm.codes.scale, norm.codes.pitch(count)
        arguments = (source, after, weight, *written, width, eps, fixed, pitch)
        to.device.launch(norm.kernel, shape, arguments)

    return enqueue


def coded(entry: str, out: Value, to: Lowering) -> Callable[[int], CodedNorm | None]:
    """What writes a norm's result as the codes that the product behind it wants for so many
    rows, and into its scratch; None: it wants the values."""
    product, vec = to.fed.get(out), vector_width(out.width)
    if product is None:
        return lambda m: None
    kernels = {
        codes: CodedNorm(
            to.variant(entry, VX_VEC=vec, VX_CODE=CODES[codes.kind], VX_GROUPS=int(codes.groups)),
            codes,
        )
        for codes in product.quantise
        if codes.kind in CODES
    }

    def chosen(m: int) -> CodedNorm | None:
        codes = product.codes(m)
        return None if codes is None else kernels.get(codes)

    return chosen
