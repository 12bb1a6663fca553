"""Ops that a backend lacks, replaced by the ops that they expand into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from vllmx_core.ops.op import Op, OpList

Supports = Callable[[Op], bool]


def expand_unsupported(steps: OpList, supports: Supports) -> OpList:
    """Every op that `supports` refuses becomes what it expands into, and so on; one that expands
    into nothing supported stays as it is, for `unsupported_ops` to find."""
    ops = tuple(one for op in steps.ops for one in _expanded(op, supports))
    return replace(steps, ops=ops)


def unsupported_ops(steps: OpList, supports: Supports) -> list[Op]:
    """The ops that neither the backend has nor what they expand into."""
    return [op for op in expand_unsupported(steps, supports).ops if not supports(op)]


def _expanded(op: Op, supports: Supports) -> Iterator[Op]:
    if not supports(op):
        parts = [one for part in op.expand() for one in _expanded(part, supports)]
        if parts and all(map(supports, parts)):
            yield from parts
            return
    yield op
