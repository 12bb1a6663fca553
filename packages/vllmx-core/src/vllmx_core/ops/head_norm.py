"""`head_norm`: query, key and value heads normed where they lie, side by side in one row.

Attention itself norms each head by one weight that all heads share. What is here is the rest: one
norm over all heads, weights of each head's own, layer norms, and a norm of the values.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.layer_norm import layer_norm
from vllmx_core.ops.op import Op, expect, expect_features, expect_vector
from vllmx_core.ops.rms_norm import rms_norm
from vllmx_core.ops.values import Value, WeightRef
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


class HeadNorm(Op):
    """qkv (T, (H + 2K) * D) with the heads normed whose weight is given."""

    name: ClassVar[str] = "head_norm"
    qkv: Value
    spec: HeadNormSpec
    q_norm: WeightRef | None  # (H * D,)
    k_norm: WeightRef | None  # (K * D,)
    out: Value

    @classmethod
    def of(
        cls, qkv: Value, spec: HeadNormSpec, q_norm: WeightRef | None, k_norm: WeightRef | None
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

    def compute(self, frame: NumpyFrame) -> None:
        q_norm, k_norm = (
            None if norm is None else frame.weight(norm) for norm in (self.q_norm, self.k_norm)
        )
        frame[self.out] = head_norm(frame[self.qkv], self.spec, q_norm, k_norm)


def head_norm(
    qkv: Floats, spec: HeadNormSpec, q_norm: Floats | None, k_norm: Floats | None
) -> Floats:
    """(T, (H + 2K) * D) -> the same."""
    size = spec.head_size
    ends = [spec.num_heads * size, (spec.num_heads + spec.num_kv_heads) * size]
    q, k, v = np.split(qkv, ends, axis=1)
    if q_norm is not None:
        q = _normed(q, spec, q_norm)
    if k_norm is not None:
        k = _normed(k, spec, k_norm)
    if spec.values:
        heads = v.reshape(-1, spec.num_kv_heads, size)
        v = rms_norm(heads, np.ones(size, v.dtype), spec.eps).reshape(v.shape)
    return np.concatenate([q, k, v], axis=1)


def _normed(x: Floats, spec: HeadNormSpec, w: Floats) -> Floats:
    size = len(w) if spec.across else spec.head_size
    runs, weights = x.reshape(len(x), -1, size), w.reshape(-1, size)
    if spec.kind == "rms":
        return rms_norm(runs, weights, spec.eps).reshape(x.shape)
    return layer_norm(runs, weights, None, spec.eps).reshape(x.shape)
