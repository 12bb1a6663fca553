"""Arguments of `LLM`: our names, vLLM's, and what is neither."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_engine.llm import engine_config


def test_fields_and_names_of_vllm() -> None:
    config = engine_config(
        "m",
        {
            "gpu_memory_utilization": 0.5,
            "dtype": "half",
            "max_model_len": 512,
            "trust_remote_code": True,
            "swap_space": 0,
            "override_generation_config": {"temperature": 0},
            "prefer": ("a", "b"),
        },
    )
    assert (config.model, config.memory_fraction, config.max_model_len) == ("m", 0.5, 512)
    assert (config.dtype, config.prefer) == ("float16", ("a", "b"))
    assert json.loads(config.override_generation_config or "") == {"temperature": 0}
    assert engine_config("m", {}) == EngineConfig(model="m")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_modellen": 1}, "no argument 'max_modellen'; did you mean 'max_model_len'"),
        ({"zzz": 1}, "'zzz': it is no field of EngineConfig"),
        ({"swap_space": 4}, "swap_space = 4 of LLM is refused, it may be 0"),
        ({"runner": "pooling"}, "it may be 'auto' or 'generate'"),
        ({"max_model_len": "many"}, "max_model_len of LLM"),
        ({"gpu_memory_utilization": 2}, "must be above 0 and at most 1"),
        ({"memory_fraction": 0.5, "gpu_memory_utilization": 0.5}, "memory_fraction twice"),
    ],
)
def test_others_are_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        engine_config("m", arguments)
