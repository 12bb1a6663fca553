"""The choice of experts, and their products."""

from __future__ import annotations

from vllmx_core.ops.experts import Experts
from vllmx_core.ops.route import SCORES, Route

from vllmx_cpu.lowering.site import Site, Table
from vllmx_cpu.native import SCRATCH_BYTES
from vllmx_cpu.structs import GATES, VxExperts, VxRoute
from vllmx_cpu.tape import Call

OPS = Table("cpu")
MAX_EXPERTS = SCRATCH_BYTES // 32
"""The most experts: a token's scores lie three times in a thread's scratch memory."""


@OPS.add(Route, when=lambda op: op.logits.width <= MAX_EXPERTS)
def _route(op: Route, site: Site) -> list[Call]:
    spec = op.spec
    arguments = VxRoute(
        logits=site.address(op.logits),
        bias=site.vector(op.bias),
        factor=site.vector(op.factor),
        ids=site.address(op.ids),
        weights=site.address(op.slot_weights),
        count=op.logits.width,
        chosen=spec.chosen,
        score=SCORES.index(spec.score),
        groups=spec.groups,
        groups_kept=spec.groups_kept,
        best_two=int(spec.group_score == "best_two"),
        renormalise=int(spec.renormalise),
        eps=spec.eps,
        scale=spec.scale,
        table=site.vector(op.table),
        jitter=spec.jitter,
    )
    return [site.call(op, "route", arguments)]


@OPS.add(Experts)
def _experts(op: Experts, site: Site) -> list[Call]:
    spec, matrices = op.spec, site.model.weights.matrices
    arguments = VxExperts(
        gate_up=matrices[op.gate_up.name].struct(),
        down=matrices[op.down.name].struct(),
        x=site.address(op.x),
        ids=site.address(op.ids),
        weights=site.address(op.slot_weights),
        y=site.address(op.out),
        panels=site.model.panels.ctypes.data,
        workspace=site.model.workspace.ctypes.data,
        count=op.gate_up.count,
        chosen=op.ids.width,
        first=op.first or 0,
        activation=GATES[spec.activation],
        clamp=spec.clamp or 0.0,
        alpha=spec.alpha or 0.0,
    )
    return [site.call(op, "experts", arguments)]
