"""Runs a recorded step op by op, for backends that do not lower it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from vllmx_core.ops.op import Op, OpList, last_reads
from vllmx_core.ops.values import Frame, Value

F = TypeVar("F", bound="Frame[Any]")


class Interpreter(Generic[F]):
    """Calls the handler of each op in order and drops each value after its last reader."""

    def __init__(self, steps: OpList, handler: Callable[[Op], Callable[[Any, F], None]]) -> None:
        last = last_reads(steps.ops) | {steps.logits: len(steps.ops)}
        dying: dict[int, list[Value]] = {}
        for value, index in last.items():
            dying.setdefault(index, []).append(value)
        self._program = [
            (handler(op), op, tuple(dying.get(index, ()))) for index, op in enumerate(steps.ops)
        ]
        self._logits = steps.logits

    def run(self, frame: F) -> Any:
        """The result of the step, such as (L, V) logits, in the backend's own kind of array."""
        self.run_part(frame, 0.0, 1.0)
        return frame[self._logits]

    def run_part(self, frame: F, begin: float, end: float) -> None:
        """Runs the ops from `begin` to `end`, fractions of the whole, in order over one frame."""
        count = len(self._program)
        for handler, op, dead in self._program[int(begin * count) : int(end * count)]:
            handler(op, frame)
            for value in dead:
                frame.drop(value)
