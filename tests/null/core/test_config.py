"""EngineConfig and the precedence flag > environment > file > default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from vllmx_core.config import EngineConfig, resolve_config
from vllmx_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    port: int = 1
    ratio: float = 0.5
    name: str | None = "n"
    limit: int | None = 7
    verbose: bool = False
    mode: Literal["a", "b"] = "a"
    keys: tuple[str, ...] = ()


def resolve(
    flags: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    file: dict[str, Any] | None = None,
) -> Settings:
    settings: Settings = resolve_config(
        Settings, flags=flags or {}, environment=environment or {}, file=file or {}
    )
    return settings


def test_precedence() -> None:
    file, environment, flags = {"port": 2}, {"VLLMX_PORT": "3"}, {"port": 4}
    assert resolve().port == 1
    assert resolve(file=file).port == 2
    assert resolve(environment=environment, file=file).port == 3
    assert resolve(flags, environment, file).port == 4
    assert resolve({"port": None}, environment, file).port == 3
    assert resolve({"verbose": False}, {"VLLMX_VERBOSE": "1"}).verbose is False


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "80", 80),
        ("ratio", "0.25", 0.25),
        ("ratio", 1, 1.0),
        ("port", 8.0, 8),
        ("name", "none", None),
        ("limit", "null", None),
        ("limit", None, None),
        ("limit", "9", 9),
        ("verbose", "Yes", True),
        ("verbose", "off", False),
        ("verbose", True, True),
        ("mode", "b", "b"),
        ("keys", "x,y", ("x", "y")),
        ("keys", ["x"], ("x",)),
    ],
)
def test_values_are_converted(name: str, text: Any, value: Any) -> None:
    got = getattr(resolve(file={name: text}), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "x"),
        ("port", 1.5),
        ("port", True),
        ("port", math.inf),
        ("port", [1]),
        ("port", None),
        ("ratio", "much"),
        ("verbose", "maybe"),
        ("verbose", 2),
        ("mode", "c"),
        ("keys", 3),
        ("name", {"a": 1}),
    ],
)
def test_wrong_values_name_their_source(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config file key '{name}'"):
        resolve(file={name: value})
    if isinstance(value, str):
        with pytest.raises(ConfigError, match=f"VLLMX_{name.upper()}"):
            resolve(environment={f"VLLMX_{name.upper()}": value})
        with pytest.raises(ConfigError, match=f"--{name}"):
            resolve({name: value})


def test_unknown_file_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown config file key 'prt'; did you mean 'port'"):
        resolve(file={"prt": 1})
    with pytest.raises(ConfigError, match="known: keys, limit, mode"):
        resolve(file={"zzzzzz": 1})
    with pytest.raises(ConfigError, match="unknown config file key 5"):
        resolve(file={5: 1})  # type: ignore[dict-item]


def test_file_keys_take_dashes_or_underscores_but_not_both() -> None:
    config = resolve_config(EngineConfig, flags={}, environment={}, file={"max-num-seqs": 3})
    assert config.max_num_seqs == 3
    with pytest.raises(ConfigError, match="twice"):
        resolve_config(
            EngineConfig, flags={}, environment={}, file={"max-num-seqs": 3, "max_num_seqs": 4}
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 4097),
        ("max_num_batched_tokens", 0),
        ("num_kv_blocks", 0),
        ("num_threads", 0),
        ("max_queue", 0),
        ("block_size", 12),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.01),
        ("memory_fraction", math.nan),
        ("target_itl", "0"),
        ("target_itl", "nan"),
    ],
)
def test_engine_config_names_the_flag_and_the_limit(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")) as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name


def test_engine_config_from_the_environment() -> None:
    environment = {
        "VLLMX_MODEL": "m",
        "VLLMX_TARGET_ITL": "none",
        "VLLMX_MAX_MODEL_LEN": "100",
        "VLLMX_ASYNC_SCHEDULING": "false",
        "VLLMX_UNRELATED": "x",
    }
    config = resolve_config(EngineConfig, flags={}, environment=environment, file={})
    assert (config.model, config.target_itl, config.max_model_len) == ("m", "none", 100)
    assert config.async_scheduling is False
    assert config.name == "m"
    assert EngineConfig(served_model_name="shown").name == "shown"


def test_short_names_of_dtypes_are_taken_everywhere() -> None:
    assert EngineConfig(dtype="bf16").dtype == "bfloat16"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--dtype must be one of auto"):
        EngineConfig(dtype="int3")  # type: ignore[arg-type]
