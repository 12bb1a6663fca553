"""Compares a backend with the reference on the cases of every op but attention."""

from __future__ import annotations

import pytest
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.recorded.recording import record
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.tensor import DType

from vllmx_testing import (  # noqa: F401  # they register their cases
    op_cases,
    op_cases_experts,
    op_cases_streams,
)
from vllmx_testing.harness import VOCAB, Harness, load_options
from vllmx_testing.op_case import Case, registered_cases
from vllmx_testing.plans import Row
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

STEPS = [
    [
        Row([3, 1, 4, 1, 5], 0, [0], "all", types=[0, 1, 0, 1, 1]),
        Row([9, 2, 6], 0, [1], "last", types=[1, 0, 1]),
        Row([18], 0, [2]),
    ],
    [Row([0], 3, [1])],
    [Row(list(range(19)) * 3, 0, [4, 5, 6, 7], "all"), Row([7, 7], 4, [1], "none")],
]
TEXTS = [
    [Row([3, 1, 4, 1, 5], 0, [0]), Row([9, 2, 6], 0, [1], "none"), Row([18], 0, [2])],
    [Row(list(range(19)) * 3, 0, [4, 5, 6, 7]), Row([7], 0, [1]), Row([5, 5, 2], 0, [3])],
    [Row([8, 0], 3, [1], "none")],
]
"""Steps of models that give vectors: a row's last token or none is a logit row."""
CASES = registered_cases()


def case_model(case: Case, dtype: DType = "f32") -> tuple[SyntheticModel, ArraySource]:
    """The model of a case and its weights, stored as `dtype`."""
    builder = Builder(VOCAB)
    case.build(builder)
    model = builder.build(1, case.body, case.vector_size)
    return model, ArraySource(builder.arrays, dtype)


class NoSource(ArraySource):
    """The weights of a model that is refused before one of them is read."""

    def __init__(self) -> None:
        super().__init__({})

    def part(self, name: str) -> WeightPart:
        raise AssertionError(f"{name!r} is read for a model that the backend cannot run")


class OpChecks(Harness):
    @pytest.mark.parametrize("case", CASES)
    def test_op(self, case: str) -> None:
        model, source = case_model(CASES[case])
        used = {op.name for op in record(model, 128).steps.ops}
        missing = used.intersection(self.missing_ops)
        if case in self.missing_cases:
            missing.add(case.partition(":")[0])
        if case in self.missing_ops:
            missing.add(case.partition(":")[0])
        if not missing:
            self.compare(model, source, TEXTS if CASES[case].vector_size else STEPS)
            return
        with pytest.raises(UnsupportedOpError, match=f"needs the op '({'|'.join(missing)})'"):
            self.make_backend().load(model, NoSource(), load_options(self.dtype, {}))
        pytest.skip(f"{self.make_backend().name} refuses {', '.join(sorted(missing))} by name")

    @pytest.mark.parametrize("dtype", ["bf16", "f16"])
    def test_checkpoint_dtypes_are_exact_in_float32(self, dtype: DType) -> None:
        self.compare(*case_model(CASES["linear: 48 to 80, biased"], dtype), STEPS)
