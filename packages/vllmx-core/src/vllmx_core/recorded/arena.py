"""Places the arrays of a recorded step in one buffer, whose space is reused after the last
reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllmx_core.ops.op import Op, last_reads
from vllmx_core.ops.values import Value
from vllmx_core.records import Record


class ArenaPlan(Record):
    """Byte offsets of all values in a buffer of `num_bytes`."""

    offsets: Mapping[Value, int]
    num_bytes: int


def plan_arena(
    ops: Sequence[Op],
    value_bytes: Callable[[Value], int],
    keep: Sequence[Value],
    *,
    alignment: int = 64,
    in_place: Mapping[Value, Value] | None = None,
) -> ArenaPlan:
    """First fit over the values' lifetimes, from the op that writes one to the last that reads it;
    `keep` live to the end. An op's outputs never share space with its inputs, but for those of
    `in_place`: output -> input of the same op, read by no later one, whose space it takes over."""
    last = last_reads(ops) | dict.fromkeys(keep, len(ops))
    offsets: dict[Value, int] = {}
    taken_over = in_place or {}
    live: list[tuple[int, int, Value]] = []  # (begin, end, value), by begin
    high = 0
    for index, op in enumerate(ops):
        live = [entry for entry in live if last[entry[2]] >= index]
        for value in op.writes:
            size = -(-value_bytes(value) // alignment) * alignment
            if value in taken_over:
                begin = offsets[taken_over[value]]
            else:
                begin = _first_gap(live, size)
            live.append((begin, begin + size, value))
            live.sort(key=lambda entry: entry[0])
            offsets[value] = begin
            high = max(high, begin + size)
    return ArenaPlan(offsets, high)


def _first_gap(live: Sequence[tuple[int, int, Value]], size: int) -> int:
    begin = 0
    for taken_begin, taken_end, _ in live:
        if taken_begin - begin >= size:
            break
        begin = max(begin, taken_end)
    return begin
