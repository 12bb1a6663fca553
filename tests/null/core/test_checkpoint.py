"""Opening a checkpoint by its name: formats, quantisations and their errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import ConfigError, ModelNotFoundError, PluginError, UnsupportedModelError
from vllmx_core.plugins.checkpoint import (
    Checkpoint,
    build_model,
    check_quantization,
    open_checkpoint,
    resolve_path,
)
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import ModelSourceSpec, QuantizationSpec, WeightFormatSpec
from vllmx_testing.fake_checkpoint import FakePlugin, NoWeights, make_fake_checkpoint


class Formats:
    """Two formats that fit one folder, a quantisation and a second source."""

    @hookimpl
    def vllmx_weight_formats(self) -> tuple[WeightFormatSpec, ...]:
        return (
            WeightFormatSpec("plain", f"{__name__}:open_plain", ("*.bin", "*.plain")),
            WeightFormatSpec("better", f"{__name__}:open_better", ("*.bin",), priority=1),
        )

    @hookimpl
    def vllmx_quantizations(self) -> tuple[QuantizationSpec, ...]:
        return (QuantizationSpec("halved", f"{__name__}:halve"),)

    @hookimpl
    def vllmx_model_sources(self) -> tuple[ModelSourceSpec, ...]:
        return (
            ModelSourceSpec("last", f"{__name__}:anywhere", priority=-5),
            ModelSourceSpec("never", f"{__name__}:nowhere", priority=50),
        )


def open_plain(path: Path) -> Checkpoint:
    return Checkpoint(path, {"format": "plain"}, NoWeights())


def open_better(path: Path) -> Checkpoint:
    config = {"format": "better", "quantization_config": {"quant_method": "halved", "bits": 4}}
    return Checkpoint(path, config, NoWeights(), {"top_k": 5}, "tokenizer")


class Halved(NoWeights):
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits = config["bits"]


def halve(source: NoWeights, config: Mapping[str, Any]) -> Halved:
    return Halved(config)


def anywhere(model: str, revision: str | None, progress: bool) -> Path | None:
    return Path("/found") / model / str(revision)


def nowhere(model: str, revision: str | None, progress: bool) -> Path | None:
    return None


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.add(FakePlugin, "test:fake")
    registry.add(Formats(), "test:formats")
    return registry


def test_sources_are_asked_by_priority(registry: Registry, tmp_path: Path) -> None:
    folder = make_fake_checkpoint(tmp_path / "m")
    assert resolve_path(registry, str(folder)) == folder
    assert resolve_path(registry, "other", revision="v1") == Path("/found/other/v1")
    with pytest.raises(ModelNotFoundError, match=r"'x'.*no model source is installed"):
        resolve_path(Registry(), "x")


def test_the_format_that_fits_opens(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "a.plain").touch()
    assert open_checkpoint(registry, tmp_path).config == {"format": "plain"}
    assert open_checkpoint(registry, tmp_path / "a.plain").config == {"format": "plain"}
    (tmp_path / "a.bin").touch()
    checkpoint = open_checkpoint(registry, tmp_path)
    assert checkpoint.config["format"] == "better"
    assert isinstance(checkpoint.weights, Halved)
    assert checkpoint.weights.bits == 4
    assert (checkpoint.generation_config, checkpoint.tokenizer) == ({"top_k": 5}, "tokenizer")
    assert open_checkpoint(registry, tmp_path, "plain").config == {"format": "plain"}


def test_what_cannot_be_opened_is_named(registry: Registry, tmp_path: Path) -> None:
    for load_format in ("auto", "plain"):
        with pytest.raises(ModelNotFoundError, match="missing does not exist"):
            open_checkpoint(registry, tmp_path / "missing", load_format)
    with pytest.raises(ModelNotFoundError, match=r"holds no weights.*\*\.bin"):
        open_checkpoint(registry, tmp_path)
    with pytest.raises(PluginError, match="no weight format named 'zip'"):
        open_checkpoint(registry, tmp_path, "zip")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "'gptq'.*known: halved"),
        ({"x": 1}, "'unknown'"),
        ("q4", "object"),
    ],
)
def test_unknown_quantisations_are_refused(
    registry: Registry, tmp_path: Path, quantization: Any, message: str
) -> None:
    folder = make_fake_checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(registry, folder)


def test_the_architecture_is_built(registry: Registry, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(registry, make_fake_checkpoint(tmp_path / "m", vocab_size=300))
    assert build_model(registry, checkpoint).shape.vocab_size == 300


def test_a_stated_quantisation_must_agree(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "gptq"}}
    for path, config, wanted in (
        (tmp_path, {}, None),
        (tmp_path, quantised, "gptq"),
        (tmp_path, quantised, "gptq_marlin"),
        (tmp_path / "x.gguf", {}, "GGUF"),
    ):
        check_quantization(Checkpoint(path, dict(config), NoWeights()), wanted)
    for config, wanted, found in (({}, "fp8", "not quantised"), (quantised, "awq", "with 'gptq'")):
        with pytest.raises(ConfigError, match=rf"--quantization '{wanted}' .*{found}.*--isq"):
            check_quantization(Checkpoint(tmp_path, dict(config), NoWeights()), wanted)


def test_a_mistyped_path_names_its_neighbour(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"did you mean '.*my-model'\?"):
        open_checkpoint(registry, tmp_path / "my-modle")
