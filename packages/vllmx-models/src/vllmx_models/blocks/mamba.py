"""The Mamba-2 mixer (arXiv:2405.21060): a short convolution, then a state space recurrence.

H heads of P features, G groups with N state features each, I = H * P, K taps, T tokens. Files have
z | x | B | C | dt in one matrix and x | B | C in the convolution; the weight map makes C | B | x of
the latter, which is what `recurrence` reads as q | k | v.
"""

from __future__ import annotations

import math

from vllmx_core.model import Array, RecurrenceSpec, ShortConvSpec, StateSpec
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.layer import (
    LayerNames,
    LayerScope,
    linear,
    packed_parts,
    part,
    vector,
)
from vllmx_models.blocks.recurrent import RecurrentMixer, runs_norm, taps


class MambaMixer(RecurrentMixer):
    """Mamba-2 with an output gated by SiLU and normalised group by group."""

    num_heads: int  # H
    head_size: int  # P
    num_groups: int  # G
    state_size: int  # N
    kernel: int  # K
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False
    """True if the input and output projections have a bias."""
    dt_min: float = 0.0
    dt_max: float = math.inf
    module: str = "mamba"

    @property
    def width(self) -> int:
        """I, the features of all heads."""
        return self.num_heads * self.head_size

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec(1, self.kernel - 1, self._rule(0).width),
            StateSpec(self.num_heads, self.state_size, self.head_size),
        )

    def _rule(self, state: int) -> RecurrenceSpec:
        return RecurrenceSpec(
            state,
            self.num_heads,
            self.num_groups,
            self.state_size,
            self.head_size,
            "ssd",
            dt_min=self.dt_min,
            dt_max=self.dt_max,
        )

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, size = names.ours, f"{names.theirs}.{self.module}", names.hidden_size
        width, keys, heads = self.width, self.num_groups * self.state_size, self.num_heads
        rows = (width, width, keys, keys, heads)
        z, x, b, c, dt = packed_parts(f"{theirs}.in_proj", rows, self.bias)
        conv = f"{theirs}.conv1d"
        starts = ((width + keys, keys), (width, keys), (0, width))  # C, B, x
        inputs = (("z", (z,)), ("qkv", (c, b, x)), ("dt", (dt,)))
        found = [linear(f"{ours}.{name}", parts, size) for name, parts in inputs]
        picked = tuple(_picked(f"{conv}.weight", *span, self.kernel) for span in starts)
        found.append(taps(f"{ours}.taps", picked, width + 2 * keys, self.kernel))
        if self.conv_bias:
            biases = tuple(_picked(f"{conv}.bias", *span) for span in starts)
            found.append(WeightSpec(f"{ours}.conv_bias", "vector", biases))
        return (
            *found,
            vector(f"{ours}.a_log", f"{theirs}.A_log", heads),
            vector(f"{ours}.dt_bias", f"{theirs}.dt_bias", heads),
            vector(f"{ours}.d", f"{theirs}.D", heads),
            vector(f"{ours}.norm", f"{theirs}.norm.weight", width),
            linear(f"{ours}.o", (part(f"{theirs}.out_proj", size, self.bias),), width, "row"),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight = scope.ops, scope.weight
        conv = ShortConvSpec(scope.state, self.kernel, "silu")
        bias = weight("conv_bias") if self.conv_bias else None
        qkv = ops.linear(x, weight("qkv"))
        qkv = ops.short_conv(qkv, weight("taps"), conv, scope.step, bias=bias)
        y = ops.recurrence(
            qkv,
            ops.linear(x, weight("dt")),
            None,
            self._rule(scope.state + 1),
            scope.step,
            a_log=weight("a_log"),
            dt_bias=weight("dt_bias"),
            d=weight("d"),
        )  # (T, I)
        y = ops.gate(y, ops.linear(x, weight("z")), "silu")
        groups = runs_norm(self.num_groups, self.width // self.num_groups, self.norm_eps)
        return ops.linear(ops.head_norm(y, groups, weight("norm")), weight("o"))  # (T, E)


def _picked(name: str, start: int, rows: int, values: int = 1) -> PartSpec:
    """Rows of a tensor that has `values` numbers in each."""
    return PartSpec(name, rows * values, runs=RowRuns(start, rows, rows))
