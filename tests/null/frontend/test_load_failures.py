"""Nothing stays behind of a load, whatever goes wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import UnsupportedModelError, VllmxError
from vllmx_core.plugins.registry import Registry
from vllmx_engine.core import load
from vllmx_engine.core.found_model import find_model
from vllmx_engine.llm import LLM
from vllmx_testing.fake import FakeLoadedModel
from vllmx_testing.fake_checkpoint import NoWeights


@pytest.fixture
def open_now(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many loaded models and sources of weights are open."""
    counts = {"models": 0, "sources": 0}

    def opening(kind: type, name: str) -> Callable[..., None]:
        original = getattr(kind, "__init__")  # noqa: B009

        def init(self: Any, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            counts[name] += 1

        return init

    def closing(kind: type, name: str) -> Callable[[Any], None]:
        original = kind.close  # type: ignore[attr-defined]

        def close(self: Any) -> None:
            original(self)
            counts[name] -= 1

        return close

    for kind, name in ((FakeLoadedModel, "models"), (NoWeights, "sources")):
        monkeypatch.setattr(kind, "__init__", opening(kind, name))
        monkeypatch.setattr(kind, "close", closing(kind, name))
    return counts


def rewrite(folder: str, name: str, **values: Any) -> None:
    path = Path(folder) / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))


@pytest.mark.parametrize(
    ("change", "config"),
    [
        ({"architectures": ["Perceptron"]}, {}),
        ({"architectures": ["\ud800"]}, {}),
        ({"quantization_config": 5}, {}),
        ({"quantization_config": {"quant_method": "\ud800" * 9999}}, {}),
        ({}, {"backend": "abacus"}),
        ({}, {"isq": "q4_k"}),
        ({}, {"max_model_len": 513}),
        ({}, {"max_model_len": 64, "num_kv_blocks": 3}),
        ({}, {"tokenizer": "nowhere"}),
        ({}, {"chat_template": "nowhere"}),
    ],
)
def test_nothing_stays_open(
    folder: str,
    registry: Registry,
    open_now: dict[str, int],
    change: dict[str, Any],
    config: dict[str, Any],
) -> None:
    rewrite(folder, "config.json", **change)
    with pytest.raises(VllmxError) as raised:
        LLM(folder, registry=registry, **{"backend": "fake", **config})
    assert len(raised.value.message.encode()) < 1000
    assert open_now == {"models": 0, "sources": 0}


@pytest.mark.parametrize("name", ["core_info", "log_info", "fitting_length", "EngineCore"])
def test_a_bug_after_loading_closes_the_model(
    folder: str,
    registry: Registry,
    open_now: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(load, name, broken)
    found = find_model(EngineConfig(model=folder, backend="fake"), registry)
    with pytest.raises(ZeroDivisionError):
        load.load_core(found)
    assert open_now == {"models": 0, "sources": 0}


@pytest.mark.parametrize("listed", ["FakeForCausalLM", {"0": "x"}, 5, [], [5], None, True])
def test_architectures_that_are_no_list_leave_the_model_type(
    folder: str, registry: Registry, listed: Any
) -> None:
    rewrite(folder, "config.json", architectures=listed)
    with LLM(folder, registry=registry, backend="fake") as llm:
        assert llm.info.architecture == "fake"
    rewrite(folder, "config.json", architectures=listed, model_type=["x" * 500])
    with pytest.raises(UnsupportedModelError, match="model_type") as raised:
        LLM(folder, registry=registry, backend="fake")
    assert len(raised.value.message) < 300


def test_defaults_of_the_author_that_no_message_holds_are_passed_over(
    folder: str, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(folder, "generation_config.json", temperature=10**400, top_k=7, note="\ud800" * 500)
    with LLM(folder, registry=registry, backend="fake") as llm:
        assert llm.info.generation_config == {"top_k": 7}
    assert "temperature" in caplog.text
    assert len(caplog.text) < 3000
