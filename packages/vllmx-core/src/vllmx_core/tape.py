"""The recorded step: what `Model.forward` asked for, as a list of ops over symbolic arrays.

`Recorder` implements `vllmx_core.model.Ops` without computing anything: every call appends a
`Node` whose operands are `Value`s. A backend may rewrite the list; `vllmx_core.arena` gives the
values their places; then the backend lowers the nodes to whatever it replays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vllmx_core.model import Activation, AttentionSpec, StepInputs

Rows = Literal["T", "L"]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An array (rows, width) of the step; identity is what tells two apart. Logits (rows L) are
    float32, the others of the type that the backend computes in."""

    width: int
    rows: Rows = "T"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Stands for StepInputs.tokens; only `embedding` takes it."""


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Stands for StepInputs.logit_rows; only `logits` takes it."""


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """`StepInputs` of a recording."""

    tokens: TokenIds = field(default_factory=TokenIds)
    logit_rows: LogitRows = field(default_factory=LogitRows)


@dataclass(frozen=True, slots=True)
class WeightRef:
    """What a model gets for a weight or a constant: its name and what the map says of it."""

    name: str
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Node:
    """One op. `weights` and `options` are the op's own; see the methods of `Recorder`."""

    op: str
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    weights: Mapping[str, WeightRef] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """`vllmx_core.model.Ops` that records."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def emit(self, node: Node) -> None:
        """Called for each op, in order; a subclass may run it instead."""
        self.nodes.append(node)

    def _new(
        self,
        op: str,
        width: int,
        reads: Sequence[Value],
        weights: Mapping[str, WeightRef | None] | None = None,
        rows: Rows = "T",
        **options: Any,
    ) -> Value:
        out = Value(width, rows)
        used = {name: ref for name, ref in (weights or {}).items() if ref is not None}
        self.emit(Node(op, tuple(reads), (out,), used, options))
        return out

    def embedding(self, ids: TokenIds, w: WeightRef) -> Value:
        assert isinstance(ids, TokenIds), "embedding takes StepInputs.tokens"
        return self._new("embedding", w.cols, (), {"w": w})

    def rms_norm(self, x: Value, w: WeightRef, eps: float) -> Value:
        assert w.rows == x.width
        return self._new("rms_norm", x.width, (x,), {"w": w}, eps=eps)

    def add_rms_norm(
        self, x: Value, residual: Value | None, w: WeightRef, eps: float
    ) -> tuple[Value, Value]:
        if residual is None:
            return self.rms_norm(x, w, eps), x
        assert w.rows == x.width == residual.width
        out, total = Value(x.width), Value(x.width)
        self.emit(Node("rms_norm", (x, residual), (out, total), {"w": w}, {"eps": eps}))
        return out, total

    def layer_norm(self, x: Value, w: WeightRef, bias: WeightRef | None, eps: float) -> Value:
        assert w.rows == x.width
        return self._new("layer_norm", x.width, (x,), {"w": w, "bias": bias}, eps=eps)

    def linear(self, x: Value, w: WeightRef) -> Value:
        assert w.cols == x.width, f"{w.name}: {w.cols} input features, x has {x.width}"
        return self._new("linear", w.rows, (x,), {"w": w})

    def attention(self, qkv: Value, spec: AttentionSpec, step: StepInputs) -> Value:
        assert qkv.width == (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
        weights = {
            "rope": spec.rope, "q_norm": spec.q_norm, "k_norm": spec.k_norm, "sinks": spec.sinks,
        }  # fmt: skip
        width = spec.num_heads * spec.head_size
        return self._new("attention", width, (qkv,), weights, spec=spec)

    def gated_act(self, gate_up: Value, kind: Activation) -> Value:
        return self._new("gated_act", gate_up.width // 2, (gate_up,), kind=kind)

    def activation(self, x: Value, kind: Activation) -> Value:
        return self._new("activation", x.width, (x,), kind=kind)

    def add(self, x: Value, y: Value) -> Value:
        assert x.width == y.width
        return self._new("add", x.width, (x, y))

    def scale(self, x: Value, factor: float) -> Value:
        return self._new("scale", x.width, (x,), factor=factor)

    def logits(
        self, x: Value, rows: LogitRows, w: WeightRef, softcap: float | None = None
    ) -> Value:
        assert isinstance(rows, LogitRows), "logits takes StepInputs.logit_rows"
        assert w.cols == x.width
        return self._new("linear", w.rows, (x,), {"w": w}, rows="L", softcap=softcap or 0.0)
