"""The suite of models: each mistake that a model could make is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.errors import OpError
from vllmx_core.model import Array, KVSpec, Model, Ops, StepInputs, Weight
from vllmx_testing.model_suite import ModelSuite
from vllmx_testing.synthetic import Builder, SyntheticModel, tiny_decoder

from .planted import (
    BrokenBackend,
    with_spec,
)


def body_of(**changes: Any) -> type[ModelSuite]:
    """ModelSuite over the tiny decoder with something wrong in it."""

    class Broken(ModelSuite):
        config = {"vocab_size": 19}  # noqa: RUF012

        def make_model(self, config: dict[str, Any]) -> Model:
            builder = Builder(config["vocab_size"])
            model = replace(tiny_decoder(builder), **changes)
            change = changes.get("body")
            return model if change is None else replace(model, body=change)

    return Broken


def test_a_right_model_passes_the_model_suite() -> None:
    suite = body_of()()
    suite.test_shape_says_what_the_config_says()
    suite.test_weight_map_is_consistent()
    suite.test_forward_is_recorded_and_uses_every_weight()
    suite.test_attention_layers_match_the_kv_cache()
    suite.test_constants_are_float32()
    suite.test_chunks_do_not_change_the_logits(7)
    suite.test_positions_and_order_matter()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({}, None), ({"scale": 1.0}, "broken, chunk 1"), ({"window": 5}, "broken, chunk 1")],
)
def test_the_model_suite_finds_a_backend_that_disagrees(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str | None
) -> None:
    with_spec(**changes)(monkeypatch)
    spec = SimpleNamespace(
        name="broken", unavailable_reason=lambda: None, load=lambda: BrokenBackend
    )
    registry = SimpleNamespace(all=lambda kind: [spec])
    monkeypatch.setattr("vllmx_testing.model_suite.load_registry", lambda: registry)
    test = body_of()().test_installed_backends_agree_with_the_reference
    if message is None:
        test()
        return
    with pytest.raises(AssertionError, match=message):
        test()


def values_seen(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
    x = ops.embedding(step.tokens, w["embed"])
    return x if x else ops.add(x, x)


def wrong_width(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
    return ops.linear(ops.embedding(step.tokens, w["embed"]), w["0.down"])


def unused(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
    return ops.logits(ops.embedding(step.tokens, w["embed"]), step.logit_rows, w["head"])


def not_logits(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
    return ops.embedding(step.tokens, w["embed"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (values_seen, "branches on a value"),
        (wrong_width, "has 40 columns, x has 32 features"),
        (unused, "never uses"),
        (not_logits, "not \\(L, 19\\) logits"),
    ],
)
def test_a_wrong_forward_pass_is_found(body: Any, message: str) -> None:
    with pytest.raises((AssertionError, OpError), match=message):
        body_of(body=body)().test_forward_is_recorded_and_uses_every_weight()


def test_layers_that_do_not_match_the_cache_are_found() -> None:
    model: SyntheticModel = tiny_decoder(Builder(19))
    kv = (KVSpec(2, 8), KVSpec(2, 8, window=5))
    suite = body_of(shape=replace(model.shape, caches=kv))()
    with pytest.raises(AssertionError, match="layer 1"):
        suite.test_attention_layers_match_the_kv_cache()


def test_doubled_and_disagreeing_weights_are_found() -> None:
    model: SyntheticModel = tiny_decoder(Builder(19))
    with pytest.raises(AssertionError, match="twice"):
        body_of(specs=model.specs * 2)().test_weight_map_is_consistent()
    other = replace(model.specs[0], name="other", cols=33)
    with pytest.raises(AssertionError, match=r"embed\.weight"):
        body_of(specs=(*model.specs, other))().test_weight_map_is_consistent()
