"""`experts` gives the bits of `linear`, expert by expert and slot by slot, whatever the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from vllmx_core.ops.experts import ExpertsSpec, experts
from vllmx_core.plan import F32, I32, AnyArray
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_cpu.memory import allocate
from vllmx_cpu.native import Isa, library
from vllmx_cpu.packing import PackedMatrix, load_weights, matrix_shapes
from vllmx_cpu.structs import (
    ACTIVATIONS,
    NO_ACTIVATION,
    WEIGHT_KINDS,
    VxExperts,
    VxLinear,
    VxStep,
)

from .quantised import RunOp, Source, dense_part, fma, inputs
from .test_cpu_coded import float8, integers
from .test_cpu_quantised import TYPES, random_part

COUNT, MAX_TOKENS, MAX_THREADS = 5, 150, 5
SIZES = {  # kind -> E, F
    "f32": (33, 17), "f16": (20, 70), "bf16": (130, 33), "Q8_0": (96, 64), "MXFP4": (64, 96),
    "Q4_1": (32, 32), "Q4_K": (512, 256), "Q6_K": (256, 256), "Q2_K": (256, 512),
    "IQ4_XS": (256, 256), "affine4": (200, 65), "affine8": (64, 192), "float8": (130, 70),
}  # fmt: skip
DENSE = ("f32", "f16", "bf16")


def matrix_part(kind: str, n: int, k: int, seed: int) -> WeightPart:
    if kind in DENSE:
        values = np.random.default_rng([n, k, seed]).standard_normal((n, k)) / np.sqrt(k)
        return dense_part("w", values.astype(np.float32))
    if kind == "float8":
        return float8(n, k, seed=seed)
    if kind.startswith("affine"):  # an order of columns for each expert
        return integers(n, k, int(kind[-1]), 64, shuffled=True, seed=seed)
    return random_part("w", TYPES[kind], n, k, seed)


@dataclass
class Experts:
    """The stacks of a layer, packed, and each expert's matrices packed alone."""

    kind: str
    spec: ExpertsSpec
    width: int
    inner: int
    gate_up: PackedMatrix
    down: PackedMatrix
    alone: list[tuple[PackedMatrix, PackedMatrix]]
    parts: Source = field(repr=False)

    def room(self, tokens: int, chosen: int) -> tuple[AnyArray, AnyArray]:
        shapes, rows = (self.gate_up.shape, self.down.shape), tokens * chosen
        lib = library()
        panels = max(lib.vx_panels_bytes(WEIGHT_KINDS[s.kind], s.cols, rows) for s in shapes)
        workspace = lib.vx_experts_workspace_bytes(
            tokens, chosen, self.inner, self.width, COUNT, MAX_THREADS
        )
        return allocate(panels), allocate(workspace)

    def run(self, run_op: RunOp, isa: Isa, x: F32, ids: I32, weights: F32, threads: int = 2) -> F32:
        y = np.full((len(x) + 1, self.width), 7.0, np.float32)
        panels, workspace = self.room(*ids.shape)
        arguments = VxExperts(
            gate_up=self.gate_up.struct(),
            down=self.down.struct(),
            x=x.ctypes.data,
            ids=ids.ctypes.data,
            weights=weights.ctypes.data,
            y=y.ctypes.data,
            panels=panels.ctypes.data,
            workspace=workspace.ctypes.data,
            count=COUNT,
            chosen=ids.shape[1],
            activation=ACTIVATIONS[self.spec.activation],
            clamp=self.spec.clamp or 0.0,
            alpha=self.spec.alpha,
        )
        run_op(isa, "experts", arguments, VxStep(T=len(x)), threads)
        np.testing.assert_array_equal(y[len(x)], 7.0)  # nothing beyond the last row
        return y[: len(x)]

    def by_linears(self, run_op: RunOp, isa: Isa, x: F32, ids: I32, weights: F32) -> F32:
        """Each slot by two linears of one row."""
        said = np.zeros((*ids.shape, self.width), np.float32)
        activation = ACTIVATIONS[self.spec.activation]
        for token, slot in np.ndindex(*ids.shape):
            gate_up, down = self.alone[ids[token, slot]]
            inner = linear(run_op, isa, gate_up, x[token], self.inner, activation)
            said[token, slot] = linear(run_op, isa, down, inner, self.width, NO_ACTIVATION)
        total = np.zeros_like(x)
        for slot in range(ids.shape[1]):
            total = fma(weights[:, slot, None], said[:, slot], total, isa.name != "portable")
        return total

    def formula(self, x: F32, ids: I32, weights: F32) -> F32:
        stacks = {
            name: np.stack([self.parts.part(f"{name}{e}").dequantize() for e in range(COUNT)])
            for name in ("gate_up", "gate_up_bias", "down", "down_bias")
        }
        wide = {name: stack.astype(np.float64) for name, stack in stacks.items()}
        found: Any = experts(
            x.astype(np.float64),
            ids,
            weights.astype(np.float64),
            wide["gate_up"],
            wide["down"],
            self.spec,
            wide["gate_up_bias"],
            wide["down_bias"],
        )
        return found  # type: ignore[no-any-return]


def linear(
    run_op: RunOp, isa: Isa, matrix: PackedMatrix, x: F32, width: int, activation: int
) -> F32:
    y, row = np.empty(width, np.float32), np.ascontiguousarray(x)
    panels = allocate(len(x) * 4 + 4096)
    arguments = VxLinear(
        matrix.struct(), row.ctypes.data, y.ctypes.data, panels.ctypes.data, activation, 0, 0.0, 0
    )
    run_op(isa, "linear", arguments, VxStep(T=1), 1)
    return y


