"""Latent attention as launches: queries are absorbed, rows stored, attended to by items, and the
answers brought out of the space of the latents. A prompt's tokens are items too, so that a token's
answer does not depend on how its prompt was cut."""

from __future__ import annotations

from collections.abc import Callable

from vllmx_core.ops.latent_attention import LatentAttention, LatentSpec
from vllmx_core.ops.values import WeightRef

from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs import vector_width
from vllmx_cuda.kernel_specs.latent import HEADS_A_BLOCK, MAX_RANK
from vllmx_cuda.kernel_specs.linear import GEMV_TOKENS
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes
from vllmx_cuda.program.work import Visibility

VISIBILITY = Visibility()


def can_attend(op: LatentAttention) -> bool:
    return op.spec.rank <= MAX_RANK


def blocks_an_item(spec: LatentSpec) -> int:
    return -(-spec.num_heads // HEADS_A_BLOCK)


def latent_attention(op: LatentAttention, to: Lowering) -> Enqueue:
    spec, heads = op.spec, op.spec.num_heads
    q, y = to.place(op.q), to.place(op.out)
    scratch = to.scratch
    row, head = spec.row_size, spec.nope_size + spec.rotary_dim
    absorb = _by_head(op.k_b, to, q, (heads * head, head), scratch.queries, (heads * row, row))
    found, widths = scratch.found, (heads * spec.rank, spec.rank)
    bring_out = _by_head(op.v_b, to, found, widths, y, (heads * spec.value_size, spec.value_size))
    store, decode = _store(op, to), _decode(op, to)
    combine = to.variant("latent_combine")

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        absorb(sizes.tokens)
        store(sizes, step)
        decode(sizes, step)
        joined = (scratch.partial, scratch.weights, step.first_item[VISIBILITY], found)
        shape = {"tokens": sizes.tokens, "heads": heads}
        to.device.launch(combine, shape, (*joined, heads, spec.rank))
        bring_out(sizes.tokens)

    return enqueue


def _store(op: LatentAttention, to: Lowering) -> Enqueue:
    """Norms and turns each token's latent into its page, and turns the queries."""
    spec, kernel = op.spec, to.variant("latent_store")
    pages, sizes_of_head = to.pages[spec.layer], (spec.rank, spec.nope_size, spec.rotary_dim)
    q, latent, queries = to.place(op.q), to.place(op.latent), to.scratch.queries
    vectors = to.vector(op.norm), to.vector(op.rope)
    options = (spec.num_heads, *sizes_of_head, int(spec.interleaved), spec.norm_eps)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        places = (step.positions, step.slots[pages.group])
        arguments = (latent, q, *places, *vectors, queries, pages.k, *options)
        shape = {"tokens": sizes.tokens, "heads": spec.num_heads}
        to.device.launch(kernel, shape, arguments)

    return enqueue


def _decode(op: LatentAttention, to: Lowering) -> Enqueue:
    """Attends to the latents of the pages, in parts where there are several items a token."""
    spec, scratch, kernel = op.spec, to.scratch, to.variant("latent_decode")
    pages, heads = to.pages[spec.layer], spec.num_heads
    picked = None if op.picked is None else to.place(op.picked)
    num_picked = 0 if op.picked is None else op.picked.width

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        items = (step.items[VISIBILITY], step.first_item[VISIBILITY])
        results = (scratch.found, scratch.partial, scratch.weights)
        shape = {
            "items": sizes.items,
            "heads": heads,
            "rank": spec.rank,
            "rotary": spec.rotary_dim,
        }
        arguments = (
            scratch.queries,
            pages.k,
            *items,
            step.block_tables[pages.group],
            *results,
            heads,
            spec.rank,
            spec.rotary_dim,
            step.table_stride,
            to.page_shift,
            spec.scale,
            step.positions,
            picked,
            num_picked,
        )
        to.device.launch(kernel, shape, arguments)

    return enqueue


def _by_head(
    stack: WeightRef,
    to: Lowering,
    x: Memory,
    x_strides: tuple[int, int],
    y: Memory,
    y_strides: tuple[int, int],
) -> Callable[[int], None]:
    """Each head's part of so many rows of x times its own matrix. Strides: from one row to the
    next, and from one head to the next."""
    (segment,), vec = to.matrix(stack).segments, vector_width(stack.cols, *x_strides)
    kernels = {
        tile: to.variant("heads_gemv", VX_VEC=vec, VX_TOKENS=tile, VX_OUT=0) for tile in GEMV_TOKENS
    }

    def multiply(tokens: int) -> None:
        tile = next((tile for tile in GEMV_TOKENS if tile >= tokens), GEMV_TOKENS[-1])
        shape = {"tokens": tokens, "outputs": stack.rows, "heads": stack.count}
        arguments = (x, segment.data, y, tokens, stack.rows, stack.cols, *x_strides, *y_strides)
        to.device.launch(kernels[tile], shape, arguments)

    return multiply
