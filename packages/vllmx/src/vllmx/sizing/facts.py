"""The bytes that a model's step reads: its matrices by size and use, from the weight map alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from vllmx_core.model import Model, ModelShape, encoder_of
from vllmx_core.ops.experts import Experts
from vllmx_core.plugins.checkpoint import Checkpoint, build_model
from vllmx_core.plugins.registry import Registry, architecture_names
from vllmx_core.recorded.recording import record
from vllmx_core.weights.map import name_in, parts_of, tie_key
from vllmx_core.weights.part import DENSE, WeightSource
from vllmx_core.weights.spec import WeightSpec
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME
from vllmx_models.formats.header_only import Header, NamedWeights
from vllmx_models.isq import matrix_types
from vllmx_models.quantization.bits import stored_bits

Use = Literal["table", "head", "experts", "linear", "tower"]
FORMS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m")
"""The quantisations to compare, the most precise first."""
STORED = "stored"


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one weight and their use in a step."""

    use: Use
    """A table is read one row per token, a head is multiplied for rows that sample, experts only if
    they are chosen, a tower only for images."""
    count: int
    values: int
    """Numbers of each matrix."""
    kind: str
    """A GGUF type, or "stored" for other formats."""
    bits: float
    """Bits of a number, with scales."""
    chosen: int = 0
    """Number of the `count` experts that a token uses."""

    @property
    def num_bytes(self) -> float:
        return self.count * self.values * self.bits / 8


@dataclass(frozen=True, slots=True)
class Form:
    """The model's weights in one quantisation."""

    name: str
    """The type as --isq names it, or "stored"."""
    matrices: tuple[Matrices, ...]

    @property
    def num_bytes(self) -> float:
        return sum(matrices.num_bytes for matrices in self.matrices)

    @property
    def num_values(self) -> int:
        return sum(matrices.count * matrices.values for matrices in self.matrices)

    @property
    def values_used(self) -> float:
        """Numbers multiplied for one token."""
        shares = {"table": 0.0, "tower": 0.0, "head": 1.0, "linear": 1.0}
        return sum(
            each.values * each.count * shares[each.use]
            if each.use != "experts"
            else each.values * each.chosen
            for each in self.matrices
        )

    @property
    def bits(self) -> float:
        """Average bits of a number."""
        return 8 * self.num_bytes / max(1, self.num_values)


@dataclass(frozen=True, slots=True)
class Facts:
    """A model as planning sees it."""

    architecture: str
    shape: ModelShape
    num_layers: int
    forms: tuple[Form, ...]
    """The stored form of the model, then its possible quantisations."""


def facts_of(header: Header, registry: Registry) -> Facts:
    """The facts of a model. Raises UnsupportedModelError for an architecture that is not served,
    ConfigError if the header does not show how weights are stored."""
    checkpoint = header.checkpoint
    model = _Listed(build_model(registry, checkpoint))
    if not header.has_shapes:
        checkpoint = replace(checkpoint, weights=NamedWeights(model))
    stored = Form(STORED, tuple(_stored(header, checkpoint, model)))
    forms = [stored]
    quantised = bool(checkpoint.config.get("quantization_config"))
    if not quantised and stored.bits > 15:
        firsts = _Listed(model, first_parts=True)  # a form has the types of first parts
        for name in FORMS:
            kinds = matrix_types(name, checkpoint, firsts, registry)
            forms.append(_form(name, model, checkpoint.weights, stored, kinds))
    names = [*architecture_names(checkpoint.config), "unknown"]
    return Facts(names[0], model.shape, _num_layers(model), tuple(forms))


class _Listed:
    """A model whose weight map is made once; those of experts are long."""

    def __init__(self, model: Model, *, first_parts: bool = False) -> None:
        self._model, self._weights = model, tuple(model.weights())
        if first_parts:
            self._weights = tuple(replace(one, parts=one.parts[:1]) for one in self._weights)

    @property
    def shape(self) -> ModelShape:
        return self._model.shape

    def weights(self) -> tuple[WeightSpec, ...]:
        return self._weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _num_layers(model: Model) -> int:
    names = (spec.name.split(".") for spec in model.weights())
    return len({parts[1] for parts in names if parts[0] == "layers"})


