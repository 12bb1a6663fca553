"""What this distribution provides. vllmx imports this module at every start: keep it light."""

from __future__ import annotations

from vllmx_core.hooks import hookimpl
from vllmx_core.specs import ModelSpec


@hookimpl
def vllmx_models() -> tuple[ModelSpec, ...]:
    implementation = "vllmx_example_model.phi:Phi"
    return (ModelSpec("phi", implementation, ("PhiForCausalLM",), ("phi",)),)
