"""`Op`, the base of all ops: the interface for passes and backends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from vllmx_core.errors import OpError
from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.values import ArrayFrame, Output, Rows, Value, WeightKind, WeightRef
from vllmx_core.records import Record


class Op(Record, eq=False):
    """One operation of a recorded step. A subclass is frozen and has no equality but identity; its
    fields are operands and results (`Value`), weights (`WeightRef`) and options. It takes no
    decorator, for a `Record` is like a dataclass already."""

    name: ClassVar[str]
    """The op's name in error messages and profiles."""
    results: ClassVar[tuple[str, ...]] = ("out",)
    """The fields that it computes; the other values are its operands."""

    @property
    def reads(self) -> tuple[Value, ...]:
        """The operands of the op, in the order of the fields."""
        return tuple(
            value
            for name, value in self._fields()
            if isinstance(value, Value) and name not in self.results
        )

    @property
    def writes(self) -> tuple[Value, ...]:
        """The values that this op makes."""
        return tuple(getattr(self, name) for name in self.results)

    @property
    def weights(self) -> tuple[WeightRef, ...]:
        """The weights and constants that it uses."""
        return tuple(value for _, value in self._fields() if isinstance(value, WeightRef))

    @property
    def options(self) -> dict[str, Any]:
        """Everything that is neither a value nor a weight, by the names of the fields."""
        kinds = (Value, WeightRef)
        return {name: value for name, value in self._fields() if not isinstance(value, kinds)}

    def check(self) -> None:
        """Raises OpError when operands, weights and options do not fit together."""
        raise NotImplementedError

    def compute(self, frame: NumpyFrame) -> None:
        """The formula in numpy: reads operands from the frame and writes results to it."""
        raise NotImplementedError

    def expand(self) -> tuple[Op, ...]:
        """Simpler ops that compute the same results, for backends without this one; empty if there
        are none."""
        return ()

    def __str__(self) -> str:
        """Name, options and weights, for messages."""
        facts = [f"{name} {value}" for name, value in self.options.items() if value is not None]
        facts += [f"weight {ref.name!r}" for ref in self.weights]
        return f"{self.name!r} ({', '.join(facts)})" if facts else f"{self.name!r}"

    def _fields(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in type(self).__struct_fields__)


class ArrayOp(Op):
    """An op whose formula is written over `frame.xp`: every backend whose arrays speak NumPy's
    language computes it so, unless it has a handler of its own."""

    def compute(self, frame: ArrayFrame[Any]) -> None:
        """The formula: reads the operands out of the frame and puts the results there."""
        raise NotImplementedError


class OpList(Record):
    """A recorded step: its ops in order, and the value that holds its result: (L, V) logits, or the
    vectors or scores of a model that samples nothing."""

    ops: tuple[Op, ...]
    logits: Value
    output: Output = "tokens"

    @property
    def samples(self) -> bool:
        """True if the result is logits, from which ids are sampled."""
        return self.output == "tokens"


def last_reads(ops: Iterable[Op]) -> dict[Value, int]:
    """Value -> index of the last op that reads or writes it."""
    return {value: index for index, op in enumerate(ops) for value in (*op.reads, *op.writes)}


def expect(holds: bool, problem: str) -> None:
    """Raises OpError with the problem; the recorder adds which op of which model it is."""
    if not holds:
        raise OpError(problem)


def expect_rows(**operands: object) -> None:
    """Each operand must be an array (T, features) that another op gave, or each one (L, features)
    that `pool` began."""
    rows: dict[Rows, str] = {}
    for name, value in operands.items():
        expect(isinstance(value, Value), f"{name} is {value!r}, not what another op returned")
        assert isinstance(value, Value)
        logits = value.rows == "L" and value.dtype == "f32"
        expect(not logits, f"{name} holds logits: no op takes them")
        expect(value.dtype == "model", f"{name} is what `route` gave: only `experts` takes it")
        rows[value.rows] = name
    if len(rows) > 1:
        raise OpError(f"{rows['L']} has a row for each text, {rows['T']} one for each token")


def expect_features(**operands: object) -> None:
    """Each operand must be an array (T, features) that another op gave."""
    expect_rows(**operands)
    for name, value in operands.items():
        assert isinstance(value, Value)
        expect(value.rows == "T", f"{name} was pooled: it has a row for each text, not each token")


def expect_same_width(**operands: Value) -> None:
    """All operands must have as many features as the first."""
    (first, one), *others = operands.items()
    for name, value in others:
        problem = f"{first} has {one.width} features, {name} has {value.width}"
        expect(value.width == one.width, problem)


def expect_weight(w: object, kind: WeightKind) -> None:
    """`w` must be a weight of this kind."""
    if not isinstance(w, WeightRef):
        raise OpError(f"{w!r} is not a weight of the model: take one from the mapping `w`")
    expect(w.kind == kind, f"{w.name!r} is of kind {w.kind!r}, not {kind!r}")


def expect_vector(w: object, size: int) -> None:
    """`w` must be a vector of `size` values, or a constant that is one."""
    constant = isinstance(w, WeightRef) and w.kind == "constant" and not w.cols
    expect_weight(w, "constant" if constant else "vector")
    assert isinstance(w, WeightRef)
    expect(w.rows == size, f"{w.name!r} has {w.rows} values, not {size}")


def expect_stack(w: object, rows: int, cols: int, what: str) -> None:
    """`w` must be a stack of matrices (rows, cols)."""
    expect_weight(w, "stack")
    assert isinstance(w, WeightRef)
    given = f"{w.name!r} has matrices ({w.rows}, {w.cols})"
    expect((w.rows, w.cols) == (rows, cols), f"{given}, not {what} = ({rows}, {cols})")


def expect_matrix(x: Value, w: object) -> None:
    """`w` must be a matrix that multiplies x."""
    expect_weight(w, "linear")
    assert isinstance(w, WeightRef)
    expect(x.width == w.cols, f"{w.name!r} has {w.cols} columns, x has {x.width} features")
