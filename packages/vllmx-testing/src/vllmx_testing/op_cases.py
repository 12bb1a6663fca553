"""Cases of the ops: the smallest models that show what each op does, run by `OpChecks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vllmx_core.ops.activation import ACT_KINDS, Act, Activation, ActKind
from vllmx_core.ops.activation import KINDS as ACTIVATIONS
from vllmx_core.ops.add import Add
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.clip import Clip
from vllmx_core.ops.embedding import Embedding
from vllmx_core.ops.gate import KINDS as GATES
from vllmx_core.ops.gate import Gate, GateKind
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.head import Head
from vllmx_core.ops.head_norm import HeadNorm, HeadNormSpec
from vllmx_core.ops.layer_norm import LayerNorm
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.match_rms import MatchRms
from vllmx_core.ops.pool import KINDS as POOLS
from vllmx_core.ops.pool import Pool, PoolKind
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.resize import Resize
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_at import ScaleAt
from vllmx_core.ops.scale_by import ScaleBy
from vllmx_core.ops.segment_attention import SegmentAttention, SegmentSpec
from vllmx_core.ops.sparsify import Sparsify
from vllmx_core.ops.spread import Spread
from vllmx_core.ops.values import StepInputs, Value

from vllmx_testing.op_case import Case, Pooling, Weights, cases_of
from vllmx_testing.synthetic import Builder


@cases_of(Act)
def _activation_cases() -> Iterator[Case]:
    return (_activation_case(kind, width) for kind in ACT_KINDS for width in (16, 33))


def _activation_case(kind: ActKind, width: int) -> Case:
    """Far into both tails."""
    return Case.between(
        f"{kind}, width {width}", width, lambda ops, w, x: ops.activation(ops.scale(x, 4.0), kind)
    )


@cases_of(Add)
def _add_cases() -> Iterator[Case]:
    yield Case.between(
        "both inputs are kept", 24, _add_inputs_kept, lambda b: b.linear("square", 24, 24)
    )


def _add_inputs_kept(ops: Ops, w: Weights, x: Value) -> Value:
    y = ops.linear(x, w["square"])
    total = ops.add(x, y)
    return ops.add(ops.scale(total, -0.75), ops.add(y, ops.scale(x, 0.5)))


@cases_of(AddRmsNorm)
def _add_rms_norm_cases() -> Iterator[Case]:
    return (_add_rms_norm_case(width, offset) for width in (16, 33, 130) for offset in (0.0, 1.0))


def _add_rms_norm_case(width: int, offset: float) -> Case:
    return Case.between(
        f"width {width}, offset {offset}",
        width,
        _add_rms_norm_both_results,
        lambda b: [b.vector(name, width, offset) for name in "abc"],
    )


def _add_rms_norm_both_results(ops: Ops, w: Weights, x: Value) -> Value:
    first, total = ops.add_rms_norm(ops.rms_norm(x, w["a"], 0.3), None, w["b"], 0.1)
    second, total = ops.add_rms_norm(first, total, w["c"], 1e-6)
    return ops.add(second, total)


@cases_of(Clip)
def _clip_cases() -> Iterator[Case]:
    for widths in ((33,), (130, 24), (48, 16, 8), (80, 3, 61)):
        yield _clip_case(widths)


def _clip_case(widths: tuple[int, ...]) -> Case:
    """The operands are made of one by matrices, and a matrix makes one row of the result."""

    def build(b: Builder) -> None:
        for index, width in enumerate(widths):
            b.linear(f"in{index}", width, 16)
        b.linear("back", 16, sum(widths))
        b.vector("bounds", 2 * len(widths), centre=0.0, spread=0.7)
        b.arrays["bounds.weight"].reshape(-1, 2).sort(axis=1)

    def middle(ops: Ops, w: Weights, x: Value) -> Value:
        first, *others = [ops.linear(x, w[f"in{index}"]) for index in range(len(widths))]
        return ops.linear(ops.clip(first, w["bounds"], *others), w["back"])

    return Case.between(" and ".join(map(str, widths)), 16, middle, build)


@cases_of(Embedding)
def _embedding_cases() -> Iterator[Case]:
    yield Case("positions, from the third row on", _embedding_tables, _embedding_positions)
    yield Case("token types", _embedding_tables, _embedding_token_types)
    yield Case("token types of which there is one", _embedding_one_type, _embedding_token_types)


def _embedding_one_type(builder: Builder) -> None:
    _embedding_tables(builder, types=1)


def _embedding_tables(builder: Builder, types: int = 2) -> None:
    builder.embedding("embed", 24)
    builder.embedding("places", 24, rows=128)
    builder.embedding("types", 24, rows=types)
    builder.linear("head", builder.vocab_size, 24)


def _embedding_positions(ops: Ops, w: Weights, step: StepInputs) -> Value:
    x = ops.add(
        ops.embedding(step.tokens, w["embed"]), ops.embedding(step.positions, w["places"], 2)
    )
    return ops.logits(x, step.logit_rows, w["head"])


def _embedding_token_types(ops: Ops, w: Weights, step: StepInputs) -> Value:
    x = ops.add(ops.embedding(step.tokens, w["embed"]), ops.embedding(step.token_types, w["types"]))
    return ops.logits(x, step.logit_rows, w["head"])


@cases_of(Gate)
def _gate_cases() -> Iterator[Case]:
    yield from (_gate_case(33, 33, kind) for kind in GATES)
    yield from (_gate_case(48, 3, kind) for kind in GATES)
    for width, gates in ((96, 2), (130, 130), (64, 32), (80, 20), (33, 1), (1, 1), (20, 4)):
        yield _gate_case(width, gates, "sigmoid")


def _gate_case(width: int, gates: int, kind: GateKind) -> Case:
    return Case.between(
        f"{kind}, {gates} for {width}",
        width,
        lambda ops, w, x: ops.gate(x, ops.linear(ops.scale(x, 4.0), w["g"]), kind),
        lambda b: b.linear("g", gates, width),
    )


@cases_of(GatedAct)
def _gated_act_cases() -> Iterator[Case]:
    yield from (_gated_act_case(kind, width) for kind in ACTIVATIONS for width in (16, 33))
    yield _gated_act_case("silu", 33, 0.7)


def _gated_act_case(kind: Activation, width: int, limit: float | None = None) -> Case:
    return Case.between(
        f"{kind}, width {width}{'' if limit is None else f', limit {limit}'}",
        width,
        lambda ops, w, x: ops.gated_act(ops.linear(ops.scale(x, 4.0), w["gate_up"]), kind, limit),
        lambda b: b.linear("gate_up", (width, width), width),
    )


@cases_of(Head)
def _head_cases() -> Iterator[Case]:
    return (_head_case(softcap, tied) for softcap in (None, 2.5) for tied in (False, True))


def _head_case(softcap: float | None, tied: bool) -> Case:
    def build(builder: Builder) -> None:
        builder.embedding("embed", 24)
        if tied:
            builder.tied("head", "embed", 24)
        else:
            builder.linear("head", builder.vocab_size, 24, biases=[0])

    def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
        x = ops.embedding(step.tokens, w["embed"])
        return ops.logits(x, step.logit_rows, w["head"], softcap)

    return Case(f"softcap {softcap}, {'tied' if tied else 'biased'}", build, body)


@cases_of(HeadNorm)
def _head_norm_cases() -> Iterator[Case]:
    for heads, kv_heads, size in ((4, 2, 20), (3, 3, 16), (2, 1, 64)):
        alone = HeadNormSpec(heads, kv_heads, size, 0.1)
        yield _head_norm_case(f"rms, {heads}/{kv_heads}", alone)
        yield _head_norm_case(f"rms across, {heads}/{kv_heads}", replace(alone, across=True))
        yield _head_norm_case(f"layer, {heads}/{kv_heads}", replace(alone, kind="layer"))
    spec = HeadNormSpec(4, 2, 20, 1e-6, values=True)
    yield _head_norm_case("values alone", spec, q=False, k=False)
    yield _head_norm_case("keys and values", spec, q=False)
    for heads, size in ((6, 12), (2, 96)):
        yield _head_norm_case(f"{heads} runs of {size}", HeadNormSpec(heads, 0, size, 0.1), k=False)


def _head_norm_case(name: str, spec: HeadNormSpec, *, q: bool = True, k: bool = True) -> Case:
    return Case.between(
        name,
        spec.width,
        lambda ops, w, x: ops.head_norm(
            ops.scale(x, 3.0), spec, w["q"] if q else None, w["k"] if k else None
        ),
        lambda b: b.vector("q", spec.num_heads * spec.head_size).vector(
            "k", max(1, spec.num_kv_heads) * spec.head_size
        ),
    )


@cases_of(LayerNorm)
def _layer_norm_cases() -> Iterator[Case]:
    return (_layer_norm_case(width, biased) for width in (16, 33) for biased in (False, True))


def _layer_norm_case(width: int, biased: bool) -> Case:
    return Case.between(
        f"width {width}, {'biased' if biased else 'plain'}",
        width,
        lambda ops, w, x: ops.layer_norm(x, w["weight"], w["bias"] if biased else None, 0.2),
        lambda b: b.vector("weight", width).vector("bias", width, centre=0.5),
    )


@cases_of(Linear)
def _linear_cases() -> Iterator[Case]:
    for inner, outer in ((16, 32), (48, 80), (33, 17), (1, 7), (130, 259)):
        yield _linear_case(f"{inner} to {outer}, plain", inner, (outer,), ())
        yield _linear_case(f"{inner} to {outer}, biased", inner, (outer,), (0,))
    yield _linear_case("fused parts with some biases", 20, (24, 9, 3), (0, 2))


def _linear_case(name: str, inner: int, parts: Sequence[int], biases: Sequence[int]) -> Case:
    return Case.between(
        name,
        inner,
        lambda ops, w, x: ops.linear(ops.linear(x, w["up"]), w["down"]),
        lambda b: b.linear("up", parts, inner, biases).linear("down", inner, sum(parts)),
    )


@cases_of(Pool)
def _pool_cases() -> Iterator[Case]:
    for kind in POOLS:
        yield Case.pooled(f"{kind}, width 33", 33, _pool_alone(kind))
    yield Case.pooled("rows through a dense layer", 24, _pool_dense, _pool_dense_weights, 3)
    yield Case.pooled("sums, gates and norms of rows", 24, _pool_row_wise, _pool_row_weights)


def _pool_alone(kind: PoolKind) -> Pooling:
    return lambda ops, w, x, step: ops.pool(x, step, kind)


def _pool_dense(ops: Ops, w: Weights, x: Value, step: StepInputs) -> Value:
    x = ops.activation(ops.linear(ops.pool(x, step, "cls"), w["dense"]), "gelu")
    return ops.linear(x, w["classes"])


def _pool_dense_weights(builder: Builder) -> None:
    builder.linear("dense", 24, 24, biases=[0]).linear("classes", 3, 24, biases=[0])


def _pool_row_wise(ops: Ops, w: Weights, x: Value, step: StepInputs) -> Value:
    mean, last = ops.pool(x, step, "mean"), ops.pool(ops.scale(x, 0.5), step, "last")
    x = ops.layer_norm(ops.add(mean, last), w["norm"], w["bias"], 1e-5)
    x, total = ops.add_rms_norm(ops.gate(x, last, "tanh"), mean, w["norm"], 1e-6)
    x = ops.gated_act(ops.linear(ops.scale(x, w["bias"]), w["gate_up"]), "silu")
    return ops.rms_norm(ops.add(x, total), w["norm"], 1e-6)


def _pool_row_weights(builder: Builder) -> None:
    builder.vector("norm", 24).vector("bias", 24, centre=0.5)
    builder.linear("gate_up", (24, 24), 24)


@cases_of(RmsNorm)
def _rms_norm_cases() -> Iterator[Case]:
    return (_rms_norm_case(width, offset) for width in (16, 33, 130) for offset in (0.0, 1.0))


def _rms_norm_case(width: int, offset: float) -> Case:
    return Case.between(
        f"width {width}, offset {offset}",
        width,
        lambda ops, w, x: ops.rms_norm(ops.rms_norm(x, w["a"], 1e-6), w["b"], 0.3),
        lambda b: b.vector("a", width, offset).vector("b", width, offset),
    )


@cases_of(Scale)
def _scale_cases() -> Iterator[Case]:
    yield Case.between("width 24", 24, lambda ops, w, x: ops.scale(x, -0.75))


@cases_of(ScaleAt)
def _scale_at_cases() -> Iterator[Case]:
    return (_scale_at_case(width, some) for width, some in ((33, 33), (80, 48), (37, 20), (1, 1)))


def _scale_at_case(width: int, some: int) -> Case:
    def build(b: Builder) -> None:
        b.tables["s"] = 1 + b.random.random(2048, dtype="f4")
        b.embedding("embed", width)
        b.linear("head", b.vocab_size, width)

    def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
        x = ops.scale_at(ops.embedding(step.tokens, w["embed"]), w["s"], some, step)
        return ops.logits(x, step.logit_rows, w["head"])

    return Case(f"{some} of {width}", build, body)


@cases_of(ScaleBy)
def _scale_by_cases() -> Iterator[Case]:
    sizes = ((33, 33), (130, 130), (48, 3), (33, 1), (1, 1), (80, 20), (64, 32))
    return (_scale_by_case(width, values) for width, values in sizes)


def _scale_by_case(width: int, values: int) -> Case:
    return Case.between(
        f"{values} for {width}",
        width,
        lambda ops, w, x: ops.scale(x, w["s"]),
        lambda b: b.vector("s", values),
    )


@cases_of(MatchRms)
def _match_rms_cases() -> Iterator[Case]:
    for width in (33, 130):
        yield Case.between(
            f"width {width}", width, lambda ops, w, x: ops.match_rms(x, ops.activation(x, "gelu"))
        )


@cases_of(Sparsify)
def _sparsify_cases() -> Iterator[Case]:
    for width, deviations in ((33, 0.5), (130, 1.6), (48, -0.3)):
        yield _sparsify_case(width, deviations)


def _sparsify_case(width: int, deviations: float) -> Case:
    name = f"{deviations} of {width}"
    return Case.between(name, width, lambda ops, w, x: ops.sparsify(x, deviations))


@cases_of(Resize)
def _resize_cases() -> Iterator[Case]:
    sizes = ((40, 8, 12, 16), (40, 8, 5, 0), (33, 3, 10, 3), (24, 24, 1, 0), (48, 16, 40, 16))
    return (_resize_case(*one) for one in sizes)


def _resize_case(width: int, size: int, resized: int, kept: int) -> Case:
    out = kept + (width - kept) // size * resized

    def build(b: Builder) -> None:
        b.embedding("embed", width)
        b.linear("head", b.vocab_size, out)

    def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
        x = ops.resize(ops.embedding(step.tokens, w["embed"]), size, resized, kept)
        return ops.logits(x, step.logit_rows, w["head"])

    return Case(f"{size} to {resized} behind {kept} of {width}", build, body)


@cases_of(SegmentAttention)
def _segment_attention_cases() -> Iterator[Case]:
    yield _segment_attention_case("four heads", SegmentSpec(4, 4, 8, 8**-0.5))
    yield _segment_attention_case("grouped heads, halves rotated", SegmentSpec(4, 2, 16, 0.25, 16))
    yield _segment_attention_case(
        "one kv head, pairs rotated", SegmentSpec(6, 1, 12, 0.3, 8, interleaved=True)
    )
    yield _segment_attention_case("a window", SegmentSpec(2, 2, 64, 0.125, 64, window=3))
    yield _segment_attention_case(
        "a window of the token alone", SegmentSpec(2, 1, 20, 1.0, window=1)
    )
    yield _segment_attention_case("a bias", SegmentSpec(4, 2, 16, 0.25, 16), biased=True)
    yield _segment_attention_case(
        "a bias and a window", SegmentSpec(3, 3, 24, 0.2, window=20), biased=True
    )


def _segment_attention_case(name: str, spec: SegmentSpec, *, biased: bool = False) -> Case:
    width, inner = 24, spec.num_heads * spec.head_size
    parts = (inner, spec.num_kv_heads * spec.head_size, spec.num_kv_heads * spec.head_size)

    def build(builder: Builder) -> None:
        builder.embedding("embed", width)
        builder.linear("qkv", parts, width)
        if spec.rotary_dim:
            builder.rope("rope", spec.rotary_dim)
        if biased:
            builder.vector("bias", (2 * 200 - 1) * spec.num_heads, centre=0.0, spread=1.0)
        builder.linear("head", builder.vocab_size, inner)

    def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
        qkv = ops.linear(ops.embedding(step.tokens, w["embed"]), w["qkv"])
        x = ops.segment_attention(qkv, spec, step, rope=w.get("rope"), bias=w.get("bias"))
        return ops.logits(x, step.logit_rows, w["head"])

    return Case(name, build, body)


@cases_of(Spread)
def _spread_cases() -> Iterator[Case]:
    return (_spread_case(count) for count in (1, 4, 6))


def _spread_case(count: int) -> Case:
    """A head for every third id from the second on, in falling order."""

    def build(b: Builder) -> None:
        b.embedding("embed", 24).linear("head", count, 24).vector("sources", b.vocab_size)
        sources = b.arrays["sources.weight"]
        sources[:] = -1
        sources[1 : 1 + 3 * count : 3] = range(count - 1, -1, -1)

    def body(ops: Ops, w: Weights, step: StepInputs) -> Value:
        x = ops.embedding(step.tokens, w["embed"])
        return ops.spread(ops.logits(x, step.logit_rows, w["head"]), w["sources"])

    return Case(f"{count} ids", build, body)
