"""`Ops`: what a model writes its forward pass with. It checks each op and records it.

This is the table of all ops: a new one has a file of its own, a line in `OPS` and a method here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from vllmx_core.errors import OpError
from vllmx_core.ops.activation import Act, Activation, ActKind
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.attention import Attention, AttentionSpec, AttentionWeights
from vllmx_core.ops.clip import Clip
from vllmx_core.ops.combine import Combine
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.experts import Experts, ExpertsSpec
from vllmx_core.ops.gate import Gate, GateKind
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.gated_linear import GatedLinear
from vllmx_core.ops.head import Head
from vllmx_core.ops.head_norm import HeadNorm, HeadNormSpec
from vllmx_core.ops.keep import Keep
from vllmx_core.ops.latent_attention import LatentAttention, LatentSpec, LatentWeights
from vllmx_core.ops.layer_norm import LayerNorm
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.merge import Merge, MergeKind
from vllmx_core.ops.mix import Mix
from vllmx_core.ops.op import Op, OpList, expect
from vllmx_core.ops.patches import Patches
from vllmx_core.ops.place import Place
from vllmx_core.ops.pool import Pool, PoolKind
from vllmx_core.ops.recurrence import Recurrence, RecurrenceSpec, RecurrenceWeights
from vllmx_core.ops.recv import Recv
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.route import Route, RouteSpec
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_by import ScaleBy
from vllmx_core.ops.segment_attention import SegmentAttention, SegmentSpec
from vllmx_core.ops.send import Send
from vllmx_core.ops.short_conv import ShortConv, ShortConvSpec
from vllmx_core.ops.slice import Slice
from vllmx_core.ops.values import LogitRows, Output, StepInputs, TokenIds, Value, WeightRef
from vllmx_core.ops.vocab_embedding import VocabEmbedding

OPS: tuple[type[Op], ...] = (
    Embedding, RmsNorm, AddRmsNorm, LayerNorm, HeadNorm, Linear, GatedLinear, Attention,
    LatentAttention, SegmentAttention, ShortConv, Recurrence, GatedAct, Act, Add, Scale, ScaleBy,
    Gate, Clip, Route, Experts, Head, Pool,
    Patches, Mix, Merge, Keep, Place,
    VocabEmbedding, AllReduce, Combine, AllGather, Slice, Send, Recv,
)  # fmt: skip
"""Every op of core."""
P = ParamSpec("P")
O = TypeVar("O", bound=Op)  # noqa: E741


class Ops:
    """Records the ops of one step. Letters as in `vllmx_core.plan`, E hidden, F intermediate, V
    vocabulary; x is (T, features). Ops that work row by row take what `pool` gave, too: (L,
    features) in, (L, features) out. Every method raises OpError, which names model, op, weight and
    the two numbers that disagree."""

    def __init__(self, model: str = "model") -> None:
        self._model = model
        self._ops: list[Op] = []
        self._known: set[Value] = set()
        self._last_weight: str | None = None

    def embedding(self, ids: TokenIds, w: WeightRef, offset: int = 0) -> Value:
        """(T,) -> (T, E): rows of the table, for `step.tokens`, `step.token_types`, or
        `step.positions` plus `offset`."""
        return self._record(Embedding.of, ids, w, offset).out

    def rms_norm(self, x: Value, w: WeightRef, eps: float) -> Value:
        """x / sqrt(mean(x^2) + eps) * w over the last axis."""
        return self._record(RmsNorm.of, x, w, eps).out

    def add_rms_norm(
        self, x: Value, residual: Value | None, w: WeightRef, eps: float
    ) -> tuple[Value, Value]:
        """s = x + residual (x alone when None); returns (rms_norm(s), s)."""
        if residual is None:
            return self.rms_norm(x, w, eps), x
        op = self._record(AddRmsNorm.of, x, residual, w, eps)
        return op.out, op.total

    def layer_norm(self, x: Value, w: WeightRef, bias: WeightRef | None, eps: float) -> Value:
        """(x - mean) / sqrt(var + eps) * w + bias."""
        return self._record(LayerNorm.of, x, w, bias, eps).out

    def head_norm(
        self,
        qkv: Value,
        spec: HeadNormSpec,
        q_norm: WeightRef | None = None,
        k_norm: WeightRef | None = None,
    ) -> Value:
        """(T, (H + 2K) * D) with the heads of q, k and v normed that `HeadNormSpec` tells."""
        return self._record(HeadNorm.of, qkv, spec, q_norm, k_norm).out

    def linear(self, x: Value, w: WeightRef) -> Value:
        """x @ w.T + bias."""
        return self._record(Linear.of, x, w).out

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
    ) -> Value:
        """(T, (H + 2K) * D) -> (T, H * D); see `AttentionSpec` and `AttentionWeights`."""
        weights = AttentionWeights(rope, q_norm, k_norm, sinks)
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
    ) -> Value:
        """(T, H * (Dn + Dr)), (T, C + Dr) -> (T, H * Dv); see `LatentSpec` and `LatentWeights`."""
        weights = LatentWeights(rope, norm, k_b, v_b)
        return self._record(LatentAttention.of, q, latent, spec, weights, step).out

    def short_conv(
        self,
        x: Value,
        w: WeightRef,
        spec: ShortConvSpec,
        step: StepInputs,
        *,
        bias: WeightRef | None = None,
    ) -> Value:
        """(T, C) -> (T, C): each channel over its last K tokens; see `ShortConvSpec`. `w` is a
        vector (C * K,), the K weights of each channel together."""
        return self._record(ShortConv.of, x, w, spec, step, bias).out

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

    def segment_attention(
        self, qkv: Value, spec: SegmentSpec, step: StepInputs, *, rope: WeightRef | None = None
    ) -> Value:
        """(T, (H + 2K) * D) -> (T, H * D), within each row of the step; see `SegmentSpec`."""
        return self._record(SegmentAttention.of, qkv, spec, step, rope).out

    def gated_act(self, gate_up: Value, kind: Activation) -> Value:
        """(T, 2F) -> (T, F): act(gate) * up."""
        return self._record(GatedAct.of, gate_up, kind).out

    def activation(self, x: Value, kind: ActKind) -> Value:
        """act(x)."""
        return self._record(Act.of, x, kind).out

    def add(self, x: Value, y: Value) -> Value:
        """x + y."""
        return self._record(Add.of, x, y).out

    def scale(self, x: Value, factor: float | WeightRef) -> Value:
        """x * factor; a vector (G,) has a value for each F / G neighbouring features."""
        if isinstance(factor, WeightRef):
            return self._record(ScaleBy.of, x, factor).out
        return self._record(Scale.of, x, factor).out

    def gate(self, x: Value, g: Value, kind: GateKind) -> Value:
        """x (T, F) times act(g), g (T, G): each gate is for F / G neighbouring features."""
        return self._record(Gate.of, x, g, kind).out

    def clip(
        self, x: Value, bounds: WeightRef, y: Value | None = None, z: Value | None = None
    ) -> Value:
        """x, y and z side by side (T, F), each held between two numbers of the vector `bounds`: the
        lowest and the highest of x, then those of y ..."""
        return self._record(Clip.of, x, bounds, y, z).out

    def route(
        self,
        logits: Value,
        spec: RouteSpec,
        *,
        bias: WeightRef | None = None,
        factor: WeightRef | None = None,
    ) -> tuple[Value, Value]:
        """(T, X) -> ids and weights (T, k) of the experts of each token, for `experts`: `bias` (X,)
        takes part in the choice alone, `factor` (X,) multiplies each expert's weight."""
        op = self._record(Route.of, logits, spec, bias, factor)
        return op.ids, op.slot_weights

    def experts(
        self,
        x: Value,
        ids: Value,
        weights: Value,
        gate_up: WeightRef,
        down: WeightRef,
        spec: ExpertsSpec,
    ) -> Value:
        """x (T, E) through the experts that `route` chose -> (T, E), the sum of what they say times
        their weights. gate_up: a stack of X matrices (2F, E), gate rows first, or (F, E) where the
        spec has no gate; down: a stack of X matrices (E, F)."""
        return self._record(Experts.of, x, ids, weights, gate_up, down, spec).out

    def logits(
        self, x: Value, rows: LogitRows, w: WeightRef, softcap: float | None = None
    ) -> Value:
        """Gathers `rows` of x, multiplies by the LM head: (L, V) float32; with a softcap c, each
        logit becomes c * tanh(logit / c)."""
        return self._record(Head.of, x, rows, w, softcap).out

    def pool(self, x: Value, step: StepInputs, kind: PoolKind) -> Value:
        """(T, E) -> (L, E): what a row has become in this step, by its last token, its first one
        ("cls") or the mean of all. For first and mean the step must hold the whole of each row."""
        return self._record(Pool.of, x, step.logit_rows, kind).out

    def patches(self, step: StepInputs, width: int) -> Value:
        """(T, width) of a tower: the normalised pixels of each patch."""
        return self._record(Patches.of, step, width).out

    def mix(self, step: StepInputs, w: WeightRef) -> Value:
        """(T, E) of a tower: for each patch a few weighted rows of the table, interpolated
        positions above all."""
        return self._record(Mix.of, step, w).out

    def merge(self, x: Value, count: int, kind: MergeKind = "join") -> Value:
        """(T, F) -> (L, count * F) in a tower: joins `count` neighbouring patches into one row;
        with "mean" (L, F), averages them."""
        return self._record(Merge.of, x, count, kind).out

    def place(self, x: Value, step: StepInputs, part: int = 0, *, adds: bool = False) -> Value:
        """(T, E) -> (T, E): features of images in place of the tokens that stand for them, or added
        to those."""
        return self._record(Place.of, x, step, part, adds).out

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
        for part, value in enumerate(features):
            if not isinstance(value, Value) or (value.rows, value.width) != ("L", width):
                raise OpError(f"{self._model}: the tower returned {value}, not (L, {width})")
            self._record(Keep.of, value, part)
        return OpList(tuple(self._ops), features[0], "vectors")

    def _record(self, make: Callable[P, O], *args: P.args, **kwargs: P.kwargs) -> O:
        try:
            op = make(*args, **kwargs)
            self._check(op)
        except OpError as error:
            name: str = make.__self__.name  # type: ignore[attr-defined]  # a classmethod of an Op
            raise self._located(name, args, error) from None
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
