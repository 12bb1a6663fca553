"""Cuts of features, and what a pass over a step refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from vllmx_core.errors import ConfigError, OpError
from vllmx_core.ops.op import Op
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.values import StepInputs, Value, WeightRef
from vllmx_core.recorded.recording import record
from vllmx_core.sharding.model import sharded
from vllmx_core.sharding.shares import Share, Units, divided
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel, tiny_decoder

SHARDS = {"qkv": "column", "gate_up": "column", "out": "row", "down": "row", "head": "vocab"}


def marked(model: SyntheticModel) -> SyntheticModel:
    """The model with what its map says of sharding."""
    kinds = SHARDS | {"embed": "vocab"}
    specs = (replace(s, shard=kinds.get(s.name.split(".")[-1], "none")) for s in model.specs)  # type: ignore[arg-type]
    return replace(model, specs=tuple(specs))


@pytest.mark.parametrize(
    ("whole", "units", "ranks", "expected"),
    [
        (12, Units(), 2, [(0, 6), (6, 12)]),
        (12, Units(4), 2, [(0, 4), (4, 12)]),
        (10, Units(4), 2, [(0, 4), (4, 10)]),  # the last block is shorter
        (12, Units(2, 2), 4, [(0, 2), (2, 6), (6, 8), (8, 12)]),
    ],
)
def test_parts_are_contiguous_and_as_equal_as_units_allow(
    whole: int, units: Units, ranks: int, expected: list[tuple[int, int]]
) -> None:
    assert divided(whole, units, ranks, "x") == tuple(expected)


@pytest.mark.parametrize(
    ("units", "ranks", "message"),
    [
        (Units(6), 3, "x: 12 features in units of 6 are for at most 2 ranks"),
        (Units(1, 4), 6, "x: 4 sections are not for 6 ranks alike"),
        (Units(4, 2), 2, "x: 12 features in units of 4"),
    ],
)
def test_what_cannot_be_divided(units: Units, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        divided(12, units, ranks, "x")


def test_shares() -> None:
    share = Share(8, ((2, 4),))
    assert share.repeated(2) == Share(16, ((2, 4), (10, 12)))
    assert share.grouped(2) == Share(4, ((1, 2),))
    assert Share(16, ((2, 4), (9, 12))).between(3, 10) == Share(7, ((0, 1), (6, 7)))


def test_the_step_of_a_rank() -> None:
    """The ops of the whole model with a rank's widths, and a collective behind each sum."""
    builder = Builder(20)
    model = marked(tiny_decoder(builder))
    source = ArraySource(builder.arrays)
    whole = [op.name for op in record(model, 64).steps.ops]
    ops = record(sharded(model, source, 64, 1, 2), 64).steps.ops
    rest = [op for op in ops if not op.name.startswith("all_")]
    assert [op.name.removeprefix("vocab_") for op in rest] == whole
    behind = {before.name for before, op in pairwise(ops) if op.name[:4] == "all_"}
    assert behind == {"vocab_embedding", "linear", "logits"}
    widths = {op.name: op.writes[0].width for op in ops}
    assert widths["attention"] == 16
    assert widths["gated_act"] == 20
    assert widths["all_reduce"] == 32
    assert widths["all_gather"] == 20


def test_one_rank_is_the_model_itself() -> None:
    builder = Builder(20)
    model = marked(tiny_decoder(builder))
    one = sharded(model, ArraySource(builder.arrays), 64, 0, 1)
    assert [s.rows for s in one.weights()] == [s.rows for s in model.weights()]


def tapped(ops: Ops, w: Mapping[str, WeightRef], step: StepInputs) -> Value:
    """An op that normalises what each rank has a part of."""
    x = ops.embedding(step.tokens, w["embed"])
    inner = ops.activation(ops.linear(x, w["gate_up"]), "silu")
    out = ops.linear(inner, w["down"])
    return ops.logits(
        ops.add(out, ops.rms_norm(inner, w["norm"], 1e-6)), step.logit_rows, w["head"]
    )


def test_a_value_that_is_cut_where_an_op_needs_it_whole() -> None:
    builder = Builder(20)
    builder.embedding("embed", 16).linear("gate_up", 16, 16).linear("down", 16, 16)
    builder.vector("norm", 16).linear("head", 20, 16)
    model = marked(builder.build(16, tapped))
    with pytest.raises(OpError, match=r"'rms_norm' .*'norm'.* needs the result of 'activation'"):
        sharded(model, ArraySource(builder.arrays), 64, 0, 2)


def test_sizes_that_fit_are_named() -> None:
    builder = Builder(20)
    model = marked(tiny_decoder(builder))
    with pytest.raises(ConfigError, match=r"2 kv heads .* 3 ranks.*size 1 or 2 or 4$") as raised:
        sharded(model, ArraySource(builder.arrays), 64, 0, 3)
    assert raised.value.param == "tensor_parallel_size"


def test_rows_that_are_too_wide_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a rank go into a buffer of one size whole; of four ranks they fit."""
    monkeypatch.setattr("vllmx_core.sharding.model.MOST_ROW_WIDTH", 5)
    builder = Builder(20)
    model = marked(tiny_decoder(builder))
    with pytest.raises(ConfigError, match=r"a row of 10 numbers .* 5 of a call.*size 1 or 4"):
        sharded(model, ArraySource(builder.arrays), 64, 0, 2)


def test_ops_without_weights_to_cut_stay() -> None:
    """A map that says nothing of sharding is computed whole by every rank."""
    builder = Builder(20)
    marks = tiny_decoder(builder)
    model = replace(marks, specs=tuple(replace(spec, shard="none") for spec in marks.specs))
    mine = record(sharded(model, ArraySource(builder.arrays), 64, 0, 2), 64).steps.ops

    def facts(ops: tuple[Op, ...]) -> list[tuple[str, int]]:
        return [(op.name, op.writes[0].width) for op in ops]

    assert facts(mine) == facts(record(model, 64).steps.ops)
