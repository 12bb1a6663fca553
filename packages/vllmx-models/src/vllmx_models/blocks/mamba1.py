"""The Mamba-1 mixer (arXiv:2312.00752): a short convolution, then a recurrence of a vector for each
feature, whose entries decay at rates of their own.

I features, N entries of a state, R features from which step sizes are made, K taps, T tokens.
"""

from __future__ import annotations

from vllmx_core.model import Array, RecurrenceSpec, ShortConvSpec, StateSpec
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import (
    LayerNames,
    LayerScope,
    Numbers,
    linear,
    packed_parts,
    part,
    vector,
)
from vllmx_models.blocks.mamba import UNBOUNDED
from vllmx_models.blocks.recurrent import RecurrentMixer, taps


class Mamba1Mixer(RecurrentMixer):
    """Mamba-1 with an output gated by SiLU."""

    width: int  # I
    state_size: int  # N
    rank: int  # R
    kernel: int  # K
    conv_bias: bool = True
    bias: bool = False
    """True if the input and output projections have a bias."""
    norm_eps: float | None = None
    """The RMS norms of step sizes, B and C; None: there are none."""
    norm_weights: bool = True
    """False if these norms have no weights, as in Falcon Mamba."""
    module: str = "mixer"

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec(1, self.kernel - 1, self.width),
            StateSpec(self.width, self.state_size, 1),
        )

    @property
    def _normed(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of what the convolution's output is projected to."""
        return ("dt", self.rank), ("b", self.state_size), ("c", self.state_size)

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        """Bounds that hold nothing, and the weights of norms that have none."""
        plain = self.norm_eps is not None and not self.norm_weights
        ones = {_ones(size): None for _, size in self._normed} if plain else {}
        return (UNBOUNDED, *ones)

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, size = names.ours, f"{names.theirs}.{self.module}", names.hidden_size
        width, rows = self.width, tuple(size for _, size in self._normed)
        x, z = packed_parts(f"{theirs}.in_proj", (width, width), self.bias)
        projected = packed_parts(f"{theirs}.x_proj", rows, False)
        conv = PartSpec(f"{theirs}.conv1d.weight", width * self.kernel)
        found = [
            linear(f"{ours}.x", (x,), size),
            linear(f"{ours}.z", (z,), size),
            taps(f"{ours}.taps", (conv,), width, self.kernel),
        ]
        if self.conv_bias:
            found.append(vector(f"{ours}.conv_bias", f"{theirs}.conv1d.bias", width))
        for (name, rows_of), one in zip(self._normed, projected, strict=True):
            found.append(linear(f"{ours}.{name}", (one,), width))
            if self.norm_eps is not None and self.norm_weights:
                source = f"{theirs}.{name}_layernorm.weight"
                found.append(vector(f"{ours}.{name}_norm", source, rows_of))
        rates = (PartSpec(f"{theirs}.A_log", width * self.state_size),)
        return (
            *found,
            linear(f"{ours}.steps", (part(f"{theirs}.dt_proj", width, False),), self.rank),
            vector(f"{ours}.dt_bias", f"{theirs}.dt_proj.bias", width),
            WeightSpec(f"{ours}.a_log", "vector", rates, shape=(width, self.state_size)),
            vector(f"{ours}.d", f"{theirs}.D", width),
            linear(f"{ours}.o", (part(f"{theirs}.out_proj", size, self.bias),), width, "row"),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight = scope.ops, scope.weight
        conv = ShortConvSpec(scope.state, self.kernel, "silu")
        bias = weight("conv_bias") if self.conv_bias else None
        v = ops.linear(x, weight("x"))  # (T, I)
        v = ops.short_conv(v, weight("taps"), conv, scope.step, bias=bias)
        dt, b, c = (self._projected(v, name, size, scope) for name, size in self._normed)
        bounds = scope.rope(UNBOUNDED)
        assert bounds is not None
        rule = RecurrenceSpec(
            scope.state + 1, self.width, 1, self.state_size, 1, "ssd", decay="channel"
        )
        y = ops.recurrence(
            ops.clip(c, bounds, b, v),
            ops.linear(dt, weight("steps")),
            None,
            rule,
            scope.step,
            a_log=weight("a_log"),
            dt_bias=weight("dt_bias"),
            d=weight("d"),
        )  # (T, I)
        return ops.linear(ops.gate(y, ops.linear(x, weight("z")), "silu"), weight("o"))  # (T, E)

    def _projected(self, v: Array, name: str, size: int, scope: LayerScope) -> Array:
        y = scope.ops.linear(v, scope.weight(name))
        if self.norm_eps is None:
            return y
        ones = None if self.norm_weights else scope.rope(_ones(size))
        return scope.ops.rms_norm(y, ones or scope.weight(f"{name}_norm"), self.norm_eps)


def _ones(size: int) -> Numbers:
    return Numbers(((1.0, size),))
