"""Rows of a table, and products with matrices."""

from __future__ import annotations

from ctypes import Structure
from typing import get_args

from vllmx_core.ops.adapt import Adapt
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.head import Head
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op
from vllmx_core.ops.values import IdSource, Value, WeightRef
from vllmx_core.ops.vocab_embedding import VocabEmbedding

from vllmx_cpu.lowering.site import Site, Table
from vllmx_cpu.structs import ACTIVATIONS, NO_ACTIVATION, VxEmbedding, VxLinear, ints, pointers
from vllmx_cpu.tape import Call

OPS = Table("cpu")
IDS = get_args(IdSource)
"""The inputs of an embedding, as native/ops.h numbers them."""
PART_OF_TOKENS = len(IDS)
"""Tokens, whose rows are zeros where the table does not have them."""


@OPS.add(Embedding)
def _embedding(op: Embedding, site: Site) -> list[Call]:
    matrix = site.model.weights.matrices[op.w.name]
    arguments = VxEmbedding(
        matrix.struct(), site.address(op.out), IDS.index(op.ids.source), op.offset
    )
    return [site.call(op, "embedding", arguments)]


@OPS.add(VocabEmbedding)
def _vocab_embedding(op: VocabEmbedding, site: Site) -> list[Call]:
    matrix = site.model.weights.matrices[op.w.name]
    arguments = VxEmbedding(matrix.struct(), site.address(op.out), PART_OF_TOKENS, -op.first)
    return [site.call(op, "embedding", arguments)]


@OPS.add(Linear)
def _linear(op: Linear, site: Site) -> list[Call]:
    activation = NO_ACTIVATION if op.activation is None else ACTIVATIONS[op.activation]
    return _products(op, op.x, op.w, op.out, site, activation=activation)


@OPS.add(GatedLinear)
def _gated_linear(op: GatedLinear, site: Site) -> list[Call]:
    return _products(op, op.x, op.w, op.out, site, activation=ACTIVATIONS[op.kind])


@OPS.add(Head)
def _head(op: Head, site: Site) -> list[Call]:
    return _products(op, op.x, op.w, op.out, site, logit_rows=1, softcap=op.softcap or 0.0)


class VxAdapt(Structure):
    """Arguments of `adapt`; native/adapt.cpp."""

    _fields_ = [*pointers("changes x y shrunk"), *ints("parts rank cols width pooled half")]


@OPS.add(Adapt)
def _adapt(op: Adapt, site: Site) -> list[Call]:
    adapters = site.model.adapters
    assert adapters is not None, "the model was loaded without room for adapters"
    x = op.x if isinstance(op.x, Value) else None
    arguments = VxAdapt(
        adapters.table(op.w.name),
        None if x is None else site.address(x),
        site.address(op.y),
        site.model.workspace.ctypes.data,
        adapters.parts[op.w.name],
        adapters.rank,
        op.w.cols,
        op.y.width,
        0 if op.y.rows == "T" else 2 if x is not None and x.rows == "L" else 1,
        int(adapters.half),
    )
    return [site.call(op, "adapt", arguments)]


def _products(
    op: Op,
    x: Value,
    w: WeightRef,
    out: Value,
    site: Site,
    *,
    activation: int = NO_ACTIVATION,
    logit_rows: int = 0,
    softcap: float = 0.0,
) -> list[Call]:
    """One product for each segment of the weight, side by side in the result."""
    calls: list[Call] = []
    column = 0
    for name in site.model.segments[w.name]:
        matrix = site.model.weights.matrices[name]
        arguments = VxLinear(
            w=matrix.struct(),
            x=site.address(x),
            y=site.address(out) + column * 4,
            panels=site.model.panels.ctypes.data,
            activation=activation,
            logit_rows=logit_rows,
            softcap=softcap,
            stride=out.width,
        )
        calls.append(site.call(op, "linear", arguments))
        column += matrix.shape.rows
    return calls
