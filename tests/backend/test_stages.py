"""Stages of a model compute behind one another what one process computes, to the last bit; on the
numpy backend in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import layout_of
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import load_registry
from vllmx_core.recorded.recording import record
from vllmx_core.reference.backend import ReferenceBackend, ReferenceLoadedModel
from vllmx_core.sharding.model import sharded
from vllmx_core.sharding.stage_cuts import Cut, balanced, places
from vllmx_core.sharding.stages import StagedModel, staged
from vllmx_core.weights.part import WeightSource
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.ranks import RankThreads, ThreadCommunicator

from . import (
    test_architectures,
    test_compressed_architectures,
    test_expert_architectures,
    test_latent_architectures,
    test_recurrent_architectures,
)
from .served_models import SMALL, suites

REGISTRY = load_registry()
TEXT = [7, 3, 60, 0, 33, 12, 12, 5, 41, 59, 2, 18, 30, 44]
LLAMA = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
CONFIGS: dict[str, dict[str, Any]] = {
    name: suite.config
    for name, suite in suites(
        test_architectures,
        test_compressed_architectures,
        test_expert_architectures,
        test_latent_architectures,
        test_recurrent_architectures,
    ).items()
} | {"tied": LLAMA | {"tie_word_embeddings": True}}
UNCUT = {"TestGemma3n", "TestGemma4Shared"}
"""The second half of their layers reads the pages of the first."""


def options(**more: Any) -> LoadOptions:
    return LoadOptions(
        dtype="f64",
        kv_cache_dtype="f64",
        max_model_len=64,
        num_kv_blocks=96,
        max_num_seqs=2,
        block_size=4,
        group_caches=True,
        **more,
    )


def of(config: dict[str, Any]) -> tuple[Model, WeightSource]:
    model: Model = REGISTRY.model_for(config).load()(dict(config))
    return model, random_weights(model)


def chunks(loaded: ReferenceLoadedModel) -> list[F32]:
    """Logits of a text in two steps, the second beside another text; or nothing, of a stage that
    has no head."""
    groups = len(loaded.info.cache_windows)
    has_head = loaded.samples
    tables = [[[4 * group + block for block in range(4)] for group in range(groups)]]
    tables.append([[60 + 2 * group + block for block in range(2)] for group in range(groups)])
    steps = [
        [Row(TEXT[:9], 0, tables[0], "all" if has_head else "none", 0)],
        [
            Row(TEXT[9:], 9, tables[0], "all" if has_head else "none", 0),
            Row(TEXT[3:8], 0, tables[1], "all" if has_head else "none", 1),
        ],
    ]
    return [loaded.logits(make_plan(rows, 4)) for rows in steps]


def check(model: Model, source: WeightSource, stages: int) -> RankThreads[ReferenceLoadedModel]:
    """The last stage has the logits of one process."""
    expected = chunks(ReferenceBackend().load(model, source, options()))

    def load(end: ThreadCommunicator) -> ReferenceLoadedModel:
        mine = staged(model, source, options(), end.rank, stages)
        return ReferenceBackend().load(mine, source, options(communicator=end))

    ranks = RankThreads(stages, load)
    *_, found = ranks.each(chunks)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    ranks.close()
    return ranks


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - UNCUT))
def test_as_many_stages_as_there_can_be(name: str) -> None:
    """Every architecture: windows, latents, states, experts, tied heads."""
    model, source = of(CONFIGS[name])
    most = len(places(record(model, 64).steps, model.shape)) + 1
    assert most >= 3
    check(model, source, most)


def test_uneven_stages_hold_their_own_layers_alone() -> None:
    model, source = of(LLAMA | {"num_hidden_layers": 5, "tie_word_embeddings": True})
    stages = [staged(model, source, options(), stage, 2) for stage in range(2)]
    assert [len(one.shape.caches) for one in stages] == [3, 2]  # and the head
    assert [one.share_of_cache for one in stages] == [0.6, 0.4]
    names = [{spec.name for spec in one.weights()} for one in stages]
    both = names[0] & names[1]
    assert names[0] | names[1] == {spec.name for spec in model.weights()}
    table = [spec.parts[0].name for spec in model.weights() if spec.shard == "vocab"]
    assert len(table) == 2  # a table and a head ...
    assert table[0] == table[1]  # ... which are one tensor
    assert not both
    ranks = check(model, source, 2)
    assert ranks.calls == [
        ("send", (9, 48)),
        ("send", (9, 48)),
        ("send", (10, 48)),
        ("send", (10, 48)),
    ]


def test_groups_of_caches_are_those_of_the_whole_model() -> None:
    """Six layers with a window in three groups, and two without: each stage has some of each."""
    config = CONFIGS["TestGemma3"] | {"num_hidden_layers": 8, "sliding_window_pattern": 4}
    model, source = of(config)
    whole = layout_of(model.shape, options())
    assert len(whole.groups) == 4
    for stages in (2, 3):
        layouts = [
            layout_of(staged(model, source, options(), stage, stages).shape, options())
            for stage in range(stages)
        ]
        assert {one.windows for one in layouts} == {whole.windows}
        assert sum(len(group.layers) for one in layouts for group in one.groups) == 8
        check(model, source, stages)
    assert [len(one.places) for one in layouts] == [1, 1, 1]


def test_a_stage_without_attention() -> None:
    config = CONFIGS["TestLfm2"] | {"layer_types": ["conv", "conv", "full_attention", "conv"]}
    model, source = of(config)
    first = staged(model, source, options(), 0, 4)
    assert (first.shape.caches, len(first.shape.states)) == ((), 1)
    check(model, source, 4)


def test_deterministic_sums_are_cut_too() -> None:
    model, source = of(LLAMA | {"intermediate_size": 128, "hidden_size": 64})
    fixed = sharded(model, source, 64, 0, 1, deterministic=True)
    check(fixed, source, 3)


def test_more_stages_than_layers() -> None:
    model, source = of(LLAMA)
    with pytest.raises(ConfigError, match=r"into 4 stages, .* 2 places: .*-size 3 at most"):
        staged(model, source, options(), 0, 4)


def test_layers_that_read_the_pages_of_others_stay_with_them() -> None:
    model, source = of(CONFIGS["TestGemma4Shared"])
    with pytest.raises(ConfigError, match="parted at 0 places"):
        staged(model, source, options(), 0, 2)
    model, source = of(
        CONFIGS["TestGemma4Shared"]
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        }
    )
    shapes = [staged(model, source, options(), stage, 2).shape for stage in range(2)]
    assert [len(shape.caches) for shape in shapes] == [2, 4]
    check(model, source, 3)


def test_several_streams_cross_a_cut() -> None:
    model, source = of(CONFIGS["TestGemma3n"] | {"num_kv_shared_layers": 0})
    check(model, source, 3)


def test_the_dearest_stage_costs_least() -> None:
    cuts = [Cut(index, ()) for index in (1, 2, 3, 4)]
    assert [cut.index for cut in balanced(cuts, [1, 1, 1, 1, 4], 2)] == [4]
    assert [cut.index for cut in balanced(cuts, [1, 1, 1, 1, 4], 3)] == [2, 4]
    assert [cut.index for cut in balanced(cuts, [4, 1, 1, 1, 1], 3)] == [1, 3]
    assert [cut.index for cut in balanced(cuts, [1, 1, 1, 1, 1], 5)] == [1, 2, 3, 4]
    assert balanced(cuts, [1, 1, 1, 1, 1], 1) == ()


def test_the_head_is_a_part_of_the_last_stage() -> None:
    """A large vocabulary takes layers from the stage that has the head."""
    model, source = of(LLAMA | {"num_hidden_layers": 6, "vocab_size": 2000})
    stages = [staged(model, source, options(), stage, 2) for stage in range(2)]
    assert [len(one.shape.caches) for one in stages] == [5, 1]
    assert isinstance(stages[0], StagedModel)
