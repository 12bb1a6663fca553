"""Recurrent mixers: a short convolution and a recurrence in place of attention over a cache.

H heads, Hk key heads of Dk, values of Dv, K taps of the convolution, E hidden size, T tokens. What
the convolution reads is one matrix q | k | v (of Mamba-2: C | B | x): the weight map puts its rows,
and the taps, in this order.
"""

from __future__ import annotations

from dataclasses import replace

from vllmx_core.model import Array, RecurrenceSpec, ShortConvSpec, StateSpec
from vllmx_core.ops.head_norm import HeadNormSpec
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.layer import (
    LayerNames,
    LayerScope,
    linear,
    packed_parts,
    part,
    vector,
)


class DeltaNames(Record):
    """Modules of a gated delta net in the checkpoint. `in_proj_qkvz` and `in_proj_ba`, where they
    are set, hold for each key head its rows of q, k, v and z, and those of b and a; the former may
    be absent, where q, k and v lie one below the other and z apart."""

    module: str = "linear_attn"
    qkv: str | tuple[str, str, str] = "in_proj_qkv"
    """Three modules where q, k and v lie apart."""
    z: str = "in_proj_z"
    a: str = "in_proj_a"
    b: str = "in_proj_b"
    qkvz: str | None = None
    ba: str | None = None
    conv: str | tuple[str, str, str] = "conv1d"
    """Three modules where the taps of q, k and v lie apart."""
    norm: str = "norm"
    out: str = "out_proj"


class RecurrentMixer(Record):
    """The base of mixers without a KV cache and without RoPE."""

    @property
    def cache(self) -> None:
        return None

    @property
    def rope(self) -> None:
        return None


class DeltaMixer(RecurrentMixer):
    """Gated DeltaNet (arXiv:2412.06464): the delta rule with one decay a head; the output is
    normalised and gated by SiLU."""

    num_heads: int  # H
    num_key_heads: int  # Hk
    key_size: int  # Dk
    value_size: int  # Dv
    kernel: int  # K
    norm_eps: float
    tiled: bool = False
    """True if head h reads key head h % Hk, as in GGUF files; else h // (H / Hk)."""
    beta: float = 1.0
    """See `RecurrenceSpec.beta`."""
    names: DeltaNames = DeltaNames()

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec(1, self.kernel - 1, self._rule(0).width),
            StateSpec(self.num_heads, self.key_size, self.value_size),
        )

    def _rule(self, state: int) -> RecurrenceSpec:
        return RecurrenceSpec(
            state,
            self.num_heads,
            self.num_key_heads,
            self.key_size,
            self.value_size,
            "delta",
            scale=self.key_size**-0.5,
            tiled=self.tiled,
            beta=self.beta,
        )

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, size = names.ours, f"{names.theirs}.{self.names.module}", names.hidden_size
        width = self.num_heads * self.value_size
        out = (part(f"{theirs}.{self.names.out}", size, False),)
        convs = tuple(
            PartSpec(f"{module}.weight", channels * self.kernel)
            for module, channels in self._qkv(theirs, self.names.conv)
        )
        return (
            *(linear(f"{ours}.{name}", parts, size) for name, parts in self._inputs(theirs)),
            taps(f"{ours}.taps", convs, 0, self.kernel),
            vector(f"{ours}.a_log", f"{theirs}.A_log", self.num_heads),
            vector(f"{ours}.dt_bias", f"{theirs}.dt_bias", self.num_heads),
            repeated(
                f"{ours}.norm",
                f"{theirs}.{self.names.norm}.weight",
                self.value_size,
                self.num_heads,
            ),
            linear(f"{ours}.o", out, width, "row"),
        )

    def _inputs(self, theirs: str) -> tuple[tuple[str, tuple[PartSpec, ...]], ...]:
        """The matrices that read the stream: by name, their parts."""
        names, keys, heads = self.names, self.key_size, self.num_heads
        width, all_keys = heads * self.value_size, self.num_key_heads * keys
        if names.qkvz is None or names.ba is None:
            qkv = tuple(part(*one, False) for one in self._qkv(theirs, names.qkv))
            plain = (("z", names.z, width), ("a", names.a, heads), ("b", names.b, heads))
            return ("qkv", qkv), *(
                (name, (part(f"{theirs}.{source}", rows, False),)) for name, source, rows in plain
            )
        assert isinstance(names.qkv, str)
        shared = heads // self.num_key_heads
        values = shared * self.value_size
        together = _runs(f"{theirs}.{names.qkvz}", self.num_key_heads, (keys, keys, values, values))
        apart = (
            *packed_parts(f"{theirs}.{names.qkv}", (all_keys, all_keys, width), False),
            part(f"{theirs}.{names.z}", width, False),
        )
        q, k, v, z = (
            replace(one, alternatives=(other,)) for one, other in zip(together, apart, strict=True)
        )
        b, a = _runs(f"{theirs}.{names.ba}", self.num_key_heads, (shared, shared))
        return ("qkv", (q, k, v)), ("z", (z,)), ("a", (a,)), ("b", (b,))

    def _qkv(self, theirs: str, names: str | tuple[str, str, str]) -> tuple[tuple[str, int], ...]:
        """The modules of q, k and v, and the channels of each."""
        keys, values = self.num_key_heads * self.key_size, self.num_heads * self.value_size
        if isinstance(names, str):
            return ((f"{theirs}.{names}", 2 * keys + values),)
        widths = (keys, keys, values)
        return tuple((f"{theirs}.{name}", width) for name, width in zip(names, widths, strict=True))

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, weight = scope.ops, scope.weight
        conv = ShortConvSpec(scope.state, self.kernel, "silu")
        qkv = ops.short_conv(ops.linear(x, weight("qkv")), weight("taps"), conv, scope.step)
        y = ops.recurrence(
            qkv,
            ops.linear(x, weight("a")),
            ops.linear(x, weight("b")),
            self._rule(scope.state + 1),
            scope.step,
            a_log=weight("a_log"),
            dt_bias=weight("dt_bias"),
        )  # (T, H * Dv)
        y = ops.head_norm(
            y, runs_norm(self.num_heads, self.value_size, self.norm_eps), weight("norm")
        )
        y = ops.gate(y, ops.linear(x, weight("z")), "silu")
        return ops.linear(y, weight("o"))  # (T, E)


def taps(name: str, parts: tuple[PartSpec, ...], channels: int, kernel: int) -> WeightSpec:
    """The weights of a convolution out of tensors (channels, 1, kernel); 0 channels: as many as
    each part has."""
    return WeightSpec(name, "vector", parts, shape=(channels, kernel))


def repeated(name: str, source: str, rows: int, count: int) -> WeightSpec:
    """A norm weight shared by all heads, repeated for each."""
    return WeightSpec(name, "vector", (PartSpec(source, rows),) * count)


def runs_norm(count: int, size: int, eps: float) -> HeadNormSpec:
    """The norm over each of `count` runs of features."""
    return HeadNormSpec(count, 0, size, eps)


def _runs(module: str, heads: int, rows: tuple[int, ...]) -> list[PartSpec]:
    """The parts of a matrix that holds so many rows of each, one head behind the other."""
    starts = (sum(rows[:index]) for index in range(len(rows)))
    return [
        PartSpec(f"{module}.weight", heads * count, runs=RowRuns(start, count, sum(rows)))
        for start, count in zip(starts, rows, strict=True)
    ]
