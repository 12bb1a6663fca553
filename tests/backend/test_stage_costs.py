"""Stages are cut by what parts of a step cost: seconds that are measured, or bytes read."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, OpError
from vllmx_core.model import Model
from vllmx_core.recorded.recording import Recording, record
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_core.sharding.stage_costs import (
    byte_costs,
    measured_cuts,
    segment_bounds,
    sums_of_stages,
    used_share,
)
from vllmx_core.sharding.stage_cuts import Cut, balanced, cuts_behind, layers_between, places
from vllmx_core.sharding.stages import staged
from vllmx_core.weights.part import WeightSource
from vllmx_engine.core.found_model import find_model
from vllmx_engine.core.load import OpenedModel, open_model
from vllmx_tp import stage_times
from vllmx_tp.loading import layers_of, part_of_rank
from vllmx_tp.stage_times import segment_seconds, with_layers

from .test_stages import CONFIGS, LLAMA, UNCUT, of

LIMITS = LoadOptions(
    dtype="f64",
    kv_cache_dtype="f64",
    max_model_len=24,
    num_kv_blocks=96,
    max_num_seqs=2,
    num_state_slots=4,
    block_size=4,
    group_caches=True,
)
DENSE_FIRST = CONFIGS["TestQwen2Moe"] | {
    "num_hidden_layers": 6,
    "mlp_only_layers": [0, 1, 2],
    "num_experts": 64,
    "moe_intermediate_size": 24,
    "intermediate_size": 96,
}


def recorded(config: dict[str, Any]) -> tuple[Model, WeightSource, Recording, list[Cut]]:
    model, source = of(config)
    recording = record(model, 24)
    return model, source, recording, places(recording.steps, model.shape)


def cut(config: dict[str, Any], seconds: list[float], stages: int) -> tuple[int, ...]:
    """The layers of each stage, where parts of the step take so many seconds."""
    _, source, recording, cuts = recorded(config)
    chosen = measured_cuts(cuts, byte_costs(recording, source), seconds, stages)
    return layers_between(chosen, recording.steps.ops)


def test_parts_of_a_step_are_timed_and_the_slowest_stage_is_as_fast_as_can_be() -> None:
    eight = LLAMA | {"num_hidden_layers": 8}
    assert cut(eight, [1.0] * 7 + [1.5], 2) == (4, 4)
    assert cut(eight, [3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == (2, 6)
    assert cut(eight, [1.0] * 7 + [5.0], 2) == (6, 2)  # a large head
    assert cut(eight, [4.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0], 4) == (1, 2, 1, 4)


def test_what_is_measured_with_noise_comes_to_the_same() -> None:
    """Where the measured cut is hardly better, that by bytes stays."""
    eight, noise = LLAMA | {"num_hidden_layers": 8}, np.random.default_rng(7)
    by_bytes = cut(eight, [1.0] * 8, 2)
    for _ in range(50):
        seconds = (1.0 + 0.02 * noise.random(8)).tolist()
        assert cut(eight, seconds, 2) == by_bytes


def test_the_cut_depends_on_nothing_but_what_is_given() -> None:
    seconds = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    found = {cut(LLAMA | {"num_hidden_layers": 8}, seconds, 3) for _ in range(5)}
    assert len(found) == 1


def test_experts_that_a_step_does_not_use_cost_nothing() -> None:
    assert used_share(2, 2, 1) == 1.0
    assert used_share(2, 64, 1) == pytest.approx(2 / 64)
    assert 0.39 < used_share(2, 64, 16) < 0.41
    _, source, recording, cuts = recorded(DENSE_FIRST)
    costs = byte_costs(recording, source)
    (place,) = balanced(cuts, costs, 2)
    layers = layers_between((place,), recording.steps.ops)
    sizes = dict.fromkeys(("experts", "head"), 0.0)
    for op, cost in zip(recording.steps.ops, costs, strict=True):
        sizes[op.name] = cost
    shares = [spec for spec in recording.specs if spec.kind == "stack"]
    assert sizes["experts"] < 0.41 * 64 * (3 * 24 * 48) * 4
    assert len(shares) == 6
    assert layers == (4, 2)  # all experts counted it would be (5, 1)


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - UNCUT))
def test_cuts_are_named_by_layers(name: str) -> None:
    """As rank 0 tells the others; every architecture."""
    model, source, recording, cuts = recorded(CONFIGS[name])
    layers = layers_between(cuts, recording.steps.ops)
    assert all(layers)
    stages = len(layers)
    parts = [staged(model, source, LIMITS, one, stages, layers=layers) for one in range(stages)]
    assert sum(len(part.ops) for part in parts) == len(recording.steps.ops)
    assert [len(part.ops) for part in parts[:-1]] == [
        end - begin for begin, end in pairwise([0, *(one.index for one in cuts)])
    ]


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((1, 1), "are 2 layers in 2 stages, and the model has 3 for 2"),
        ((1, 1, 1), "are 3 layers in 3 stages, and the model has 3 for 2"),
    ],
)
def test_layers_that_the_model_does_not_have(layers: tuple[int, ...], why: str) -> None:
    model, source = of(LLAMA)
    with pytest.raises(ConfigError, match=why):
        staged(model, source, LIMITS, 0, 2, layers=layers)


def test_layers_that_belong_together() -> None:
    _, _, recording, cuts = recorded(LLAMA | {"num_hidden_layers": 6})
    some, ops = [cuts[1], cuts[3]], recording.steps.ops
    assert cuts_behind((4, 2), some, ops, 2) == (cuts[3],)
    with pytest.raises(ConfigError, match="a stage can end behind 2, 4 layers"):
        cuts_behind((3, 3), some, ops, 2)


@pytest.mark.parametrize("name", ["TestQwen3Next", "TestGemma3", "TestDeepSeekV3", "TestLfm2"])
def test_every_part_of_a_step_runs_by_itself(name: str) -> None:
    """Windows, latents, states, experts; layers that are alike are measured once."""
    wide = {"v_head_dim": 16} if name == "TestDeepSeekV3" else {}  # or the cut is inside of it
    model, source, recording, cuts = recorded(CONFIGS[name] | wide)
    loads = []

    class Counting(ReferenceBackend):
        def load(self, model: Model, source: WeightSource, options: LoadOptions) -> Any:
            loads.append(model)
            return super().load(model, source, options)

    found = segment_seconds(Counting(), model, recording, cuts, source, LIMITS)
    assert len(found) == len(segment_bounds(cuts)) == len(cuts) + 1
    assert all(0 < one < 60 for one in found)
    assert len(set(found)) < len(loads) <= 1 + len(found)
    assert sum(sums_of_stages(cuts[:1], cuts, found)) == pytest.approx(sum(found))


def test_a_cut_inside_of_a_layer_is_not_measured() -> None:
    """None is made there, although less than the stream would cross: 40 features of attention."""
    model, source, recording, cuts = recorded(CONFIGS["TestDeepSeekV3"])
    seconds = segment_seconds(ReferenceBackend(), model, recording, cuts, source, LIMITS)
    assert len(seconds) == 3
    assert {value.width for cut in cuts for value in cut.crossing} == {48}
    ops, stream = recording.steps.ops, cuts[0].crossing[0]
    index = next(i for i, op in enumerate(ops) if op.name == "latent_attention") + 1
    cuts = [Cut(index, (stream, ops[index].reads[0]))]
    with pytest.raises(
        OpError, match="40 features crosses a place, and the table of tokens has 48"
    ):
        segment_seconds(ReferenceBackend(), model, recording, cuts, source, LIMITS)


def opened(**more: Any) -> OpenedModel:
    config = EngineConfig(
        model="demo", backend="numpy", pipeline_parallel_size=2, num_kv_blocks=24, **more
    )
    return open_model(find_model(config))


def configured(monkeypatch: pytest.MonkeyPatch, seconds: Any, **more: Any) -> str | None:
    """What rank 0 tells the others of the demo model, where parts take so long."""

    def measured(*given: Any) -> list[float]:
        if isinstance(seconds, Exception):
            raise seconds
        return list(seconds)

    monkeypatch.setattr(stage_times, "segment_seconds", measured)
    config = EngineConfig(model="demo", backend="numpy", pipeline_parallel_size=2, **more)
    return with_layers(opened(**more), config, (), 2).pipeline_layers


def test_rank_0_measures_and_tells(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllmx.tp"):
        assert configured(monkeypatch, [5.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == "1,5"
    assert "stages have 1,5 layers and take 5000.00, 5000.00 ms" in caplog.text
    assert configured(monkeypatch, [1.0] * 5 + [9.0]) == "5,1"


@pytest.mark.parametrize("name", ["tied", "TestNemotronH", "TestQwen35", "TestKimiLinear"])
def test_ranks_can_be_cut_where_the_model_was_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other things cross a place inside of a layer where ranks have parts of them."""
    model, source = of(CONFIGS[name])
    opened: Any = SimpleNamespace(
        model=model,
        checkpoint=SimpleNamespace(weights=source),
        options=LIMITS,
        backend=SimpleNamespace(
            name="numpy", has_own_devices=lambda: False, load=lambda: ReferenceBackend
        ),
    )
    monkeypatch.setattr(stage_times, "segment_seconds", lambda *given: [1.0] * (len(given[3]) + 1))
    config = EngineConfig(model="m", pipeline_parallel_size=2, tensor_parallel_size=2)
    found = with_layers(opened, config, (), 4)
    assert found.pipeline_layers is not None
    part = part_of_rank(opened, found, 0)
    assert staged(part, source, LIMITS, 1, 2, layers=layers_of(found)).ops


def test_what_is_said_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    never = AssertionError("it was measured")
    assert configured(monkeypatch, never, pipeline_layers="2,4") == "2,4"
    assert configured(monkeypatch, never, pipeline_layers="bytes") == "bytes"


def test_what_cannot_be_measured_is_cut_by_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert configured(monkeypatch, RuntimeError("no device")) == "bytes"
    assert "could not be measured (RuntimeError: no device)" in caplog.text


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ("a,b", "numbers of layers with commas"),
        ("0,6", "numbers of layers with commas"),
        ("6", "is of 1 stages, and there are 2"),
    ],
)
def test_layers_that_mean_nothing(layers: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(model="demo", pipeline_parallel_size=2, pipeline_layers=layers)
