"""What this distribution provides. vllmx imports this module at every start: keep it light."""

from __future__ import annotations

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import ModelSpec


@hookimpl
def vllmx_models() -> tuple[ModelSpec, ...]:
    phi, flex_olmo = "vllmx_example_model.phi:Phi", "vllmx_example_model.flex_olmo:flex_olmo"
    electra = "vllmx_example_model.electra"
    return (
        ModelSpec("phi", phi, ("PhiForCausalLM",), ("phi",)),
        ModelSpec("flex-olmo", flex_olmo, ("FlexOlmoForCausalLM",), ("flex_olmo",)),
        ModelSpec(
            "mamba2", "vllmx_example_model.mamba2:mamba2", ("Mamba2ForCausalLM",), ("mamba2",)
        ),
        ModelSpec(
            "olmo-hybrid",
            "vllmx_example_model.olmo_hybrid:olmo_hybrid",
            ("OlmoHybridForCausalLM",),
            ("olmo_hybrid",),
        ),
        ModelSpec("electra", f"{electra}:electra", ("ElectraModel",)),
        ModelSpec(
            "electra-classifier",
            f"{electra}:electra_classifier",
            ("ElectraForSequenceClassification",),
        ),
    )
