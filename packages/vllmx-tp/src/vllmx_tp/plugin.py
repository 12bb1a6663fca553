"""The plugin of this distribution; see `vllmx_core.plugins.hooks`."""

from __future__ import annotations

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import ExecutorSpec


@hookimpl
def vllmx_executors() -> tuple[ExecutorSpec, ...]:
    return (ExecutorSpec("tensor-parallel", "vllmx_tp.executor:load"),)
