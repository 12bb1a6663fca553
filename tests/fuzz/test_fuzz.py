"""A short run of every fuzz target: seeds are accepted, damaged copies are refused in bounds."""

from __future__ import annotations

import json
from functools import cache
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import (
    fuzz_chat_template,
    fuzz_config,
    fuzz_gguf,
    fuzz_quantization,
    fuzz_quantize,
    fuzz_safetensors,
    fuzz_shrinking,
    fuzz_tokenizer,
)
from .limits import run_bounded

TARGETS = (
    fuzz_chat_template,
    fuzz_config,
    fuzz_gguf,
    fuzz_quantization,
    fuzz_quantize,
    fuzz_safetensors,
    fuzz_shrinking,
    fuzz_tokenizer,
)


@cache
def mutations_of(target: ModuleType) -> st.SearchStrategy[bytes]:
    """Made once: some targets try every seed that they might have."""
    strategy: st.SearchStrategy[bytes] = target.mutations()
    return strategy


def name_of(target: ModuleType) -> str:
    return target.__name__.rpartition("_")[2]


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_seeds_are_valid(target: ModuleType) -> None:
    seeds = target.seeds()
    assert seeds
    for seed in seeds[:: 1 + len(seeds) // 16]:
        assert run_bounded(target.one_input, seed), seed[:200]


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
# Drawing from a large seed takes long on a busy machine, which says nothing about the target.
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_inputs(target: ModuleType, data: st.DataObject) -> None:
    run_bounded(target.one_input, data.draw(mutations_of(target)))


@pytest.mark.parametrize("size", [1 << 10, 1 << 27])
def test_the_bounds_hold(size: int) -> None:
    def allocate(data: bytes) -> bool:
        return len(bytearray(size)) == size

    if size == 1 << 10:
        assert run_bounded(allocate, b"x")
    else:
        with pytest.raises(AssertionError, match="1 bytes made Python allocate 1342"):
            run_bounded(allocate, b"x")


@pytest.mark.parametrize(
    "odd", [None, -1, 10**30, 0.5, True, "x", [], [{}], {}, {"a": 1}], ids=repr
)
def test_odd_values_in_each_key_of_a_tower(odd: object) -> None:
    for config in fuzz_config.seeing():
        for key in config["vision_config"]:
            tower = config["vision_config"] | {key: odd}
            fuzz_config.one_input(json.dumps(config | {"vision_config": tower}).encode())
