"""`head_norm`: query, key and value heads normed where they lie, side by side in one row.

Attention itself norms each head by one weight that all heads share. What is here is the rest: one
norm over all heads, weights of each head's own, layer norms, and a norm of the values.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.op import ArrayOp, expect, expect_features, expect_vector
from vllmx_core.ops.values import ArrayFrame, Value, WeightRef
from vllmx_core.records import Record


class HeadNormSpec(Record):
    """Norm of H query heads and K key/value heads of D features; with K = 0 a row is H runs of any
    kind."""

    num_heads: int  # H
    num_kv_heads: int  # K
    head_size: int  # D
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    across: bool = False
    """One norm over all query heads together and one over all key heads; else each head alone."""
    values: bool = False
    """True if value heads are normed too, by their root mean square and without a weight."""

    @property
    def width(self) -> int:
        """Features of a row: those of q, k and v."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


class HeadNorm(ArrayOp):
    """qkv (T, (H + 2K) * D) with the heads normed whose weight is given."""

    name: ClassVar[str] = "head_norm"
    qkv: Value
    spec: HeadNormSpec
    q_norm: WeightRef | None  # (H * D,)
    k_norm: WeightRef | None  # (K * D,)
    out: Value

    @classmethod
    def of(
        cls,
        qkv: Value,
        spec: HeadNormSpec,
        q_norm: WeightRef | None = None,
        k_norm: WeightRef | None = None,
    ) -> HeadNorm:
        expect_features(qkv=qkv)
        return cls(qkv, spec, q_norm, k_norm, Value(qkv.width))

    def check(self) -> None:
        spec = self.spec
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
        qkv = f"qkv has {self.qkv.width} features, not ({heads} + 2 * {kv_heads}) * {size}"
        expect(self.qkv.width == spec.width, f"{qkv} = {spec.width}")
        for norm, count in ((self.q_norm, heads), (self.k_norm, kv_heads)):
            if norm is not None:
                expect_vector(norm, count * size)
        expect(spec.eps > 0, f"eps is {spec.eps}, it must be above 0")

    def compute(self, frame: ArrayFrame[Any]) -> None:
        q_norm, k_norm = frame.optional(self.q_norm), frame.optional(self.k_norm)
        frame[self.out] = head_norm(frame[self.qkv], self.spec, q_norm, k_norm, frame.xp)


def head_norm(
    qkv: Array,
    spec: HeadNormSpec,
    q_norm: Array | None,
    k_norm: Array | None,
    xp: Arrays = NUMPY,
) -> Array:
    """(T, (H + 2K) * D) -> the same."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    q, k, v = xp.split(qkv, [heads * size, kv_heads * size, kv_heads * size])
    if q_norm is not None:
        q = _normed(q, spec, q_norm, xp)
    if k_norm is not None:
        k = _normed(k, spec, k_norm, xp)
    if spec.values:
        runs = xp.wide(v).reshape(len(v), kv_heads, size)
        v = xp.rms_norm(runs, None, spec.eps).reshape(v.shape)
    return xp.like(qkv, xp.concatenate([q, k, v], axis=-1))


def _normed(x: Array, spec: HeadNormSpec, w: Array, xp: Arrays) -> Array:
    runs = xp.wide(x).reshape(len(x), -1, x.shape[-1] if spec.across else spec.head_size)
    w = w.reshape(runs.shape[1:])
    if spec.kind == "rms":
        return xp.rms_norm(runs, w, spec.eps).reshape(x.shape)
    return xp.layer_norm(runs, w, None, spec.eps).reshape(x.shape)
