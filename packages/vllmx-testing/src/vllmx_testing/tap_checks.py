"""Hidden states that a target keeps and a drafter reads, without the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import HasHidden
from vllmx_core.model import LAST_NORM, Array, Ops, StepInputs, Tapped, TapSpec, Weight
from vllmx_core.plan import I32, StepPlan
from vllmx_core.reference.backend import ReferenceBackend

from vllmx_testing.harness import (
    PAGE,
    VOCAB,
    Harness,
    all_logprobs,
    load_options,
    log_softmax,
    mixed_steps,
)
from vllmx_testing.plans import make_plan
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

HIDDEN, WIDTH = 24, 20
TAPS = TapSpec((1, LAST_NORM), (WIDTH,), num_rows=90, own_rows=40)


def target() -> tuple[Tapped, ArraySource]:
    builder = Builder(VOCAB).embedding("embed", HIDDEN).linear("mlp", HIDDEN, HIDDEN)
    builder.vector("norm", HIDDEN).linear("head", VOCAB, HIDDEN)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        ops.tap(x, 0)  # which nobody reads
        x = ops.add(x, ops.linear(x, w["mlp"]))
        ops.tap(x, 1)
        x = ops.rms_norm(x, w["norm"], 1e-5)
        ops.tap(x, LAST_NORM)
        return ops.logits(x, step.logit_rows, w["head"])

    return Tapped(builder.build(HIDDEN, body), TAPS), ArraySource(builder.arrays)


def drafter() -> tuple[SyntheticModel, ArraySource]:
    """It reads both points where a token has hidden states of the target, else its own. The table
    of tokens is shared."""
    builder = Builder(VOCAB, 1).embedding("embed", HIDDEN).linear("down", WIDTH, HIDDEN)
    builder.linear("up", WIDTH, WIDTH).linear("out", VOCAB, WIDTH)
    builder.arrays["embed.weight"] = target()[1].part("embed.weight").dequantize()

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        x = ops.place(ops.add(x, ops.place(x, step, 0)), step, 1, adds=True)
        x = ops.place(ops.linear(x, w["down"]), step, 2, own=True)
        x = ops.add(x, ops.linear(x, w["up"]))
        ops.write(x, 2)
        return ops.logits(x, step.logit_rows, w["out"])

    return builder.build(WIDTH, body), ArraySource(builder.arrays)


def _plans() -> list[tuple[StepPlan, StepPlan]]:
    """A step of the target and one of the drafter after the other."""
    random, found, own = np.random.default_rng(3), [], np.full(0, -1, np.int32)
    for rows in mixed_steps():
        plan = make_plan(rows, PAGE)
        count = plan.num_tokens

        def some(size: int, least: int, count: int = count) -> I32:
            drawn = random.permutation(size)[:count].astype(np.int32)
            return np.where(random.random(count) < 0.3, np.int32(least), drawn)

        kept = random.permutation(TAPS.num_rows)[:count].astype(np.int32)
        reads = np.where(random.random(count) < 0.3, np.int32(-1), random.permutation(kept))
        own = np.where(reads < 0, np.resize(own, count) if own.size else reads, np.int32(-1))
        writes = some(TAPS.own_rows, -1)
        found.append(
            (
                replace(plan, tap_rows=kept),
                replace(plan, feature_rows=reads, own_rows=own, tap_rows=writes),
            )
        )
        own = writes[writes >= 0]
    return found


class TapChecks(Harness):
    @pytest.mark.parametrize("enforce_eager", [False, True])
    def test_a_drafter_reads_hidden_states(self, enforce_eager: bool) -> None:
        if "tap" in self.missing_ops:
            pytest.skip(f"{self.make_backend().name} refuses tap by name")
        options: dict[str, Any] = {"enforce_eager": enforce_eager}
        oracle = ReferenceBackend().load(*target(), load_options("f64", options))
        reads = {**options, "hidden": oracle.hidden}
        second = ReferenceBackend().load(*drafter(), load_options("f64", reads))
        with self.loaded(*target(), **options) as loaded:
            assert isinstance(loaded, HasHidden)
            with self.loaded(*drafter(), **options, hidden=loaded.hidden) as drafting:
                for number, (plan, draft) in enumerate(_plans()):
                    for mine, theirs, step in (
                        (loaded, oracle, plan),
                        (drafting, second, draft),
                    ):
                        got = all_logprobs(mine, step, VOCAB)
                        np.testing.assert_allclose(
                            got,
                            log_softmax(theirs.logits(step)),
                            rtol=0,
                            atol=self.tolerance,
                            err_msg=f"log-probabilities of step {number}",
                        )

    def test_no_hidden_states_are_kept_unless_asked_for(self) -> None:
        model, source = target()
        with self.loaded(model._model, source) as loaded:
            assert not getattr(loaded, "hidden", None)
            all_logprobs(loaded, _plans()[0][0], VOCAB)
