"""Recording, fusing and laying out a step, without running it."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_core.arena import plan_arena
from vllmx_core.tape import LogitRows, Node, Recorder, TokenIds, Value, WeightRef
from vllmx_cpu.fuse import fuse, gated_weights
from vllmx_cpu.native import library
from vllmx_cpu.packing import MatrixShape

EMBED, HEAD = WeightRef("embed", 50, 8), WeightRef("head", 50, 8)
GATE_UP, OTHER, DOWN = (
    WeightRef("gate_up", 32, 8),
    WeightRef("other", 32, 8),
    WeightRef("down", 8, 16),
)


def mlp(recorder: Recorder, x: Value, weight: WeightRef = GATE_UP) -> Value:
    return recorder.linear(recorder.gated_act(recorder.linear(x, weight), "silu"), DOWN)


def names(nodes: list[Node]) -> list[str]:
    return [node.op for node in nodes]


def test_a_gate_moves_into_its_linear() -> None:
    recorder = Recorder()
    x = recorder.embedding(TokenIds(), EMBED)
    recorder.logits(mlp(recorder, mlp(recorder, x)), LogitRows(), HEAD)
    assert gated_weights(recorder.nodes) == {"gate_up"}
    fused = fuse(recorder.nodes)
    assert names(fused) == ["embedding", "linear", "linear", "linear", "linear", "linear"]
    assert [node.options.get("activation") for node in fused[1:]] == ["silu", None] * 2 + [None]
    assert fused[1].writes[0].width == 16
    assert fused[2].reads == fused[1].writes


def test_a_product_that_is_read_twice_keeps_its_place() -> None:
    recorder = Recorder()
    x = recorder.embedding(TokenIds(), EMBED)
    product = recorder.linear(x, GATE_UP)
    recorder.gated_act(product, "silu")
    recorder.scale(product, 2.0)
    assert gated_weights(recorder.nodes) == frozenset()
    assert names(fuse(recorder.nodes)) == names(recorder.nodes)


def test_a_weight_with_another_use_keeps_its_layout() -> None:
    recorder = Recorder()
    x = recorder.embedding(TokenIds(), EMBED)
    mlp(recorder, x)
    mlp(recorder, x, OTHER)
    recorder.scale(recorder.linear(x, GATE_UP), 2.0)
    assert gated_weights(recorder.nodes) == {"other"}
    assert names(fuse(recorder.nodes)).count("gated_act") == 1


@pytest.mark.parametrize("seed", range(20))
def test_values_that_live_together_never_overlap(seed: int) -> None:
    random = np.random.default_rng(seed)
    nodes, values = [], [Value(7)]
    nodes.append(Node("embedding", (), (values[0],)))
    for _ in range(40):
        reads = tuple(
            values[int(i)] for i in random.integers(max(0, len(values) - 6), len(values), 2)
        )
        writes = tuple(
            Value(int(random.integers(1, 99))) for _ in range(int(random.integers(1, 3)))
        )
        nodes.append(Node("any", reads, writes))
        values.extend(writes)
    keep = [values[3]]
    plan = plan_arena(nodes, lambda value: value.width * 20, keep)
    born = {value: i for i, node in enumerate(nodes) for value in node.writes}
    dies = {value: i for i, node in enumerate(nodes) for value in (*node.reads, *node.writes)}
    dies[values[3]] = len(nodes)
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
    nodes = [
        Node("embedding", (), (first,)),
        Node("linear", (first,), (other,)),
        Node("rms_norm", (other, first), (Value(9), total)),
    ]
    plan = plan_arena(nodes, lambda v: v.width * 4, [total], in_place={total: first})
    assert plan.offsets[total] == plan.offsets[first]
    assert len({plan.offsets[node.writes[0]] for node in nodes}) == 3


@pytest.mark.parametrize("rows", [2, 32, 33, 66, 100])
def test_packed_rows_of_a_gated_matrix_alternate_in_blocks(rows: int) -> None:
    shape = MatrixShape(rows, 4, "f32", gated=rows % 2 == 0)
    places = [shape.packed_row(row) for row in range(rows)]
    assert len(set(places)) == rows
    assert max(places) < shape.tiles * 32
    assert shape.num_bytes == shape.tiles * 32 * 4 * 4
    if shape.gated:
        assert places[rows // 2] == 16
    assert library().vx_packed_bytes(1, 3, 2) == 32 * 4 * 2  # an odd column is padded to a pair
