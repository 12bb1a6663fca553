"""Packing and the lookup of native ops, without running a step."""

from __future__ import annotations

import pytest
from vllmx_core.ops.route import Route, RouteSpec
from vllmx_core.ops.values import Value
from vllmx_cpu.backend import CpuBackend
from vllmx_cpu.lowering.experts import MAX_EXPERTS
from vllmx_cpu.native import SCRATCH_BYTES, choose_isa, library
from vllmx_cpu.packing import MatrixShape
from vllmx_cpu.structs import VxElementwise, VxNorm


def test_a_native_op_is_found_by_its_name() -> None:
    isa = choose_isa()
    functions = {name: isa.op(name, VxElementwise) for name in ("add", "scale", "gated_act")}
    assert all(functions.values())
    assert len(set(functions.values())) == 3
    with pytest.raises(AssertionError, match="VxNorm is not as in C"):
        isa.op("add", VxNorm)


@pytest.mark.parametrize("rows", [2, 32, 33, 66, 100])
def test_packed_rows_of_a_gated_matrix_alternate_in_blocks(rows: int) -> None:
    shape = MatrixShape(rows, 4, "f32", gated=rows % 2 == 0)
    places = shape.packed_rows().tolist()
    assert len(set(places)) == rows
    assert max(places) < shape.tiles * 32
    assert shape.num_bytes == shape.tiles * 32 * 4 * 4
    if shape.gated:
        assert places[rows // 2] == 16
    assert library().vx_packed_bytes(1, 3, 2) == 32 * 4 * 2  # an odd column is padded to a pair


def test_more_experts_than_a_thread_has_room_for_are_refused() -> None:
    ops = [
        Route.of(Value(count), RouteSpec(1), None, None) for count in (MAX_EXPERTS, MAX_EXPERTS + 1)
    ]
    assert [CpuBackend().supports(op) for op in ops] == [True, False]
    assert 3 * 4 * (MAX_EXPERTS + 15) <= SCRATCH_BYTES
