"""Arguments of `LLM`: our names, vLLM's, and what is neither."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_engine.llm_arguments import engine_config


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
        ({"speculative_config": "ngram"}, "speculative_config of LLM must be a dict"),
        ({"speculative_config": {"method": "medusa"}}, "other drafters are not served yet"),
        ({"speculative_config": {"modle": "m"}}, "its key 'modle' is not served; did you mean"),
        ({"speculative_config": {"method": "eagle3"}}, "eagle3 wants the draft model"),
        ({"speculative_config": {"num_speculative_tokens": -1}}, "0 or above, got '-1'"),
        ({"speculative_config": {"parallel_drafting": True}}, "may be False, got True"),
        ({"speculative_config": {}, "speculate": "ngram"}, "speculate twice"),
    ],
)
def test_others_are_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        engine_config("m", arguments)


@pytest.mark.parametrize(
    ("given", "speculate", "tokens"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}, "ngram", "4"),
        ({"model": "[ngram]", "prompt_lookup_min": None}, "ngram", "auto"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, "suffix", "auto"),
        ({"model": "a/b", "num_speculative_tokens": 40}, "model:a/b", "16"),
        (
            {"method": "eagle3", "model": "a/b", "draft_tensor_parallel_size": 1},
            "model:a/b",
            "auto",
        ),
        ({"method": "dflash", "model": "a/b", "num_speculative_tokens": 15}, "model:a/b", "15"),
        (None, "off", "auto"),
    ],
)
def test_speculation_as_in_vllm(given: Any, speculate: str, tokens: str) -> None:
    config = engine_config("m", {"speculative_config": given})
    assert (config.speculate, config.speculate_tokens) == (speculate, tokens)
