"""The convolution mixer of LFM2: a short convolution between two gates.

E hidden size, K taps, T tokens.
"""

from __future__ import annotations

from vllmx_core.model import Array, ShortConvSpec, StateSpec
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import (
    LayerNames,
    LayerScope,
    linear,
    packed_parts,
    part,
    vector,
)
from vllmx_models.blocks.recurrent import RecurrentMixer, taps


class ConvMixer(RecurrentMixer):
    """out(c * conv(b * x)), where b, c and x come out of one matrix."""

    channels: int  # E
    kernel: int  # K
    bias: bool = False
    module: str = "conv"

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec(1, self.kernel - 1, self.channels),)

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, size = names.ours, f"{names.theirs}.{self.module}", self.channels
        inputs = packed_parts(f"{theirs}.in_proj", (size, size, size), self.bias)
        conv = (PartSpec(f"{theirs}.conv.weight", size * self.kernel),)
        bias = vector(f"{ours}.conv_bias", f"{theirs}.conv.bias", size)
        return (
            *(
                linear(f"{ours}.{name}", (rows,), size)
                for name, rows in zip("bcx", inputs, strict=True)
            ),
            taps(f"{ours}.taps", conv, size, self.kernel),
            *((bias,) if self.bias else ()),
            linear(f"{ours}.o", (part(f"{theirs}.out_proj", size, self.bias),), size, "row"),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight = scope.ops, scope.weight
        b, c, x = (ops.linear(x, weight(name)) for name in "bcx")  # (T, E)
        x = ops.gate(x, b, "identity")
        bias = weight("conv_bias") if self.bias else None
        spec = ShortConvSpec(scope.state, self.kernel)
        x = ops.short_conv(x, weight("taps"), spec, scope.step, bias=bias)
        return ops.linear(ops.gate(x, c, "identity"), weight("o"))
