"""Records a model's forward pass without any values, checking widths on the way.

A backend records a step the same way, so a model that passes looks at no value. What comes back is
the list of weights that were used and the attention layers in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vllmx_core.model import Activation, AttentionSpec, Model, StepInputs
from vllmx_core.weights import WeightSpec


class TraceError(AssertionError):
    """An op that does not fit what it is given; the message names both."""


@dataclass(frozen=True, slots=True)
class Traced:
    """An array of which only the axes are known: `rows` is T or L; width 0 means token ids."""

    rows: str
    width: int

    def __bool__(self) -> bool:
        raise TraceError("the forward pass branches on a value: it must only pass arrays on")

    def __iter__(self) -> Iterator[object]:
        raise TraceError("the forward pass iterates over an array: it must only pass arrays on")


@dataclass(frozen=True, slots=True)
class TracedWeight:
    """A weight or constant of which only kind and shape are known."""

    name: str
    kind: str
    """linear, embedding, vector or constant."""
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class TracedStep:
    """`StepInputs` without values."""

    tokens: Traced = field(default_factory=lambda: Traced("T", 0))
    logit_rows: Traced = field(default_factory=lambda: Traced("L", 0))


@dataclass(slots=True)
class Trace:
    """`Ops` that check and record."""

    used: set[str] = field(default_factory=set)
    attention_specs: list[AttentionSpec] = field(default_factory=list)

    def embedding(self, ids: Traced, w: TracedWeight) -> Traced:
        self._expect(ids.width == 0, "embedding takes token ids, not features")
        self._weight("embedding", w, "embedding")
        return Traced(ids.rows, w.cols)

    def rms_norm(self, x: Traced, w: TracedWeight, eps: float) -> Traced:
        self._vector("rms_norm", w, x.width)
        self._expect(eps > 0, f"rms_norm with eps {eps}")
        return x

    def add_rms_norm(
        self, x: Traced, residual: Traced | None, w: TracedWeight, eps: float
    ) -> tuple[Traced, Traced]:
        if residual is not None:
            self._same("add_rms_norm", x, residual)
        return self.rms_norm(x, w, eps), x

    def layer_norm(
        self, x: Traced, w: TracedWeight, bias: TracedWeight | None, eps: float
    ) -> Traced:
        self._vector("layer_norm", w, x.width)
        if bias is not None:
            self._vector("layer_norm", bias, x.width)
        self._expect(eps > 0, f"layer_norm with eps {eps}")
        return x

    def linear(self, x: Traced, w: TracedWeight) -> Traced:
        self._weight("linear", w, "linear")
        self._expect(
            x.width == w.cols, f"linear: {w.name!r} has {w.cols} columns, x has {x.width} features"
        )
        return Traced(x.rows, w.rows)

    def attention(self, qkv: Traced, spec: AttentionSpec, step: StepInputs) -> Traced:
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
        width = (heads + 2 * kv_heads) * size
        where = f"attention layer {spec.layer}"
        self._expect(qkv.width == width, f"{where}: qkv has {qkv.width} features, not {width}")
        self._expect(heads % kv_heads == 0, f"{where}: {heads} heads over {kv_heads} kv heads")
        self._expect(isinstance(step, TracedStep), f"{where}: pass on the step itself")
        self._expect(
            spec.rotary_dim % 2 == 0 and 0 <= spec.rotary_dim <= size,
            f"{where}: rotary_dim {spec.rotary_dim} of head size {size}",
        )
        self._expect((spec.rope is None) == (spec.rotary_dim == 0), f"{where}: rope or rotary_dim?")
        if spec.rope is not None:
            self._weight(where, spec.rope, "constant")
            wide = f"{where}: table {spec.rope.name!r} has {spec.rope.cols} columns"
            self._expect(spec.rope.cols == spec.rotary_dim, f"{wide}, not {spec.rotary_dim}")
        for norm in (spec.q_norm, spec.k_norm):
            if norm is not None:
                self._vector(where, norm, size)
        if spec.sinks is not None:
            self._vector(where, spec.sinks, heads)
        self.attention_specs.append(spec)
        return Traced(qkv.rows, heads * size)

    def gated_act(self, gate_up: Traced, kind: Activation) -> Traced:
        self._expect(gate_up.width % 2 == 0, f"gated_act over {gate_up.width} features")
        return Traced(gate_up.rows, gate_up.width // 2)

    def activation(self, x: Traced, kind: Activation) -> Traced:
        return x

    def add(self, x: Traced, y: Traced) -> Traced:
        self._same("add", x, y)
        return x

    def scale(self, x: Traced, factor: float) -> Traced:
        self._expect(isinstance(factor, int | float), f"scale by {factor!r}")
        return x

    def logits(
        self, x: Traced, rows: Traced, w: TracedWeight, softcap: float | None = None
    ) -> Traced:
        self._expect(x.rows == "T", "logits: x must have all T rows, the op gathers")
        self._expect(rows.rows == "L", "logits: rows must be step.logit_rows")
        return Traced("L", self.linear(x, w).width)

    def _same(self, op: str, x: Traced, y: Traced) -> None:
        self._expect(x == y, f"{op}: {x.width} and {y.width} features")

    def _vector(self, op: str, w: TracedWeight, width: int) -> None:
        self._weight(op, w, "vector")
        self._expect(w.rows == width, f"{op}: {w.name!r} has {w.rows} values, not {width}")

    def _weight(self, op: str, w: object, kind: str) -> None:
        if not isinstance(w, TracedWeight):
            raise TraceError(f"{op}: {w!r} is no weight of the model")
        self._expect(w.kind == kind, f"{op}: {w.name!r} is of kind {w.kind!r}, not {kind!r}")
        self.used.add(w.name)

    def _expect(self, condition: bool, message: str) -> None:
        if not condition:
            raise TraceError(message)


def trace(model: Model, max_model_len: int) -> tuple[Trace, Mapping[str, TracedWeight]]:
    """Runs `model.forward` once. Raises TraceError for ops that do not fit together, and for a
    result that is not (L, V)."""
    weights = {spec.name: _traced(spec) for spec in model.weights()}
    for name, table in model.constants(max_model_len).items():
        rows, cols = table.shape if table.ndim == 2 else (table.shape[0], 0)
        weights[name] = TracedWeight(name, "constant", rows, cols)
    ops = Trace()
    result: object = model.forward(ops, weights, TracedStep())
    if result != Traced("L", model.shape.vocab_size):
        raise TraceError(f"forward returned {result}, not (L, {model.shape.vocab_size}) logits")
    return ops, weights


def _traced(spec: WeightSpec) -> TracedWeight:
    return TracedWeight(spec.name, spec.kind, spec.rows, spec.cols)
