"""Recording a model: `Model.forward` runs once a load, whatever the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vllmx_core.errors import UnsupportedModelError, UnsupportedOpError
from vllmx_core.model import Encoder, Model, ModelShape, encoder_of
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.values import StepInputs, WeightRef
from vllmx_core.plan import AnyArray
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.recorded.passes import (
    Pass,
    expand_unsupported,
    unsupported_ops,
    with_adapters,
)
from vllmx_core.records import Record
from vllmx_core.weights.spec import WeightSpec


class Recording(Record):
    """A model's step and everything that its ops name."""

    model: str
    steps: OpList
    specs: tuple[WeightSpec, ...]
    constants: Mapping[str, AnyArray]
    refs: Mapping[str, WeightRef]
    """Weights and constants by name, as the model saw them."""
    tower: OpList | None = None
    """The ops of the tower of a model that sees images; its weights and constants are among the
    others."""

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """The ops of the step, then those of the tower."""
        return self.steps.ops + (() if self.tower is None else self.tower.ops)

    @property
    def unused_weights(self) -> set[str]:
        """Names of weights and constants that no op reads."""
        return self.refs.keys() - {ref.name for op in self.all_ops for ref in op.weights}


def record(model: Model, max_model_len: int, passes: Sequence[Pass] = ()) -> Recording:
    """Runs `model.forward` once over names, without arrays, then `passes`. Raises OpError for ops
    with wrong operands, and for a result that does not match the model's shape."""
    specs, constants = tuple(model.weights()), dict(model.constants(max_model_len))
    encoder = encoder_of(model)
    if encoder is not None:
        specs += encoder.weights()
        constants |= encoder.constants(max_model_len)
    refs = {
        spec.name: WeightRef(spec.name, spec.kind, spec.rows, spec.cols, spec.count)
        for spec in specs
    }
    for name, table in constants.items():
        cols = table.shape[-1] if table.ndim > 1 else 0
        refs[name] = WeightRef(name, "constant", table.shape[0], cols)
    name = type(model).__name__
    shape = model.shape
    taps = _parts_of_taps(shape)
    ops = Ops(name, taps)
    result: object = model.forward(ops, refs, StepInputs())
    if taps.keys() - ops.tapped:
        raise UnsupportedModelError(
            f"{name} has no hidden states behind layers {sorted(taps.keys() - ops.tapped)}, which"
            " the drafter reads: choose a drafter that was made for this model"
        )
    steps = ops.finished(result, shape.result_size, shape.output)
    for change in passes:
        steps = change(steps)
    tower = None
    if encoder is not None:
        tower = _tower(encoder, shape, name, refs, passes)
    return Recording(name, steps, specs, constants, refs, tower)


def _parts_of_taps(shape: ModelShape) -> dict[int, int]:
    """Point -> part of the feature store, in which those of images come first."""
    if shape.taps is None:
        return {}
    first = 0 if shape.features is None else shape.features.parts
    return {point: first + part for part, point in enumerate(shape.taps.points)}


def _tower(
    encoder: Encoder,
    shape: ModelShape,
    model: str,
    refs: Mapping[str, WeightRef],
    passes: Sequence[Pass],
) -> OpList:
    assert shape.features is not None, "a model with a tower says what it makes"
    ops = Ops(f"{model}'s tower")
    features: object = encoder.forward(ops, refs, StepInputs())
    tower = ops.finished_tower(features, shape.features.parts, shape.features.width)
    for change in passes:
        tower = change(tower)
    return tower


def prepare(
    model: Model,
    max_model_len: int,
    backend: str,
    supports: Callable[[Op], bool],
    passes: Sequence[Pass] = (),
    *,
    adapts: bool = False,
) -> Recording:
    """Records a model for a backend and expands ops that it lacks; with `adapts`, its step takes
    adapters. Raises UnsupportedOpError, before any weight is read, if it lacks the expansion
    too."""
    recording = record(model, max_model_len, passes)
    steps = with_adapters(recording.steps) if adapts else recording.steps
    steps = expand_unsupported(steps, supports)
    tower = recording.tower
    if tower is not None:
        tower = expand_unsupported(tower, supports)
    recording = replace(recording, steps=steps, tower=tower)
    for op in recording.all_ops:
        if not supports(op):
            raise _refusal(recording.model, op, backend)
    return recording


def _refusal(model: str, op: Op, backend: str) -> UnsupportedOpError:
    others = sorted(_backends_with(op, backend))
    remedy = f"choose --backend {' or '.join(others)}" if others else "no backend here runs it"
    return UnsupportedOpError(
        f"model {model} needs the op {op}, which backend {backend!r} does not have: {remedy}, or a"
        f" newer version of vllmx-{backend}",
        param="backend",
    )


def _backends_with(op: Op, refused: str) -> list[str]:
    """Names of the other backends that run here and have the op, with what it expands into."""
    found = []
    for spec in load_registry().all(BackendSpec):
        if spec.name == refused or spec.unavailable_reason() is not None:
            continue
        supports = getattr(spec.load()(), "supports", None)
        steps = OpList((op,), (*op.writes, *op.reads)[0])
        if supports is not None and not unsupported_ops(steps, supports):
            found.append(spec.name)
    return found
