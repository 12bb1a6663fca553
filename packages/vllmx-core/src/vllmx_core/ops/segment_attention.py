"""`segment_attention`: tokens attend to those of their own segment, both ways and without pages."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np

from vllmx_core.arrays import NUMPY, Array, Arrays
from vllmx_core.ops.attention import (
    AttentionSpec,
    attend,
    attention_mask,
    bias_of,
    expect_bias,
    expect_rotation,
    rotate,
    rotations,
)
from vllmx_core.ops.formulas import Floats, NumpyFrame
from vllmx_core.ops.op import Op, expect, expect_features
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.plan import I32, StepPlan
from vllmx_core.records import Record


class SegmentSpec(Record):
    """The options of one layer. H = num_heads, K = num_kv_heads, D = head_size.

    The op splits `qkv` (T, (H + 2K) * D) into q | k | v, rotates the first `rotary_dim` of D by
    each token's position, and attends within segments. A segment is a row of the step: a request
    whose whole prompt is in it, or in a tower an image. Query head h reads kv head h // (H / K).
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rotary_dim: int = 0
    interleaved: bool = False
    """False: pairs (i, i + rotary_dim / 2), as Hugging Face; True: pairs (2i, 2i + 1)."""
    window: int | None = None
    """Tokens less than so many places away are seen, before and behind; None: all."""
    rope_axes: tuple[int, ...] = ()
    """The axis that turns each frequency, see `AttentionSpec.rope_axes`."""
    windowed: bool = False
    """True if segments are windows of an image, see `PatchRows.windows`."""

    @property
    def attention(self) -> AttentionSpec:
        """The same options for a formula that is shared with `attention`."""
        return AttentionSpec(
            0,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.scale,
            self.rotary_dim,
            self.interleaved,
            window=self.window,
            causal=False,
        )


class SegmentAttention(Op):
    """(T, (H + 2K) * D) -> (T, H * D); see `SegmentSpec`."""

    name: ClassVar[str] = "segment_attention"
    qkv: Value
    spec: SegmentSpec
    rope: WeightRef | None
    """Constant (positions, rotary_dim) float32: cos of the rotary_dim / 2 frequencies, then sin."""
    bias: WeightRef | None
    """((2n - 1) * H,) added to scores: the H heads' numbers for keys n - 1 places before the query,
    then those for n - 2 places, up to n - 1 places after it. Segments have at most n tokens."""
    out: Value

    @classmethod
    def of(
        cls,
        qkv: Value,
        spec: SegmentSpec,
        step: StepInputs,
        rope: WeightRef | None = None,
        bias: WeightRef | None = None,
    ) -> SegmentAttention:
        expect_features(qkv=qkv)
        expect(isinstance(step, StepInputs), "pass on the step itself")
        return cls(qkv, spec, rope, bias, Value(spec.num_heads * spec.head_size))

    def check(self) -> None:
        spec = self.spec
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
        width = (heads + 2 * kv_heads) * size
        wanted = f"({heads} + 2 * {kv_heads}) * {size} = {width}"
        expect(self.qkv.width == width, f"qkv has {self.qkv.width} features, not {wanted}")
        expect(heads % kv_heads == 0, f"{heads} heads over {kv_heads} kv heads")
        expect(spec.window is None or spec.window >= 1, f"a window of {spec.window} tokens")
        expect_rotation(self.rope, spec.rotary_dim, size, spec.rope_axes)
        expect_bias(self.bias, heads)

    def compute(self, frame: NumpyFrame) -> None:
        table = None if self.rope is None else frame.weight(self.rope)
        bias = None if self.bias is None else frame.weight(self.bias)
        frame[self.out] = segment_attention(frame[self.qkv], self.spec, frame.plan, table, bias)


def segment_attention(
    qkv: Floats,
    spec: SegmentSpec,
    plan: StepPlan,
    rope: Floats | None = None,
    bias: Floats | None = None,
) -> Floats:
    """(T, (H + 2K) * D) -> (T, H * D)."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    split = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, size)
    q, k, v = np.split(split, [heads, heads + kv_heads], axis=1)
    if rope is not None:
        table = rotations(rope, plan, spec.rope_axes)
        q = rotate(q, table, interleaved=spec.interleaved)
        k = rotate(k, table, interleaved=spec.interleaved)
    out = np.empty_like(q)  # (T, H, D)
    for start, end in pairwise(segments(spec, plan)):
        tokens = slice(start, end)
        places = np.arange(tokens.stop - tokens.start, dtype=np.int32)
        mask = attention_mask(spec.attention, places, places)
        added = None if bias is None else bias_between(bias, heads, end - start)
        out[tokens] = attend(q[tokens], k[tokens], v[tokens], mask, spec.attention, bias=added)
    return out.reshape(qkv.shape[0], heads * size)


def bias_between(bias: Array, heads: int, length: int, xp: Arrays = NUMPY) -> Array:
    """(H, n, n) what `SegmentAttention.bias` adds to the scores of n = `length` tokens, by query
    and key."""
    places = np.arange(length)
    distances = xp.upload(bias, places - places[:, None])
    return xp.moveaxis(bias_of(bias, heads, distances), -1, 0)


def segments(spec: SegmentSpec, plan: StepPlan) -> list[int]:
    """The first token of each segment, then T."""
    starts: I32 | None = plan.query_start
    if spec.windowed:
        assert plan.patches is not None, "towers have windows"
        starts = plan.patches.windows
    assert starts is not None, "`Encoder.places` says where windows are"
    found: list[int] = starts.tolist()
    return found
