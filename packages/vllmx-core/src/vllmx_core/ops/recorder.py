"""`Ops`: checks and records a model's ops. A new op has a file, and a line in `OPS` and `Ops`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Concatenate, ParamSpec, TypeVar

from vllmx_core.errors import OpError
from vllmx_core.ops.activation import Act
from vllmx_core.ops.adapt import Adapt
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.attention import Attention, AttentionSpec, AttentionWeights
from vllmx_core.ops.clip import Clip
from vllmx_core.ops.combine import Combine
from vllmx_core.ops.compress import Compress, CompressSpec
from vllmx_core.ops.compressed_attention import CompressedAttention
from vllmx_core.ops.cross_attention import CrossAttention
from vllmx_core.ops.downsample import Downsample
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.experts import Experts
from vllmx_core.ops.gate import Gate
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.grouped_linear import GroupedLinear
from vllmx_core.ops.head import Head
from vllmx_core.ops.head_norm import HeadNorm
from vllmx_core.ops.hyper_connections import HyperRead, HyperStreams, HyperWrite
from vllmx_core.ops.indexer import Indexer
from vllmx_core.ops.keep import Keep
from vllmx_core.ops.latent_attention import LatentAttention, LatentSpec, LatentWeights
from vllmx_core.ops.layer_norm import LayerNorm
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.match_rms import MatchRms
from vllmx_core.ops.merge import Merge
from vllmx_core.ops.mix import Mix
from vllmx_core.ops.op import Op, OpList, expect
from vllmx_core.ops.patches import Patches
from vllmx_core.ops.place import Place
from vllmx_core.ops.pool import Pool, PoolKind
from vllmx_core.ops.recurrence import Recurrence, RecurrenceSpec, RecurrenceWeights
from vllmx_core.ops.recv import Recv
from vllmx_core.ops.resize import Resize
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.route import Route, RouteSpec
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_at import ScaleAt
from vllmx_core.ops.scale_by import ScaleBy
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.send import Send
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.ops.slice import Slice
from vllmx_core.ops.sparsify import Sparsify
from vllmx_core.ops.spread import Spread
from vllmx_core.ops.tap import Tap
from vllmx_core.ops.unfold import Unfold
from vllmx_core.ops.values import Output, StepInputs, Value, WeightRef
from vllmx_core.ops.vocab_embedding import VocabEmbedding

OPS: tuple[type[Op], ...] = (
    Embedding, RmsNorm, AddRmsNorm, LayerNorm, HeadNorm, Linear, GatedLinear, Attention,
    LatentAttention, Indexer, Compress, CompressedAttention, SegmentAttention, CrossAttention,
    ShortConv, Recurrence, GatedAct, Act, Add, Scale, ScaleAt, ScaleBy, Gate, Clip, Route, Experts,
    Head, Spread, Pool, GroupedLinear, HyperStreams, HyperRead, HyperWrite, Patches, Unfold,
    Downsample, Mix, Merge, Keep, Place, Tap, Adapt, VocabEmbedding, AllReduce, Combine, AllGather,
    Slice, Resize, MatchRms, Sparsify, Send, Recv,
)  # fmt: skip
"""Every op of core."""
P = ParamSpec("P")
O = TypeVar("O", bound=Op)  # noqa: E741


def _recorded(make: Callable[P, Op]) -> Callable[Concatenate[Ops, P], Value]:
    """A method with the parameters of `make`, an op's `of`: records the op, returns its result."""

    def record(self: Ops, /, *args: P.args, **kwargs: P.kwargs) -> Value:
        return self._record(make, *args, **kwargs).writes[0]

    return record


