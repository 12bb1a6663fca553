"""Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay for each channel.

H heads of D features for queries, keys and values alike, K taps of the convolution, T tokens.
"""

from __future__ import annotations

from vllmx_core.model import Array, RecurrenceSpec, ShortConvSpec, StateSpec
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import LayerNames, LayerScope, linear, part, vector
from vllmx_models.blocks.recurrent import RecurrentMixer, repeated, runs_norm, taps


class KimiDeltaMixer(RecurrentMixer):
    """Decays and gates are low-rank projections (rank D); the output is normalised and gated by
    sigmoid."""

    num_heads: int  # H
    head_size: int  # D
    kernel: int  # K
    norm_eps: float

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec(1, self.kernel - 1, self._rule(0).width),
            StateSpec(self.num_heads, self.head_size, self.head_size),
        )

    def _rule(self, state: int) -> RecurrenceSpec:
        heads, size = self.num_heads, self.head_size
        return RecurrenceSpec(
            state, heads, heads, size, size, "delta", scale=size**-0.5, decay="channel"
        )

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, size = names.ours, f"{names.theirs}.self_attn", names.hidden_size
        heads, rank = self.num_heads, self.head_size
        width = heads * rank
        a_log = (PartSpec(f"{theirs}.A_log", heads),)
        convs = tuple(
            PartSpec(f"{theirs}.{name}_conv1d.weight", width * self.kernel) for name in "qkv"
        )

        def matrix(name: str, rows: int, cols: int, *modules: str) -> WeightSpec:
            parts = tuple(part(f"{theirs}.{module}", rows, False) for module in modules)
            return linear(f"{ours}.{name}", parts, cols)

        return (
            matrix("qkv", width, size, "q_proj", "k_proj", "v_proj"),
            taps(f"{ours}.taps", convs, width, self.kernel),
            matrix("f_a", rank, size, "f_a_proj"),
            matrix("f_b", width, rank, "f_b_proj"),
            matrix("b", heads, size, "b_proj"),
            WeightSpec(f"{ours}.a_log", "vector", a_log, shape=(1, 1, heads, 1)),
            vector(f"{ours}.dt_bias", f"{theirs}.dt_bias", width),
            matrix("g_a", rank, size, "g_a_proj"),
            matrix("g_b", width, rank, "g_b_proj"),
            repeated(f"{ours}.norm", f"{theirs}.o_norm.weight", rank, heads),
            linear(f"{ours}.o", (part(f"{theirs}.o_proj", size, False),), width, "row"),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight = scope.ops, scope.weight
        conv = ShortConvSpec(scope.state, self.kernel, "silu")
        qkv = ops.short_conv(ops.linear(x, weight("qkv")), weight("taps"), conv, scope.step)
        y = ops.recurrence(
            qkv,
            ops.linear(ops.linear(x, weight("f_a")), weight("f_b")),
            ops.linear(x, weight("b")),
            self._rule(scope.state + 1),
            scope.step,
            a_log=weight("a_log"),
            dt_bias=weight("dt_bias"),
        )  # (T, H * D)
        norm = runs_norm(self.num_heads, self.head_size, self.norm_eps)
        y = ops.head_norm(y, norm, weight("norm"))
        y = ops.gate(y, ops.linear(ops.linear(x, weight("g_a")), weight("g_b")), "sigmoid")
        return ops.linear(y, weight("o"))  # (T, E)
