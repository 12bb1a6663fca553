"""The choice of what runs a checkpoint: an own file, code for those without one, or nobody with a
way out."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.errors import ConfigError, UnsupportedModelError
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.model_choice import choose_model
from vllmx_core.plugins.registry import Registry, nearest_architecture
from vllmx_core.plugins.specs import ModelImplSpec, ModelSpec
from vllmx_testing.fake_checkpoint import FakeModel, NoWeights

FAKE = "vllmx_testing.fake_checkpoint:FakeModel"
OWN = {"architectures": ["OwnForCausalLM"], "vocab_size": 16}
OTHER = {"architectures": ["Own2ForCausalLM"], "vocab_size": 16}


def fits() -> None:
    return None


def missing() -> str:
    return "it is not installed: pip install it"


def refuses(config: dict[str, Any]) -> FakeModel:
    raise UnsupportedModelError("it has never heard of it")


def registry(*impls: ModelImplSpec) -> Registry:
    found = Registry()
    own = (ModelSpec("own", FAKE, ("OwnForCausalLM", "OlderLMHeadModel")),)
    plugin = SimpleNamespace(vllmx_models=hookimpl(lambda: own))
    if impls:
        plugin.vllmx_model_impls = hookimpl(lambda: impls)
    found.add(plugin, "one:p")
    return found


def impl(name: str = "borrowed", runs: str = FAKE, probe: str = "fits") -> ModelImplSpec:
    implementation = runs if ":" in runs else f"{__name__}:{runs}"
    return ModelImplSpec(name, implementation, "far", f"{__name__}:{probe}", "slow and dear")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs name what stands here, which pytest imports without putting it in sys.modules."""
    import sys

    here = SimpleNamespace(fits=fits, missing=missing, refuses=refuses)
    monkeypatch.setitem(sys.modules, __name__, here)


def checkpoint(config: dict[str, Any], path: str = "model") -> Checkpoint:
    return Checkpoint(Path(path), config, NoWeights())  # type: ignore[arg-type]


def test_an_own_file_comes_first() -> None:
    for wanted in ("auto", "vllmx", "vllm"):
        chosen = choose_model(registry(impl()), checkpoint(OWN), wanted, "near")
        assert (chosen.impl, chosen.backend) == ("vllmx", "near")


def test_others_are_borrowed_with_a_line_of_what_it_costs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "vllmx.models"):
        chosen = choose_model(registry(impl()), checkpoint(OTHER))
    assert isinstance(chosen.model, FakeModel)
    assert (chosen.impl, chosen.backend) == ("borrowed", "far")
    assert caplog.messages == ["borrowed runs this model on backend far: slow and dear"]
    assert choose_model(registry(impl()), checkpoint(OWN), "borrowed", "far").impl == "borrowed"


def test_an_own_file_that_refuses_says_who_may() -> None:
    spec = ModelSpec("own", f"{__name__}:refuses", ("OwnForCausalLM",))
    plugin = SimpleNamespace(
        vllmx_models=hookimpl(lambda: (spec,)), vllmx_model_impls=hookimpl(lambda: (impl(),))
    )
    found = Registry()
    found.add(plugin, "one:p")
    with pytest.raises(UnsupportedModelError, match="heard of it; --model-impl borrowed may run"):
        choose_model(found, checkpoint(OWN))
    with pytest.raises(UnsupportedModelError, match=r"heard of it$"):
        choose_model(found, checkpoint(OWN), "vllmx")


@pytest.mark.parametrize(
    ("impls", "wanted", "backend", "why"),
    [
        ((), "vllmx", "auto", "the nearest that is known is 'OwnForCausalLM'"),
        ((), "vllmx", "auto", r"docs/plugins\.md"),
        ((), "auto", "auto", r"`pip install 'vllmx\[transformers\]'` runs many .*docs/plugins\.md"),
        ((impl(probe="missing"),), "auto", "auto", "borrowed: it is not installed: pip install"),
        ((impl(runs="refuses"),), "auto", "auto", "borrowed: it has never heard of it"),
        ((impl(),), "auto", "near", "runs on backend 'far' alone: leave --backend near out"),
    ],
)
def test_nobody_runs_it(
    impls: tuple[ModelImplSpec, ...], wanted: str, backend: str, why: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"serves .*'Own2ForCausalLM'.*{why}"):
        choose_model(registry(*impls), checkpoint(OTHER), wanted, backend)


@pytest.mark.parametrize(
    ("impls", "wanted", "backend", "why"),
    [
        ((impl(),), "borowed", "auto", "did you mean 'borrowed'.*known: auto, vllmx, borrowed"),
        ((), "transformers", "auto", r"needs vllmx-torch and transformers: `pip install"),
        ((impl(probe="missing"),), "borrowed", "auto", "cannot run here: it is not installed"),
        ((impl(),), "borrowed", "near", "runs on backend 'far' alone"),
    ],
)
def test_flags_that_cannot_be_honoured(
    impls: tuple[ModelImplSpec, ...], wanted: str, backend: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        choose_model(registry(*impls), checkpoint(OWN), wanted, backend)


def test_gguf_files_are_not_borrowed() -> None:
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        choose_model(registry(impl()), checkpoint(OWN, "model.gguf"), "borrowed")


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("Qwen4ForCausalLM", "Qwen3ForCausalLM"),
        ("LlamaModel", "LlamaForCausalLM"),
        ("Qwen3_5ForConditionalGeneration", "Qwen3ForCausalLM"),
        ("RwkvForCausalLM", None),
    ],
)
def test_nearest_architecture(wanted: str, near: str | None) -> None:
    known = ["Qwen3ForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM"]
    assert nearest_architecture(wanted, known) == near


def test_nearest_architecture_of_the_text_inside() -> None:
    inner = {"architectures": ["OwnForCausalLM"]}
    found = registry().unserved({"architectures": ["RwkvForVideo"], "text_config": inner})
    assert "the nearest that is known is 'OwnForCausalLM'" in found
