"""Plugin hooks of this distribution; see `vllmx_core.plugins.hooks`."""

from __future__ import annotations

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import ModelSourceSpec


@hookimpl
def vllmx_model_sources() -> tuple[ModelSourceSpec, ...]:
    # asked before local paths, so that a folder named "demo" never takes the place of the default
    return (ModelSourceSpec("demo", "vllmx_demo.source:demo_model", 200),)
