"""The sources of sampling defaults, and what an operator may set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_engine.core.generation_config import generation_config

OWN = {"temperature": 0.6, "top_k": 20, "eos_token_id": 7}


def test_the_models_own_unless_told_otherwise(tmp_path: Path) -> None:
    assert generation_config(EngineConfig(), OWN) == OWN
    assert generation_config(EngineConfig(generation_config="vllm"), OWN) == {"eos_token_id": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))
    assert generation_config(EngineConfig(generation_config=str(tmp_path)), OWN) == {"top_p": 0.5}
    with pytest.raises(ConfigError, match=r"auto, vllm or a folder, but .*does not exist"):
        generation_config(EngineConfig(generation_config=str(tmp_path / "none")), OWN)


def test_the_operators_values_win() -> None:
    text = '{"temperature": 0.1, "max_new_tokens": 9}'
    config = EngineConfig(override_generation_config=text, generation_config="vllm")
    assert generation_config(config, OWN) == {
        "eos_token_id": 7,
        "temperature": 0.1,
        "max_new_tokens": 9,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature=1", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ('{"heat": 1}', "unknown key 'heat'; known: .*temperature"),
        ('{"temperature": -1}', "temperature must be between 0 and 100"),
    ],
)
def test_bad_overrides_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation_config(EngineConfig(override_generation_config=text), OWN)
