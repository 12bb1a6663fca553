"""The Mamba-2 mixer (arXiv:2405.21060): a short convolution, then a state space recurrence.

H heads of P features, G groups with N state features each, I = H * P, K taps, T tokens. Files have
z | x | B | C | dt in one matrix and x | B | C in the convolution; the weight map makes C | B | x of
the latter, which is what `recurrence` reads as q | k | v.
"""

from __future__ import annotations

import math

import numpy as np
from vllmx_core.model import Array, RecurrenceSpec, ShortConvSpec, StateSpec
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.layer import (
    LayerNames,
    LayerScope,
    Numbers,
    linear,
    packed_parts,
    part,
    vector,
)
from vllmx_models.blocks.recurrent import RecurrentMixer, runs_norm, taps

_LARGEST = float(np.finfo(np.float32).max)
UNBOUNDED = Numbers(((-_LARGEST, 1), (_LARGEST, 1)) * 3)


class MambaMixer(RecurrentMixer):
    """Mamba-2 with an output gated by SiLU and normalised group by group."""

    num_heads: int  # H
    head_size: int  # P
    num_groups: int  # G
    state_size: int  # N
    kernel: int  # K
    norm_eps: float | None
    """None: the output has no norm."""
    conv_bias: bool = True
    bias: bool = False
    """True if the input and output projections have a bias."""
    dt_min: float = 0.0
    dt_max: float = math.inf
    module: str = "mamba"
    norm_first: bool = False
    """True if the norm comes before the gate."""
    factors: tuple[float, ...] = (1.0,) * 5
    """The factors of z, x, B, C and dt behind the input projection."""

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        """The bounds of `_inputs`."""
        return (UNBOUNDED,) if self._apart else ()

    @property
    def _apart(self) -> bool:
        """True if x, B and C have factors of their own."""
        return self.factors[1:4] != (1.0,) * 3

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
        inputs = [("z", (z,)), ("qkv", (c, b, x)), ("dt", (dt,))]
        if self._apart:
            inputs[1:2] = [("c", (c,)), ("b", (b,)), ("x", (x,))]
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
            *(
                ()
                if self.norm_eps is None
                else (vector(f"{ours}.norm", f"{theirs}.norm.weight", width),)
            ),
            linear(f"{ours}.o", (part(f"{theirs}.out_proj", size, self.bias),), width, "row"),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight = scope.ops, scope.weight
        conv = ShortConvSpec(scope.state, self.kernel, "silu")
        bias = weight("conv_bias") if self.conv_bias else None
        qkv = ops.short_conv(self._inputs(x, scope), weight("taps"), conv, scope.step, bias=bias)
        y = ops.recurrence(
            qkv,
            self._scaled(x, scope, "dt", 4),
            None,
            self._rule(scope.state + 1),
            scope.step,
            a_log=weight("a_log"),
            dt_bias=weight("dt_bias"),
            d=weight("d"),
        )  # (T, I)
        z = self._scaled(x, scope, "z", 0)
        if self.norm_eps is None:
            return ops.linear(ops.gate(y, z, "silu"), weight("o"))  # (T, E)
        groups = runs_norm(self.num_groups, self.width // self.num_groups, self.norm_eps)
        if self.norm_first:
            y = ops.gate(ops.head_norm(y, groups, weight("norm")), z, "silu")
        else:
            y = ops.head_norm(ops.gate(y, z, "silu"), groups, weight("norm"))
        return ops.linear(y, weight("o"))  # (T, E)

    def _inputs(self, x: Array, scope: LayerScope) -> Array:
        """C | B | x; bounds that hold nothing join what has factors of its own."""
        if not self._apart:
            return scope.ops.linear(x, scope.weight("qkv"))
        c, b, v = (self._scaled(x, scope, *one) for one in (("c", 3), ("b", 2), ("x", 1)))
        bounds = scope.rope(UNBOUNDED)
        assert bounds is not None
        return scope.ops.clip(c, bounds, b, v)

    def _scaled(self, x: Array, scope: LayerScope, name: str, factor: int) -> Array:
        y, by = scope.ops.linear(x, scope.weight(name)), self.factors[factor]
        return y if by == 1.0 else scope.ops.scale(y, by)


def _picked(name: str, start: int, rows: int, values: int = 1) -> PartSpec:
    """Rows of a tensor that has `values` numbers in each."""
    return PartSpec(name, rows * values, runs=RowRuns(start, rows, rows))
