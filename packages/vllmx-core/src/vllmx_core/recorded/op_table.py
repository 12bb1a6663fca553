"""A backend's handlers by type of op, for interpreters and lowerings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from vllmx_core.errors import UnsupportedOpError
from vllmx_core.ops.op import ArrayOp, Op

C = TypeVar("C")
R = TypeVar("R")
O = TypeVar("O", bound=Op)  # noqa: E741


class OpTable(Generic[C, R]):
    """Handlers by the type of the op: handler(op, context) -> R.

        OPS: OpTable[MyFrame, None] = OpTable("mine")

        @OPS.add(Linear)
        def linear(op: Linear, frame: MyFrame) -> None: ...

    Args:
        backend: its name, for messages.
        formulas: whether ops without a handler run by their formula over `ArrayFrame.xp`.
    """

    def __init__(self, backend: str, *, formulas: bool = False) -> None:
        self._backend, self._formulas = backend, formulas
        self._handlers: dict[type[Op], Callable[[Any, C], R]] = {}
        self._limits: dict[type[Op], Callable[[Any], bool]] = {}

    def add(
        self, kind: type[O], when: Callable[[O], bool] | None = None
    ) -> Callable[[Callable[[O, C], R]], Callable[[O, C], R]]:
        """Registers the decorated function for ops of this type for which `when` is true."""

        def register(handler: Callable[[O, C], R]) -> Callable[[O, C], R]:
            assert kind not in self._handlers, f"{kind.__name__} has a handler already"
            self._handlers[kind] = handler
            if when is not None:
                self._limits[kind] = when
            return handler

        return register

    def include(self, family: OpTable[C, R]) -> None:
        """Adds the handlers of another table, so that families of ops can have separate files."""
        assert not self._handlers.keys() & family._handlers.keys(), "two handlers for one op"
        self._handlers |= family._handlers
        self._limits |= family._limits

    def supports(self, op: Op) -> bool:
        """True if the backend has the op with its options."""
        limit = self._limits.get(type(op))
        if type(op) in self._handlers:
            return limit is None or limit(op)
        return self._formulas and isinstance(op, ArrayOp)

    def handler(self, op: Op) -> Callable[[Any, C], R]:
        """Raises UnsupportedOpError for an op that is not in the table."""
        found = self._handlers.get(type(op))
        if found is None and self._formulas and isinstance(op, ArrayOp):
            formula: Any = type(op).compute
            return cast(Callable[[Any, C], R], formula)
        if found is None:
            raise UnsupportedOpError(f"backend {self._backend!r} has no op {op}")
        return found

    def __call__(self, op: Op, context: C) -> R:
        """Calls the handler of the op."""
        return self.handler(op)(op, context)
