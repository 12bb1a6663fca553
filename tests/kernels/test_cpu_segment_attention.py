"""Attention within segments on the CPU: long rows, each type and instruction set, and bits that do
not depend on the rows beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.plan import F32, StepPlan
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_cpu.backend import CpuBackend
from vllmx_cpu.native import ISA_VARIABLE, instruction_sets
from vllmx_testing.harness import all_logprobs, log_softmax
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

VOCAB, WIDTH, LONGEST = 19, 48, 320
LENGTHS = (300, 5, 1, 64, 33, 16)
"""More than a partition of 256, whole pages, and rows that share none with their neighbours."""
SPECS = {
    "grouped, rotated": SegmentSpec(4, 2, 64, 0.125, 32),
    "a window": SegmentSpec(2, 2, 32, 0.2, 32, interleaved=True, window=40),
    "head size 20": SegmentSpec(3, 3, 20, 0.25),
    "head size 72, two axes": SegmentSpec(2, 2, 72, 0.12, 72, rope_axes=(0,) * 18 + (1,) * 18),
    "a bias": SegmentSpec(4, 2, 32, 0.2, 32),
    "a bias, a window": SegmentSpec(3, 3, 20, 0.25, window=40),
}
BIAS_LENGTH = 305
"""No multiple of the groups that the kernel reads."""
LIMITS = {"f32": 2e-5, "f16": 2e-2, "bf16": 2e-1}


@pytest.fixture(params=[isa.name for isa in instruction_sets() if isa.supported])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, request.param)


def model(name: str) -> tuple[SyntheticModel, ArraySource]:
    spec = SPECS[name]
    builder = Builder(VOCAB)
    inner, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    builder.embedding("embed", WIDTH)
    builder.linear("qkv", (inner, kv, kv), WIDTH)
    builder.rope("rope", spec.rotary_dim or 2)
    if "bias" in name:
        numbers = (2 * BIAS_LENGTH - 1) * spec.num_heads
        builder.vector("bias", numbers, centre=0.0, spread=1.0)
    builder.linear("head", VOCAB, inner)

    def body(ops: Any, w: Any, step: Any) -> Any:
        qkv = ops.linear(ops.embedding(step.tokens, w["embed"]), w["qkv"])
        rope = w["rope"] if spec.rotary_dim else None
        x = ops.segment_attention(qkv, spec, step, rope=rope, bias=w.get("bias"))
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(WIDTH, body), ArraySource(builder.arrays)


def rows(lengths: tuple[int, ...]) -> list[Row]:
    random = np.random.default_rng(3)
    texts = [random.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    pages = np.arange(len(LENGTHS) * LONGEST // 16).reshape(len(LENGTHS), -1).tolist()
    of = dict(zip(LENGTHS, zip(texts, pages, strict=True), strict=True))
    return [Row(of[length][0], 0, of[length][1], "all") for length in lengths]


def plan(lengths: tuple[int, ...]) -> StepPlan:
    """Tokens turned by row and column of a square, where a rotation has axes."""
    made = make_plan(rows(lengths), 16)
    return replace(made, rope_positions=np.stack([made.positions // 18, made.positions % 18]))


def options(dtype: str) -> LoadOptions:
    return LoadOptions(
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_num_batched_tokens=sum(LENGTHS),
        block_size=16,
        num_kv_blocks=200,
        num_threads=2,
    )


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_rows_are_as_the_formula_says_and_alone_as_together(name: str, dtype: str) -> None:
    made, source = model(name)
    oracle = ReferenceBackend().load(made, source, options("f64"))
    expected = log_softmax(oracle.logits(plan(LENGTHS)))
    loaded = CpuBackend().load(made, source, options(dtype))
    try:
        found = all_logprobs(loaded, plan(LENGTHS), VOCAB)
        np.testing.assert_allclose(found, expected, rtol=0, atol=LIMITS[dtype])
        parts = np.split(found, np.cumsum(LENGTHS)[:-1])
        for length, together in zip(LENGTHS, parts, strict=True):
            alone: F32 = all_logprobs(loaded, plan((length,)), VOCAB)
            np.testing.assert_array_equal(alone, together)
        backwards = all_logprobs(loaded, plan(LENGTHS[::-1]), VOCAB)
        np.testing.assert_array_equal(backwards, np.concatenate(parts[::-1]))
    finally:
        loaded.close()
