"""Decides in which forms the matrices of a model will lie, before a weight is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from vllmx_core.weights.map import TieKey, bias_parts, has_bias, parts_of, tie_key
from vllmx_core.weights.part import DENSE, WeightPart, WeightSource
from vllmx_core.weights.spec import WeightSpec

from vllmx_cuda.device.memory import ITEM_BYTES
from vllmx_cuda.kernel_specs import has_tensor_cores
from vllmx_cuda.kernel_specs.linear import MMA_K
from vllmx_cuda.matrices.codes8 import Codes8, codes8
from vllmx_cuda.matrices.dense import Dense, dense
from vllmx_cuda.matrices.form import Form, Kind, ScratchBytes, Target
from vllmx_cuda.matrices.gguf import expert_blocks, gguf
from vllmx_cuda.matrices.w4 import W4, w4

KINDS: tuple[Kind, ...] = (codes8, w4, gguf, dense)
"""Asked in this order; the last takes everything."""


@dataclass(frozen=True, slots=True)
class Run:
    """Parts that become one segment."""

    form: Form
    parts: tuple[WeightPart, ...]

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The segments of a matrix, in the order of its rows."""

    runs: tuple[Run, ...]
    cols: int

    @property
    def num_bytes(self) -> int:
        return sum(run.form.num_bytes(run.rows, self.cols) for run in self.runs)

    def scratch(self, tokens: int) -> ScratchBytes:
        """The memory that its product with at most so many tokens needs."""
        need = ScratchBytes()
        for run in self.runs:
            need |= run.form.scratch(run.rows, self.cols, tokens)
        return need

    @property
    def dequantised(self) -> Mapping[str, int]:
        """Kind of layout -> values that lie there dequantised."""
        return {
            part.layout.kind: part.shape[0] * self.cols
            for run in self.runs
            for part in run.parts
            if isinstance(run.form, Dense) and part.layout != DENSE
        }


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The plan of `vllmx_cuda.loading.weights.load_weights`."""

    dtype: str
    matrices: Mapping[TieKey, MatrixPlan]
    rest_bytes: int
    """Vectors, tables and biases."""
    scratch: ScratchBytes
    """Enough for the product with any of the matrices."""
    shared: Collection[TieKey] = ()
    """Matrices that another model has loaded."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the weights take, but for those that are shared."""
        own = (matrix for key, matrix in self.matrices.items() if key not in self.shared)
        return sum(matrix.num_bytes for matrix in own) + self.rest_bytes

    def scratch_of(self, specs: Iterable[WeightSpec], tokens: int) -> ScratchBytes:
        """Enough for the product of at most so many tokens with any of these matrices."""
        need = ScratchBytes()
        for spec in specs:
            if spec.kind != "vector":
                need |= self.matrices[tie_key(spec)].scratch(tokens)
        return need


def plan_weights(
    specs: Sequence[WeightSpec],
    table_values: int,
    source: WeightSource,
    target: Target,
    max_tokens: int,
    experts: Collection[str] = (),
    dense: Collection[str] = (),
) -> WeightPlan:
    """Raises WeightFormatError that names the tensor when one is missing or has another shape than
    the map says.

    Args:
        table_values: of all constants.
        max_tokens: of a step.
        experts: names of the stacks that experts multiply by.
        dense: names of those that kernels read in no other form.
    """
    gathered = {tie_key(spec) for spec in specs if spec.kind == "embedding"}
    matrices: dict[TieKey, MatrixPlan] = {}
    rest, scratch = 4 * table_values, ScratchBytes()
    for spec in specs:
        bias_parts(spec, source)
        if spec.kind == "vector":
            rest += 4 * spec.rows
            parts_of(spec, source)
            continue
        rest += spec.count * spec.rows * (4 + ITEM_BYTES[target.dtype]) * has_bias(spec)
        key = tie_key(spec)
        if key not in matrices:
            matrices[key] = _plan_matrix(
                spec,
                source,
                target,
                gathered=key in gathered,
                experts=spec.name in experts,
                dense=spec.name in dense,
            )
        scratch |= matrices[key].scratch(max_tokens)
    return WeightPlan(target.dtype, matrices, rest, scratch)


def _plan_matrix(
    spec: WeightSpec,
    source: WeightSource,
    target: Target,
    *,
    gathered: bool,
    experts: bool,
    dense: bool,
) -> MatrixPlan:
    """A table that rows are gathered from is one segment, of a form that can do it; so is a stack,
    which kernels find an expert's rows in."""
    parts = parts_of(spec, source)
    plain: Form = Dense(target.dtype, spec.offset)
    stored = expert_form(parts, target) if experts and not spec.offset else None
    if stored is not None:
        return MatrixPlan((Run(stored, tuple(parts)),), spec.cols)
    is_plain = bool(spec.offset) or spec.kind == "stack" or dense
    forms = [plain if is_plain else form_of(part, target, gathered=gathered) for part in parts]
    if gathered and any(form != forms[0] for form in forms):
        forms = [plain] * len(parts)
    pairs = zip(forms, parts, strict=True)
    runs = [
        Run(form, tuple(part for _, part in run)) for form, run in groupby(pairs, lambda p: p[0])
    ]
    return MatrixPlan(tuple(runs), spec.cols)


def form_of(part: WeightPart, target: Target, *, gathered: bool = False) -> Form:
    """The form of the first kind that knows the part; `gathered`: and that can gather its rows."""
    forms = (form for kind in KINDS if (form := kind(part, target)) is not None)
    found: Form = next(form for form in forms if form.gathers or not gathered)
    return found


def expert_form(parts: Sequence[WeightPart], target: Target) -> Form | None:
    """The form that kernels multiply the experts in; None: dequantised, for there is no such
    kernel, or they are not all alike."""
    found = _form_of(parts[0], target)
    if found is None or any(_form_of(part, target) != found for part in parts[1:]):
        return None
    return found


def _form_of(part: WeightPart, target: Target) -> Form | None:
    blocks = expert_blocks(part, target)
    if blocks is not None:
        return blocks
    # Sizes that either stack can have, whatever form the other one gets
    whole = part.shape[0] % MMA_K == 0 and part.shape[1] % MMA_K == 0
    if not whole or not has_tensor_cores(target.dtype, target.arch):
        return None
    return _codes(part, target) or _integers(part, target)


def _codes(part: WeightPart, target: Target) -> Codes8 | None:
    """FP8, whose activations stay as they are."""
    found = codes8(part, target)
    if found is None or not found.meets_tensor_cores(part.shape[1], target):
        return None
    return replace(found, coded_products=False, x_scale=0.0)


def _integers(part: WeightPart, target: Target) -> W4 | None:
    """The form of integers with columns in the order of their groups, one for all experts."""
    found = None if part.layout.gguf_type is not None else w4(part, target)
    return None if found is None or found.packing.order else found