class Ops:
    """Records the ops of one step. Letters as in `vllmx_core.plan`, E hidden, F intermediate; x is
    (T, features). Ops that work row by row also take what `pool` gave, (L, features). Every method
    raises OpError, which names model, op, weight and the two numbers that disagree. The class of
    an op says what its method takes and gives."""

    embedding = _recorded(Embedding.of)  # (T,) ids -> (T, E)
    rms_norm = _recorded(RmsNorm.of)  # x / sqrt(mean(x^2) + eps) * w
    layer_norm = _recorded(LayerNorm.of)  # (x - mean) / sqrt(var + eps) * w + bias
    head_norm = _recorded(HeadNorm.of)  # (T, (H + 2K) * D) with the heads of q, k and v normed
    linear = _recorded(Linear.of)  # x @ w.T + bias
    indexer = _recorded(Indexer.of)  # -> (T, K) positions that each token attends to
    compressed_attention = _recorded(CompressedAttention.of)  # -> (T, H * D)
    short_conv = _recorded(ShortConv.of)  # (T, C) -> (T, C)
    segment_attention = _recorded(SegmentAttention.of)  # (T, (H + 2K) * D) -> (T, H * D)
    cross_attention = _recorded(CrossAttention.of)  # (T, H * D) -> (T, H * D)
    gated_act = _recorded(GatedAct.of)  # (T, 2F) -> (T, F): act(gate) * up
    grouped_linear = _recorded(GroupedLinear.of)  # (T, G * C) -> (T, G * R)
    hyper_streams = _recorded(HyperStreams.of)  # (T, E) -> (T, N * E)
    hyper_read = _recorded(HyperRead.of)  # (T, N * E) -> (T, E)
    hyper_write = _recorded(HyperWrite.of)  # (T, N * E) and (T, E) -> (T, N * E)
    activation = _recorded(Act.of)  # act(x)
    add = _recorded(Add.of)  # x + y
    scale_at = _recorded(ScaleAt.of)  # x times a factor of its position
    gate = _recorded(Gate.of)  # x * act(g)
    clip = _recorded(Clip.of)  # x within bounds
    match_rms = _recorded(MatchRms.of)  # x in the magnitude of y
    sparsify = _recorded(Sparsify.of)  # features above a cutoff, less the cutoff
    resize = _recorded(Resize.of)  # runs of features cut, or filled up with zeros
    experts = _recorded(Experts.of)  # (T, E) -> (T, E)
    logits = _recorded(Head.of)  # (L, E) -> (L, V)
    spread = _recorded(Spread.of)
    patches = _recorded(Patches.of)
    unfold = _recorded(Unfold.of)
    downsample = _recorded(Downsample.of)
    mix = _recorded(Mix.of)
    merge = _recorded(Merge.of)
    place = _recorded(Place.of)

    def __init__(self, model: str = "model", taps: Mapping[int, int] | None = None) -> None:
        self._model = model
        self._taps = taps or {}
        self.tapped: set[int] = set()
        """The points that were kept."""
        self._ops: list[Op] = []
        self._known: set[Value] = set()
        self._last_weight: str | None = None

    def add_rms_norm(
        self, x: Value, residual: Value | None, w: WeightRef, eps: float
    ) -> tuple[Value, Value]:
        """s = x + residual (x alone when None); returns (rms_norm(s), s)."""
        if residual is None:
            return self.rms_norm(x, w, eps), x
        op = self._record(AddRmsNorm.of, x, residual, w, eps)
        return op.out, op.total

    def attention(
        self,
        qkv: Value,
        spec: AttentionSpec,
        step: StepInputs,
        *,
        rope: WeightRef | None = None,
        q_norm: WeightRef | None = None,
        k_norm: WeightRef | None = None,
        sinks: WeightRef | None = None,
        bias: WeightRef | None = None,
    ) -> Value:
        """(T, (H + 2K) * D) -> (T, H * D); see `AttentionSpec` and `AttentionWeights`."""
        weights = AttentionWeights(rope, q_norm, k_norm, sinks, bias)
        return self._record(Attention.of, qkv, spec, weights, step).out

    def latent_attention(
        self,
        q: Value,
        latent: Value,
        spec: LatentSpec,
        step: StepInputs,
        *,
        rope: WeightRef,
        norm: WeightRef,
        k_b: WeightRef,
        v_b: WeightRef,
        picked: Value | None = None,
    ) -> Value:
        """(T, H * (Dn + Dr)), (T, C + Dr) -> (T, H * Dv); see `LatentSpec` and `LatentWeights`.
        `picked`: the positions that `indexer` gave, of this layer or an earlier one; None: all."""
        weights = LatentWeights(rope, norm, k_b, v_b)
        return self._record(LatentAttention.of, q, latent, spec, weights, step, picked).out

    def compress(
        self,
        kv_gate: Value,
        spec: CompressSpec,
        step: StepInputs,
        *,
        rope: WeightRef,
        bias: WeightRef,
        norm: WeightRef,
    ) -> None:
        """Writes an entry for each window of tokens; see `CompressSpec`."""
        self._record(Compress.of, kv_gate, spec, rope, bias, norm, step)

    def recurrence(
        self,
        qkv: Value,
        a: Value,
        b: Value | None,
        spec: RecurrenceSpec,
        step: StepInputs,
        *,
        a_log: WeightRef,
        dt_bias: WeightRef,
        d: WeightRef | None = None,
    ) -> Value:
        """(T, 2 * Hk * Dk + H * Dv) -> (T, H * Dv); see `RecurrenceSpec`."""
        weights = RecurrenceWeights(a_log, dt_bias, d)
        return self._record(Recurrence.of, qkv, a, b, spec, weights, step).out

    def scale(self, x: Value, factor: float | WeightRef) -> Value:
        """x * factor; a vector (G,) has a value for each F / G neighbouring features."""
        if isinstance(factor, WeightRef):
            return self._record(ScaleBy.of, x, factor).out
        return self._record(Scale.of, x, factor).out

    def route(
        self,
        logits: Value,
        spec: RouteSpec,
        *,
        bias: WeightRef | None = None,
        factor: WeightRef | None = None,
        table: WeightRef | None = None,
    ) -> tuple[Value, Value]:
        """(T, X) -> ids and weights (T, k) of the experts of each token, for `experts`: `bias` (X,)
        takes part in the choice alone, `factor` (X,) multiplies each expert's weight. `table` (V *
        k,) names the experts of each token id, so that nothing is chosen."""
        op = self._record(Route.of, logits, spec, bias, factor, table)
        return op.ids, op.slot_weights

    def pool(self, x: Value, step: StepInputs, kind: PoolKind) -> Value:
        """(T, E) -> (L, E): what a row has become in this step, by its last token, its first one
        ("cls") or the mean of all. For first and mean the step must hold the whole of each row."""
        return self._record(Pool.of, x, step.logit_rows, kind).out

    def tap(self, x: Value, point: int) -> None:
        """Keeps x (T, E), the residual stream after `point` layers, or the output of the last norm
        with `LAST_NORM`, if a drafter reads it; otherwise it records nothing."""
        if point in self._taps:
            self.tapped.add(point)
            self.write(x, self._taps[point])

    def write(self, x: Value, part: int) -> None:
        """Writes x (T, E) to the rows `StepPlan.tap_rows` of a part of the feature store, where
        `place` of a later op or step finds it."""
        self._record(Tap.of, x, part)

    def put(self, op: O) -> O:
        """Appends an op that was made elsewhere, such as a plugin's own."""
        try:
            self._check(op)
        except OpError as error:
            raise self._located(op.name, op.weights, error) from None
        return self._append(op)

    def finished(self, result: object, width: int, output: Output = "tokens") -> OpList:
        """The recorded step. Raises OpError unless `result` is the (L, width) result."""
        what = "logits" if output == "tokens" else output
        if not isinstance(result, Value) or (result.rows, result.width) != ("L", width):
            raise OpError(f"{self._model}: forward returned {result}, not (L, {width}) {what}")
        if output == "tokens" and result.dtype != "f32":
            raise OpError(f"{self._model}: forward returned no logits, but what was pooled")
        return OpList(tuple(self._ops), result, output)

    def finished_tower(self, features: object, parts: int, width: int) -> OpList:
        """The recorded tower, which keeps its features. Raises OpError unless `features` is a tuple
        of `parts` values (L, width)."""
        if not isinstance(features, tuple) or len(features) != parts:
            raise OpError(f"{self._model}: the tower returned {features}, not {parts} values")
        ops, kept = self._ops, dict[Value, list[Op]]()
        for part, value in enumerate(features):
            if not isinstance(value, Value) or (value.rows, value.width) != ("L", width):
                raise OpError(f"{self._model}: the tower returned {value}, not (L, {width})")
            kept.setdefault(value, []).append(self._record(Keep.of, value, part))
        # Each is kept as soon as it is made, so that its memory can be used again.
        made = ops[: len(ops) - len(features)]
        ordered = [
            one for op in made for one in (op, *(k for v in op.writes for k in kept.get(v, ())))
        ]
        return OpList(tuple(ordered), features[0], "vectors")

    def _record(self, make: Callable[P, O], *args: P.args, **kwargs: P.kwargs) -> O:
        try:
            op = make(*args, **kwargs)
            self._check(op)
        except OpError as error:
            name: str = make.__self__.name  # type: ignore[attr-defined]  # a classmethod of an Op
            raise self._located(name, (*args, *kwargs.values()), error) from None
        return self._append(op)

    def _check(self, op: Op) -> None:
        for value in op.reads:
            expect(value in self._known, "an operand comes from another recording")
        op.check()

    def _append(self, op: O) -> O:
        self._ops.append(op)
        self._known.update(op.writes)
        for ref in op.weights:
            self._last_weight = ref.name
        return op

    def _located(self, name: str, given: Iterable[object], error: OpError) -> OpError:
        """Adds model and op to an error, and the weight before it where its own is not named."""
        where = f"{self._model}: {name}"
        if self._last_weight and not any(isinstance(one, WeightRef) for one in given):
            where += f" (after the op with {self._last_weight!r})"
        return OpError(f"{where}: {error.message}")
