"""The values of a step in their buffer: never two in one place at a time."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.ops.op import Op
from vllmx_core.ops.values import Value
from vllmx_core.recorded.arena import plan_arena


class AnyOp(Op):
    """Reads and writes whatever the test says."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[Value, ...]:
        return self.outputs


@pytest.mark.parametrize("seed", range(20))
def test_values_that_live_together_never_overlap(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = [Value(7)]
    ops = [AnyOp((), (values[0],))]
    for _ in range(40):
        reads = tuple(
            values[int(i)] for i in random.integers(max(0, len(values) - 6), len(values), 2)
        )
        writes = tuple(
            Value(int(random.integers(1, 99))) for _ in range(int(random.integers(1, 3)))
        )
        ops.append(AnyOp(reads, writes))
        values.extend(writes)
    keep = [values[3]]
    plan = plan_arena(ops, lambda value: value.width * 20, keep)
    born = {value: i for i, op in enumerate(ops) for value in op.writes}
    dies = {value: i for i, op in enumerate(ops) for value in (*op.reads, *op.writes)}
    dies[values[3]] = len(ops)
    for one in values:
        assert plan.offsets[one] % 64 == 0
        assert plan.offsets[one] + one.width * 20 <= plan.num_bytes
        for two in values:
            if one is two or born[one] > dies[two] or born[two] > dies[one]:
                continue
            begin, end = plan.offsets[one], plan.offsets[one] + one.width * 20
            assert plan.offsets[two] >= end or plan.offsets[two] + two.width * 20 <= begin
    assert plan.num_bytes < sum(value.width * 20 for value in values)


def test_an_output_may_take_over_the_space_of_an_input() -> None:
    first, other, total = Value(9), Value(50), Value(9)
    ops = [
        AnyOp((), (first,)),
        AnyOp((first,), (other,)),
        AnyOp((other, first), (Value(9), total)),
    ]
    plan = plan_arena(ops, lambda v: v.width * 4, [total], in_place={total: first})
    assert plan.offsets[total] == plan.offsets[first]
    assert len({plan.offsets[op.writes[0]] for op in ops}) == 3
