"""The dense feed-forward: two matrices with an activation between them, or three with a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from vllmx_core.model import Activation, Array
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import LayerNames, LayerScope, packed_parts, part, transposed


class MLPNames(Record):
    """The names of the modules of an MLP in the checkpoint."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None
    """One matrix with the rows of gate, then those of up."""
    up_gate: str | None = None
    """One matrix with the rows of up, then those of gate."""
    transposed: bool = False
    """True if matrices are stored as (inputs, outputs)."""
    also: str | None = None
    """An alternative to `module` in checkpoints; only for matrices without a bias."""


class DenseMLP(Record):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    intermediate_size: int  # F
    activation: Activation | Literal["relu2"] = "silu"
    """relu2, squared ReLU, requires `gated` = False."""
    gated: bool = True
    bias: bool = False
    down_bias: bool | None = None
    """True if the down projection has a bias; None: as `bias`."""
    names: MLPNames = MLPNames()
    limit: float | None = None
    """The bound of gate and up, see `Ops.gated_act`."""

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        biased = self.bias if self.down_bias is None else self.down_bias
        down = (self._part(names, self.names.down, names.hidden_size, biased),)
        first = f"{names.ours}.{'gate_up' if self.gated else 'up'}"
        specs = (
            WeightSpec(first, "linear", self._first_parts(names), names.hidden_size, "column"),
            WeightSpec(f"{names.ours}.down", "linear", down, self.intermediate_size, "row"),
        )
        return transposed(specs) if self.names.transposed else specs

    def _first_parts(self, names: LayerNames) -> tuple[PartSpec, ...]:
        rows = self.intermediate_size
        up = self._part(names, self.names.up, rows, self.bias)
        if not self.gated:
            return (up,)
        if self.names.gate_up is not None:
            return packed_parts(self._within(names, self.names.gate_up), (rows, rows), self.bias)
        if self.names.up_gate is not None:
            packed = self._within(names, self.names.up_gate)
            return packed_parts(packed, (rows, rows), self.bias)[::-1]
        return self._part(names, self.names.gate, rows, self.bias), up

    def _within(self, names: LayerNames, name: str) -> str:
        return f"{names.within(self.names.module)}.{name}"

    def _part(self, names: LayerNames, name: str, rows: int, biased: bool) -> PartSpec:
        found = part(self._within(names, name), rows, biased)
        if self.names.also is None:
            return found
        return replace(found, alternatives=(f"{names.theirs}.{self.names.also}.{name}.weight",))

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops = scope.ops
        if self.activation == "relu2":
            assert not self.gated, "relu2 is for feed-forwards without a gate"
            up = ops.linear(x, scope.weight("up"))  # (T, F)
            hidden = ops.gate(up, up, "relu")
        elif self.gated:
            gate_up = ops.linear(x, scope.weight("gate_up"))  # (T, 2F)
            hidden = ops.gated_act(gate_up, self.activation, self.limit)  # (T, F)
        else:
            hidden = ops.activation(ops.linear(x, scope.weight("up")), self.activation)  # (T, F)
        return ops.linear(hidden, scope.weight("down"))  # (T, E)