def _stored(header: Header, checkpoint: Checkpoint, model: Model) -> Iterator[Matrices]:
    chosen = _chosen(model)
    specs = list(_matrix_specs(model))
    by_config = _bits(header, checkpoint, (spec for spec, _ in specs))
    for spec, use in specs:
        if by_config is None:
            kind, bits = _kind(spec, checkpoint.weights)
        else:
            bits = by_config(spec)
            kind = "BF16" if bits == 16 else STORED
        yield Matrices(use, spec.count, spec.rows * spec.cols, kind, bits, chosen.get(spec.name, 0))


def _bits(
    header: Header, checkpoint: Checkpoint, specs: Iterable[WeightSpec]
) -> Callable[[WeightSpec], float] | None:
    """Bits of a number if tensors have no types: by the files' size or the quantisation's config,
    or those of dense weights."""
    quantised = checkpoint.config.get("quantization_config")
    if header.has_shapes:
        return None
    if not quantised:
        return lambda spec: 16.0
    if header.stored_bytes is None:
        return stored_bits(quantised)
    same = 8 * header.stored_bytes / sum(spec.rows * spec.cols * spec.count for spec in specs)
    return lambda spec: same


def _kind(spec: WeightSpec, source: WeightSource) -> tuple[str, float]:
    """The type and the bits of a weight's numbers, by its first part."""
    first = replace(spec.matrices[0], parts=spec.matrices[0].parts[:1])
    part = parts_of(first, source)[0]
    layout = part.layout
    if layout == DENSE:
        raw = part.rows(0, 1).buffers["weight"]
        bits = 8 * raw.num_bytes / max(1, part.shape[1])
        return {32.0: "F32", 16.0: "BF16"}.get(bits, STORED), min(bits, 16.0)
    if layout.gguf_type is not None:
        return layout.gguf_type, layout.bits
    scales = 16 / layout.group_size if layout.group_size else 0.0
    return STORED, layout.bits + scales


def _form(
    name: str, model: Model, source: WeightSource, stored: Form, kinds: Mapping[str, str]
) -> Form:
    found = []
    for (spec, _), matrices in zip(_matrix_specs(model), stored.matrices, strict=True):
        kind = kinds.get(name_in(source, spec.parts[0]))
        if kind is None:
            found.append(matrices)
            continue
        block = TYPES_BY_NAME[kind]
        bits = min(block.layout.bits, 16.0)  # F32 is read as 16 bits by every backend's products
        found.append(replace(matrices, kind=kind, bits=bits))
    return Form(name, tuple(found))


def _matrix_specs(model: Model) -> Iterator[tuple[WeightSpec, Use]]:
    """Each matrix once, though table and head may be one."""
    specs = model.weights()
    heads = {tie_key(spec) for spec in specs if _is_head(spec)}
    for spec in specs:
        if spec.kind == "embedding" and tie_key(spec) not in heads:
            yield spec, "table"
        elif spec.kind == "stack":
            yield spec, "experts" if spec.role == "experts" else "linear"
        elif spec.kind == "linear":
            yield spec, "head" if _is_head(spec) else "linear"
    tower = encoder_of(model)
    for spec in () if tower is None else tower.weights():
        if spec.kind != "vector":
            yield spec, "tower"


def _is_head(spec: WeightSpec) -> bool:
    return spec.kind == "linear" and spec.role == "vocabulary"


def _chosen(model: Model) -> dict[str, int]:
    """Number of experts that a token uses in each stack, read from the recorded step."""
    if not any(spec.role == "experts" for spec in model.weights()):
        return {}
    return {
        ref.name: op.ids.width
        for op in record(model, 1).steps.ops
        if isinstance(op, Experts)
        for ref in (op.gate_up, op.down)
    }