def make_experts(kind: str, spec: ExpertsSpec = ExpertsSpec()) -> Experts:  # noqa: B008
    width, inner = SIZES[kind]
    rows = {"gate_up": inner * (2 if spec.gated else 1), "down": width}
    cols = {"gate_up": width, "down": inner}
    parts: dict[str, WeightPart] = {}
    specs: list[WeightSpec] = []
    for name in ("gate_up", "down"):
        for e in range(COUNT):
            parts[f"{name}{e}"] = matrix_part(kind, rows[name], cols[name], e)
            parts[f"{name}_bias{e}"] = dense_part("b", inputs(1, rows[name], e)[0])
        listed = [PartSpec(f"{name}{e}", rows[name], f"{name}_bias{e}") for e in range(COUNT)]
        specs.append(WeightSpec(name, "stack", tuple(listed), cols[name], "expert", count=COUNT))
        specs += [
            WeightSpec(f"{name}{e}", "linear", (part,), cols[name]) for e, part in enumerate(listed)
        ]
    gated = [s.name for s in specs if s.name.startswith("gate_up")] if spec.gated else []
    source = Source(parts)
    dense = kind if kind in DENSE else "bf16"
    shapes = matrix_shapes(specs, dense, gated, source)
    assert (shapes["down"].kind in DENSE) == (kind in DENSE)
    packed = load_weights(specs, {}, source, shapes, num_threads=2, progress=False).matrices
    alone = [(packed[f"gate_up{e}"], packed[f"down{e}"]) for e in range(COUNT)]
    return Experts(kind, spec, width, inner, packed["gate_up"], packed["down"], alone, source)


def routed(tokens: int, chosen: int, seed: int = 0) -> tuple[I32, F32]:
    """Different experts for each token, of unequal popularity."""
    random = np.random.default_rng([tokens, chosen, seed])
    popular = np.arange(COUNT) * 0.5
    scores = random.gumbel(size=(tokens, COUNT)) + popular
    ids = np.argsort(-scores, axis=1)[:, :chosen].astype(np.int32)
    return np.ascontiguousarray(ids), random.uniform(0.1, 1, ids.shape).astype(np.float32)


@pytest.mark.parametrize("kind", SIZES)
def test_a_slot_has_the_bits_of_two_linears(isa: Isa, run_op: RunOp, kind: str) -> None:
    case = make_experts(kind)
    for tokens, chosen, threads in ((1, 3, 1), (1, 1, 2), (3, 2, 5), (40, COUNT, 2)):
        x, (ids, weights) = inputs(tokens, case.width), routed(tokens, chosen)
        np.testing.assert_array_equal(
            case.run(run_op, isa, x, ids, weights, threads),
            case.by_linears(run_op, isa, x, ids, weights),
        )


@pytest.mark.parametrize("kind", SIZES)
def test_bits_of_a_row_do_not_depend_on_the_batch(isa: Isa, run_op: RunOp, kind: str) -> None:
    """Few and many tokens, experts with one row and with all of them."""
    case = make_experts(kind)
    x, (ids, weights) = inputs(MAX_TOKENS, case.width), routed(MAX_TOKENS, 2)
    ids[:, 0][ids[:, 1] != 3] = 3  # nearly all ask for one expert
    whole = case.run(run_op, isa, x, ids, weights)
    random = np.random.default_rng(5)
    for rows in (1, 2, 5, 13, 30, 70):
        picked = np.sort(random.choice(MAX_TOKENS, rows, replace=False))
        threads = int(random.choice([1, 2, 5]))
        got = case.run(run_op, isa, x[picked], ids[picked], weights[picked], threads)
        np.testing.assert_array_equal(got, whole[picked], err_msg=f"{rows} rows")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", DENSE)
def test_dense_experts_are_the_formula(isa: Isa, run_op: RunOp, kind: str, gated: bool) -> None:
    for activation in ("silu", "relu"):
        case = make_experts(kind, ExpertsSpec(activation, gated))
        x, (ids, weights) = inputs(9, case.width), routed(9, 3)
        got, wanted = case.run(run_op, isa, x, ids, weights), case.formula(x, ids, weights)
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < {"f32": 1e-6, "f16": 5e-4, "bf16": 5e-3}[kind]


def test_a_clamped_gate(isa: Isa, run_op: RunOp) -> None:
    case = make_experts("f32", ExpertsSpec(clamp=0.75, alpha=1.702))
    x, (ids, weights) = inputs(30, case.width), routed(30, 2)
    got, wanted = case.run(run_op, isa, x, ids, weights), case.formula(x, ids, weights)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    x[3, 5] = np.nan
    bad = case.run(run_op, isa, x, ids, weights)
    assert np.isnan(bad[3]).all()


@pytest.mark.parametrize("kind", ["f32", "bf16", "Q4_K"])
def test_a_broken_row_stays_alone(isa: Isa, run_op: RunOp, kind: str) -> None:
    case = make_experts(kind)
    x, (ids, weights) = inputs(8, case.width), routed(8, 2)
    good = case.run(run_op, isa, x, ids, weights)
    x[3, 5], weights[6, 1] = np.nan, np.nan
    bad = case.run(run_op, isa, x, ids, weights)
    assert np.isnan(bad[[3, 6]]).all()
    others = [0, 1, 2, 4, 5, 7]
    np.testing.assert_array_equal(bad[others], good[others])
