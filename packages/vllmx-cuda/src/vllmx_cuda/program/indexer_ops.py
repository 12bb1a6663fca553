"""The indexer of sparse attention as launches. Scores are kept for some tokens at a time, since a
token has one for each position of its context."""

from __future__ import annotations

from vllmx_core.ops.indexer import Indexer

from vllmx_cuda.kernel_specs.indexer import MAX_SHARED, shared_floats
from vllmx_cuda.program.latent_ops import VISIBILITY
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes

SCORED_TOKENS = 64
"""Tokens whose scores are kept."""


def can_index(op: Indexer) -> bool:
    fits = shared_floats(op.spec.num_heads, op.spec.head_size) <= MAX_SHARED
    return fits and op.key is not None


def stride_of(op: Indexer) -> int:
    """The scores that a token has room for: one for each position of the model's RoPE."""
    return op.rope.rows


def indexer(op: Indexer, to: Lowering) -> Enqueue:
    spec, pages, stride = op.spec, to.pages[op.spec.layer], stride_of(op)
    assert op.key is not None, "see `can_index`"
    operands = [to.place(value) for value in (op.q, op.key, op.head_weights, op.out)]
    q, key, head_weights, out = operands
    queries, scores, heads, size = (
        to.scratch.queries,
        to.scratch.scores,
        spec.num_heads,
        spec.head_size,
    )
    store, score, pick = map(to.variant, ("index_store", "index_score", "index_pick"))
    rope = to.vector(op.rope)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        places = (step.positions, step.slots[pages.group])
        options = (heads, size, spec.rotary_dim, int(spec.interleaved))
        shape = {"tokens": sizes.tokens, "heads": heads}
        to.device.launch(store, shape, (q, key, *places, rope, queries, pages.v, *options))
        starts = step.first_item[VISIBILITY]
        rows = (step.items[VISIBILITY], starts, step.block_tables[pages.group])
        for first in range(0, sizes.tokens, SCORED_TOKENS):
            tokens = min(SCORED_TOKENS, sizes.tokens - first)
            limits = (first, heads, size, spec.picked, stride, step.table_stride, to.page_shift)
            shape = {"tokens": tokens, "heads": heads, "size": size, "stride": stride}
            inputs = (queries, head_weights, pages.v, step.positions, *rows)
            to.device.launch(score, shape, (*inputs, scores, *limits))
            chosen = (scores, step.positions, starts, out, first, spec.picked, stride)
            to.device.launch(pick, {"tokens": tokens}, chosen)

    return enqueue
