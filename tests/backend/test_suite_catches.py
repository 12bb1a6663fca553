"""The suites themselves: each mistake that a backend or a model could make is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.ops.activation import Act
from vllmx_core.ops.add_rms_norm import AddRmsNorm
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.clip import Clip, clip
from vllmx_core.ops.experts import Experts, ExpertsSpec
from vllmx_core.ops.formulas import NumpyFrame
from vllmx_core.ops.gate import Gate, gate
from vllmx_core.ops.gated_act import GatedAct
from vllmx_core.ops.head import Head
from vllmx_core.ops.head_norm import HeadNorm
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.rms_norm import RmsNorm
from vllmx_core.ops.route import Route
from vllmx_core.ops.scale import Scale
from vllmx_core.ops.scale_by import ScaleBy, scale_by
from vllmx_core.reference import formulas as reference
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_testing.cache_group_checks import WINDOWS
from vllmx_testing.synthetic import ArraySource, Builder, tiny_decoder

from .planted import (
    BrokenLoaded,
    Change,
    Suite,
    attended,
    attention,
    broken_attention,
    broken_op,
    late,
    method,
    op_case,
    routed,
    sampler,
    scale_of_all_heads,
    ties_to_the_higher,
    unturned_codes,
    with_cache,
    with_columns,
    with_spec,
    with_tables,
    without,
)
from .planted_states import STATES_AND_VECTORS


def gone(tables: list[Any]) -> list[Any]:
    """The first page of each row is read where nothing was ever written."""
    found = [table.copy() for table in tables]
    for table in found:
        table[:, 0] = table.max() + 1
    return found


def grouped(windows: str) -> Callable[[Suite], None]:
    return method("test_cache_groups", WINDOWS[windows], 7)


ONES = np.ones_like
MISTAKES: dict[str, tuple[Change, Callable[[Suite], None]]] = {
    "window off by one": (
        with_spec(window=lambda s: s.window and s.window + 1), attention("window 5")
    ),
    "window ignored": (with_spec(window=None), attention("window 23")),
    "softcap ignored": (with_spec(softcap=None), attention("softcap")),
    "sinks ignored": (without("sinks"), attention("sinks")),
    "scale ignored": (with_spec(scale=0.25), attention("scale")),
    "norm eps ignored": (with_spec(norm_eps=1e-6), attention("qk norm eps")),
    "norm ignored": (without("k_norm"), attention("qk norm")),
    "rope ignored": (without("rope"), attention("rope")),
    "wrong pairs": (with_spec(interleaved=False), attention("rope interleaved")),
    "the block table of another row": (
        with_tables(lambda tables: [np.roll(table, 1, axis=0) for table in tables]),
        attention("multi-head"),
    ),
    "pages one place further on": (
        with_tables(lambda tables: [np.roll(table, 1, axis=1) for table in tables]),
        attention("multi-head"),
    ),
    "a page that is gone": (with_tables(gone), attention("multi-head")),
    "the block table of another group": (
        with_tables(lambda tables: tables[1:] + tables[:1]), grouped("three windows")
    ),
    "a page that fell out of the window": (
        with_spec(window=lambda s: s.window and 2 * s.window), grouped("three windows")
    ),
    "causal ignored": (with_spec(causal=False), attention("multi-head")),
    "causal always": (with_spec(causal=True), method("test_attention_both_ways")),
    **{
        f"{what} instead of {kv}": (change, method("test_attention_over_codes", kv, {}))
        for kv, what, change in (
            ("int8", "no rounding", with_cache(None)),
            ("int8", "bf16", with_cache("bf16")),
            ("int8", "fp8", with_cache("fp8")),
            ("fp8", "int8", with_cache("int8")),
            ("int8", "a scale for a token", scale_of_all_heads),
            ("q4", "no rounding", with_cache(None)),
            ("q4", "int8", with_cache("int8")),
            ("q4", "codes without rotation", unturned_codes),
            ("q8,q4", "q4", with_cache("q4")),
            ("q8,q4", "int8", with_cache("int8")),
        )
    },
    "eps ignored": (
        broken_op(RmsNorm, lambda op, frame: replace(op, eps=1e-12).compute(frame)),
        op_case("rms_norm: width 16, offset 0.0"),
    ),
    "residual forgotten": (
        broken_op(AddRmsNorm, lambda op, frame: replace(op, residual=op.x).compute(frame)),
        op_case("add_rms_norm: width 33, offset 1.0"),
    ),
    "bias ignored": (
        broken_op(Linear, lambda op, frame: frame.__setitem__(
            op.out, reference.linear(frame[op.x], frame.weight(op.w))
        )),
        op_case("linear: fused parts with some biases"),
    ),
    "gelu by tanh": (
        broken_op(Act, lambda op, frame: replace(op, kind="gelu_tanh").compute(frame)),
        op_case("activation: gelu, width 16"),
    ),
    "gate and up swapped": (
        broken_op(GatedAct, lambda op, frame: frame.__setitem__(op.out, reference.gated_act(
            np.roll(frame[op.gate_up], op.out.width, 1), op.kind
        ))),
        op_case("gated_act: silu, width 16"),
    ),
    "factor ignored": (
        broken_op(Scale, lambda op, frame: frame.__setitem__(op.out, frame[op.x])),
        op_case("scale: width 24"),
    ),
    "values of another feature": (
        broken_op(ScaleBy, lambda op, frame: frame.__setitem__(
            op.out, scale_by(frame[op.x], np.roll(frame.weight(op.w), 1))
        )),
        op_case("scale_by: 3 for 48"),
    ),
    "the bounds of another operand": (
        broken_op(Clip, lambda op, frame: frame.__setitem__(op.out, np.concatenate(
            [clip(frame[x], pair) for x, pair in zip(
                op.reads, frame.weight(op.bounds).reshape(-1, 2)[::-1], strict=True
            )], axis=-1
        ))),
        op_case("clip: 48 and 16 and 8"),
    ),
    "one norm for each head": (
        broken_op(HeadNorm, lambda op, frame: replace(
            op, spec=replace(op.spec, across=False)
        ).compute(frame)),
        op_case("head_norm: rms across, 4/2"),
    ),
    "values are not normed": (
        broken_op(HeadNorm, lambda op, frame: frame.__setitem__(op.out, frame[op.qkv])),
        op_case("head_norm: values alone"),
    ),
    "a head has the gate of another": (
        broken_op(Gate, lambda op, frame: frame.__setitem__(
            op.out, gate(frame[op.x], np.roll(frame[op.g], 1, axis=1), op.kind)
        )),
        op_case("gate: sigmoid, 2 for 96"),
    ),
    "a gate of another kind": (
        broken_op(Gate, lambda op, frame: replace(op, kind="relu").compute(frame)),
        op_case("gate: relu2, 3 for 48"),
    ),
    "the bias weighs": (
        routed(lambda op, frame, ids, weights: (ids, weights + frame.weight(op.bias)[ids])),
        op_case("route: softmax, 6 of 48, bias"),
    ),
    "ties go to the higher expert": (
        broken_op(Route, ties_to_the_higher), op_case("route: ties, softmax, 1 groups")
    ),
    "groups ignored": (
        broken_op(
            Route, lambda op, frame: replace(op, spec=replace(op.spec, groups=1)).compute(frame)
        ),
        op_case("route: softmax, 3 of 24, 2 of 4 groups"),
    ),
    "experts that sum otherwise": (
        routed(lambda op, frame, ids, weights: (ids, weights[:, ::-1])),
        op_case("experts: 33 by 17, 3 of 5, silu"),
    ),
    "the clamp ignored": (
        broken_op(Experts, lambda op, frame: replace(op, spec=ExpertsSpec()).compute(frame)),
        op_case("experts: 24 by 20, 2 of 4, silu, clamp 7.0, biased"),
    ),
    "softcap of the head ignored": (
        broken_op(Head, lambda op, frame: replace(op, softcap=None).compute(frame)),
        op_case("logits: softcap 2.5, tied"),
    ),
    "temperature ignored": (
        with_columns(temperature=lambda t: np.where(t > 0, ONES(t), t)), sampler("temperature")
    ),
    "top_k ignored": (with_columns(top_k=np.zeros_like), sampler("top_k")),
    "top_p ignored": (with_columns(top_p=np.ones_like), sampler("top_p")),
    "min_p ignored": (with_columns(min_p=np.zeros_like), sampler("min_p")),
    "position ignored": (with_columns(position=np.zeros_like), sampler("temperature")),
    "seed's upper half ignored": (
        with_columns(seed=lambda s: s & np.uint64(0xFFFFFFFF)), sampler("temperature")
    ),
    "edits ignored": (with_columns(edits=None), method("test_edits", 0.8)),
    "masks ignored": (with_columns(masks=None), method("test_masks", 0.0)),
    "counts ignored": (
        with_columns(counts=None), method("test_penalties", 0.0, {"repetition_penalty": 1.7})
    ),
    "pending ignored": (
        with_columns(counts=lambda c: c and replace(c, pending=np.zeros_like(c.pending))),
        method("test_penalties", 0.0, {"repetition_penalty": 1.7}),
    ),
    "masks that come late ignored": (
        late(masks=None, mask_index=None),
        method("test_a_step_is_sampled_when_the_one_before_was_read"),
    ),
    "parameters that come late ignored": (
        late(counts=None), method("test_halves_of_a_step_are_the_step", False)
    ),
    "ids that come late forgotten": (
        late(last_ids=np.zeros_like), method("test_halves_and_whole_steps_take_turns")
    ),
    "targets ignored": (
        with_columns(target=lambda t: np.full_like(t, -1)), method("test_targets_are_scored")
    ),
    **STATES_AND_VECTORS,
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_backend_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, test = MISTAKES[mistake]
    test(Suite())
    change(monkeypatch)
    with pytest.raises(AssertionError):
        test(Suite())


def test_references_that_are_not_resolved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    test = method("test_references_to_the_step_before")
    test(Suite())
    monkeypatch.setattr(BrokenLoaded, "resolve", lambda self, tokens: np.maximum(tokens, 0))
    with pytest.raises(AssertionError):
        test(Suite())


def test_stale_pages_that_leak_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys beyond the context, masked by a zero weight: 0 * NaN."""
    test = method("test_what_a_page_held_before_does_not_leak")
    test(Suite())

    def leaky(op: Attention, frame: NumpyFrame) -> Any:
        out, pages, plan = attended(op, frame), frame.pages[op.spec.layer], frame.plan
        page = pages.v.shape[1]
        for row in range(plan.num_rows):
            length = int(plan.context_len[row])
            last = pages.v[plan.block_tables[0][row, (length - 1) // page]]
            end = plan.query_start[row + 1]
            out[plan.query_start[row] : end] += 0 * last.sum()
        return out

    broken_attention(leaky)(monkeypatch)
    with pytest.raises(AssertionError):
        test(Suite())


def test_the_numpy_backend_refuses_what_it_cannot_compute() -> None:
    builder = Builder(19)
    model = tiny_decoder(builder)
    refusals = {
        "choose f32, f64": LoadOptions(dtype="bf16"),
        "'int3': choose auto, bf16.*int8": LoadOptions(kv_cache_dtype="int3"),
    }
    for message, options in refusals.items():
        with pytest.raises(ConfigError, match=message):
            ReferenceBackend().load(model, ArraySource(builder.arrays), options)
