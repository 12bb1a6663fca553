"""Finds the readers of a value, which a fusion must know before it takes the value away."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value


def num_reads(steps: OpList) -> Counter[Value]:
    """Counts the reads of each value; the logits count once more, for the sampler."""
    reads = Counter(value for op in steps.ops for value in op.reads)
    reads[steps.logits] += 1
    return reads


def read_at_once(steps: OpList) -> list[tuple[Op, Op]]:
    """(op, the next op), where the next op alone reads the first result of the op, once: a fusion
    of the two hides that value from nobody."""
    reads = num_reads(steps)
    return [
        (op, following)
        for op, following in pairwise(steps.ops)
        if op.writes and reads[op.writes[0]] == 1 and op.writes[0] in following.reads
    ]
