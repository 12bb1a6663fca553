"""Recurrent layers over their slots: their options, chunks, states that are kept, handed on and
begun anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.cache.state_capacity import SPARE_SLOTS
from vllmx_core.errors import CapacityError, UnsupportedOpError
from vllmx_core.model import (
    Array,
    Ops,
    RecurrenceSpec,
    ShortConvSpec,
    StepInputs,
    Weight,
)
from vllmx_core.plan import F32

from vllmx_testing.harness import PAGE, VOCAB, Harness, all_logprobs, mixed_steps, with_nan
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

DELTA: dict[str, Any] = {"rule": "delta", "scale": 8**-0.5}
SSD: dict[str, Any] = {"rule": "ssd", "num_key_heads": 3, "scale": 0.25}
RULES: dict[str, dict[str, Any]] = {
    "delta": DELTA,
    "delta, tiled": DELTA | {"tiled": True},
    "delta, a decay a channel": DELTA | {"decay": "channel", "num_key_heads": 6},
    "delta, shared keys, a decay a channel": DELTA | {"decay": "channel"},
    "delta, odd sizes": DELTA
    | {
        "num_heads": 3,
        "num_key_heads": 1,
        "key_size": 5,
        "value_size": 9,
    },
    "delta, norm eps": DELTA | {"norm_eps": 0.5},
    "delta, as released": DELTA | {"num_heads": 2, "key_size": 128, "value_size": 128},
    "ssd": SSD,
    "ssd, one group": SSD | {"num_key_heads": 1},
    "ssd, a decay a channel": SSD | {"decay": "channel"},
    "ssd, Mamba 1": SSD
    | {
        "num_heads": 13,
        "num_key_heads": 1,
        "key_size": 17,
        "value_size": 1,
        "decay": "channel",
    },
    "delta, twice the strength": DELTA | {"beta": 2.0},
    "ssd, limits": SSD | {"dt_min": 0.3, "dt_max": 0.6},
    "ssd, as released": SSD
    | {
        "num_heads": 4,
        "num_key_heads": 2,
        "key_size": 128,
        "value_size": 64,
        "scale": 0.01,
    },
}
CONVS: dict[str, dict[str, Any]] = {
    "plain": {},
    "silu": {"activation": "silu"},
    "kernel of 2": {"kernel": 2},
    "kernel of 3, biased": {"kernel": 3, "biased": True},
    "silu, biased, wide": {"activation": "silu", "biased": True, "channels": 133},
}
HIDDEN = 24


def conv_model(
    channels: int = 24, kernel: int = 4, biased: bool = False, activation: Any = None
) -> tuple[SyntheticModel, ArraySource]:
    """Two convolutions, so that a wrong tap of the first is seen in the second; no KV cache."""
    builder = Builder(VOCAB)
    specs = [
        ShortConvSpec(builder.state(1, kernel - 1, channels), kernel, activation) for _ in range(2)
    ]
    builder.embedding("embed", channels)
    for layer in range(2):
        builder.vector(f"{layer}.taps", channels * kernel, centre=0.3, spread=0.5)
        builder.vector(f"{layer}.bias", channels, centre=0.1)
    builder.linear("head", VOCAB, channels)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        for layer, spec in enumerate(specs):
            bias = w[f"{layer}.bias"] if biased else None
            x = ops.short_conv(x, w[f"{layer}.taps"], spec, step, bias=bias)
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(channels, body), ArraySource(builder.arrays)


def recurrent_model(seed: int = 0, **features: Any) -> tuple[SyntheticModel, ArraySource]:
    """Two layers of a convolution and a recurrence behind it, decays between 0.3 and 0.95."""
    values: dict[str, Any] = {
        "num_heads": 6,
        "num_key_heads": 2,
        "key_size": 8,
        "value_size": 10,
        "rule": "delta",
    } | features
    builder = Builder(VOCAB, seed)
    builder.embedding("embed", HIDDEN)
    layers = [_recurrent_layer(builder, layer, values) for layer in range(2)]
    builder.linear("head", VOCAB, HIDDEN)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        for layer, (conv, spec) in enumerate(layers):
            qkv = ops.linear(x, w[f"{layer}.qkv"])
            qkv = ops.short_conv(qkv, w[f"{layer}.taps"], conv, step)
            delta = spec.rule == "delta"
            y = ops.recurrence(
                qkv,
                ops.linear(x, w[f"{layer}.a"]),
                ops.linear(x, w[f"{layer}.b"]) if delta else None,
                spec,
                step,
                a_log=w[f"{layer}.a_log"],
                dt_bias=w[f"{layer}.dt_bias"],
                d=None if delta else w[f"{layer}.d"],
            )
            x = ops.add(x, ops.linear(y, w[f"{layer}.out"]))
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(HIDDEN, body), ArraySource(builder.arrays)


def _recurrent_layer(
    builder: Builder, layer: int, values: dict[str, Any]
) -> tuple[ShortConvSpec, RecurrenceSpec]:
    first = len(builder.states)
    spec = RecurrenceSpec(first + 1, **values)
    conv = ShortConvSpec(first, 4, "silu")
    builder.state(1, conv.kernel - 1, spec.width)
    builder.state(spec.num_heads, spec.key_size, spec.value_size)
    builder.linear(f"{layer}.qkv", spec.width, HIDDEN)
    builder.vector(f"{layer}.taps", spec.width * conv.kernel, centre=0.3)
    builder.linear(f"{layer}.a", spec.num_decays, HIDDEN)
    builder.linear(f"{layer}.b", spec.num_heads, HIDDEN)
    builder.vector(f"{layer}.a_log", spec.num_rates, centre=-0.5)
    builder.vector(f"{layer}.dt_bias", spec.num_decays, centre=-0.5)
    builder.vector(f"{layer}.d", spec.num_heads)
    builder.linear(f"{layer}.out", HIDDEN, spec.num_heads * spec.value_size)
    return conv, spec


class StateChecks(Harness):
    @pytest.mark.parametrize("features", CONVS.values(), ids=CONVS.keys())
    def test_short_conv(self, features: dict[str, Any]) -> None:
        if not self._lacks("short_conv"):
            self.compare(*conv_model(**features), with_slots(mixed_steps()))

    @pytest.mark.parametrize("rule", RULES)
    def test_recurrence(self, rule: str) -> None:
        if self._lacks("recurrence"):
            return
        model, source = recurrent_model(**RULES[rule])
        if f"recurrence: {rule}" not in self.missing_cases:
            self.compare(model, source, with_slots(mixed_steps()))
            return
        with (
            pytest.raises(UnsupportedOpError, match="needs the op 'recurrence'"),
            self.loaded(model, source),
        ):
            pass

    @pytest.mark.parametrize("rule", [DELTA, SSD], ids=["delta", "ssd"])
    def test_chunks_do_not_change_what_recurrent_layers_compute(self, rule: dict[str, Any]) -> None:
        """Chunks of 1, 2 and 7, alone and in a batch; exact if the backend promises that."""
        if self._lacks("recurrence"):
            return
        text = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
        mates = [Row([3, 1, 4, 1, 5], 0, [29], "none", 4), Row([2], 0, [30], "none", 6)]
        with self.loaded(*recurrent_model(**rule)) as loaded:

            def run(chunk: int, mates: list[Row]) -> F32:
                found = []
                for at in range(0, len(text), chunk):
                    row = Row(text[at : at + chunk], at, [1, 2, 3], "all", 3)
                    plan = make_plan([*mates[:1], row, *mates[1:]], PAGE)
                    found.append(all_logprobs(loaded, plan, VOCAB))
                return np.concatenate(found)

            whole = run(len(text), [])
            for chunk in (1, 2, 7, len(text)):
                for beside in ([], mates):
                    self._check_equal(run(chunk, beside), whole, f"chunk {chunk}")

    def test_states_are_kept_and_handed_on(self) -> None:
        """A row that goes on elsewhere leaves its slot as it was, so that others begin there; slots
        that no row names stay as they are."""
        if self._lacks("recurrence"):
            return
        text = np.random.default_rng(1).integers(0, VOCAB, 30).tolist()
        with self.loaded(*recurrent_model()) as loaded:

            def run(*rows: Row) -> F32:
                return all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)

            def rest(source: int, target: int, block: int) -> Row:
                return Row(text[12:], 12, [block, block + 1], "all", (source, target))

            self.step_ids(loaded, [Row(text[:12], 0, [0, 1], "none", 7)])
            first = run(rest(7, 2, 0), Row([5] * 9, 0, [20], "none", 0))[:18]
            again = run(rest(7, 3, 4), rest(7, 1, 8))
            self._check_equal(
                again, np.concatenate([first, first]), "a snapshot that two rows read"
            )
            self._check_equal(run(rest(7, 7, 12)), first, "in place, after it served as a snapshot")
            ended = run(Row([4], 30, [0, 1], "all", 2), Row([4], 30, [4, 5], "all", 3))
            self._check_equal(ended[1:], ended[:1], "states after equal rows")
            self._check_equal(run(Row([4], 30, [12, 13], "all", 7)), ended[:1], "the slot in place")

    @pytest.mark.parametrize("rule", [DELTA, SSD], ids=["delta", "ssd"])
    def test_states_are_kept_after_each_token(self, rule: dict[str, Any]) -> None:
        """They are those of a row that is fed token by token: what follows each is the same."""
        if self._lacks("recurrence"):
            return
        text = np.random.default_rng(2).integers(0, VOCAB, 40).tolist()
        start, count = 9, 20  # more than kernels take at once
        with self.loaded(*recurrent_model(**rule), num_state_slots=24, max_num_seqs=4) as loaded:
            if not loaded.info.keeps_states_after:
                return

            def run(*rows: Row) -> F32:
                return all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)

            self.step_ids(loaded, [Row(text[:start], 0, [0, 1, 2], "none", 0)])
            mates = [Row([3, 1, 4], 0, [20], "none", 2), Row([1, 5, 9], 0, [24], "none", 3)]
            part = text[start : start + count]
            slots = [-1, *range(4, 2 + count), -1]  # none after the first token and the last
            run(mates[0], Row(part, start, [0, 1, 2], "all", (0, 1), slots), mates[1])
            for index in range(count):
                next_id = Row(text[start + index : start + index + 1], start + index, [8, 9, 10])
                self.step_ids(loaded, [replace(next_id, state=(0, 0))])
                if slots[index] < 0:
                    continue
                at = start + index + 1
                kept, fed = (
                    run(Row(text[at : at + 5], at, [12, 13, 14], "all", (slot, 3)))
                    for slot in (slots[index], 0)
                )
                self._check_equal(kept, fed, f"after token {index}")

    def test_rows_that_begin_do_not_read_their_slot(self) -> None:
        """A row that begins ignores what its slot holds, even NaN."""
        if self._lacks("recurrence"):
            return
        model, source = recurrent_model()
        text = np.random.default_rng(5).integers(0, 13, 20).tolist()
        found = []
        for broken in (True, False):
            with self.loaded(model, with_nan(source)) as loaded:
                if broken:
                    rows = [Row([13] * 5, 0, [5], "last", 3), Row([1, 2], 0, [9], "last", 4)]
                    ids = self.step_ids(loaded, rows)
                    assert ids[0] < 0 <= ids[1]
                plan = make_plan([Row(text, 0, [1, 2], "all", 3)], PAGE)
                found.append(all_logprobs(loaded, plan, VOCAB))
        np.testing.assert_array_equal(found[0], found[1])

    def test_slots_are_counted(self) -> None:
        """One for each sequence and two more at the least; as many as were asked for."""
        if self._lacks("recurrence"):
            return
        model, source = recurrent_model()
        with self.loaded(model, source) as loaded:
            info = loaded.info
            assert info.num_state_slots >= info.max_num_seqs + SPARE_SLOTS
            assert info.state_slot_bytes >= model.shape.state_slot_bytes
        with self.loaded(model, source, num_state_slots=20, max_num_seqs=18) as loaded:
            assert loaded.info.num_state_slots == 20
        with (
            pytest.raises(CapacityError, match=r"num_state_slots is 19.*20.*--max-num-seqs to 17"),
            self.loaded(model, source, num_state_slots=19, max_num_seqs=18),
        ):
            pass

    def _check_equal(self, found: F32, expected: F32, what: str) -> None:
        if self.exact_batches:
            np.testing.assert_array_equal(found, expected, what)
        else:
            np.testing.assert_allclose(found, expected, rtol=0, atol=self.tolerance, err_msg=what)

    def _lacks(self, op: str) -> bool:
        """True for a backend without the op; then it must say so by name."""
        missing = {"short_conv", "recurrence"}.intersection(self.missing_ops)
        if op not in missing and not (op == "recurrence" and missing):
            return False
        model = conv_model() if op == "short_conv" else recurrent_model()
        with (
            pytest.raises(UnsupportedOpError, match=f"needs the op '({'|'.join(missing)})'"),
            self.loaded(*model),
        ):
            pass
        return True


def with_slots(steps: list[list[Row]]) -> list[list[Row]]:
    """Each sequence in a slot of its own, which it leaves for another one at the second step."""
    for number, step in enumerate(steps):
        for row in step:
            first = row.tables[0][0]  # a block that no other sequence has, and none the next one
            source, target = (first + (number > change) for change in (1, 0))
            row.state = (source if row.start else -1, target)
    return steps
