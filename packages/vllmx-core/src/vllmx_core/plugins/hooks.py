"""The hooks of the entry-point group `vllmx`.

A plugin is a small module (or object) with some of these functions, each marked `@hookimpl`, each
without arguments, each returning a tuple of specs. It must import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping

import pluggy

from vllmx_core.plugins.specs import (
    ApiSpec,
    BackendSpec,
    CommandSpec,
    EncoderSpec,
    ExecutorSpec,
    KVConnectorSpec,
    ModelImplSpec,
    ModelSourceSpec,
    ModelSpec,
    ParserSpec,
    QuantizationSpec,
    QuantizerSpec,
    Spec,
    WeightFormatSpec,
)

GROUP = "vllmx"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
HOOKS: Mapping[str, type[Spec]] = {
    "vllmx_backends": BackendSpec,
    "vllmx_models": ModelSpec,
    "vllmx_model_impls": ModelImplSpec,
    "vllmx_weight_formats": WeightFormatSpec,
    "vllmx_quantizations": QuantizationSpec,
    "vllmx_quantizers": QuantizerSpec,
    "vllmx_encoders": EncoderSpec,
    "vllmx_executors": ExecutorSpec,
    "vllmx_commands": CommandSpec,
    "vllmx_model_sources": ModelSourceSpec,
    "vllmx_parsers": ParserSpec,
    "vllmx_apis": ApiSpec,
    "vllmx_kv_connectors": KVConnectorSpec,
}
"""Each hook and the type of its specs."""
HookSpecs = type("HookSpecs", (), {name: hookspec(lambda: ()) for name in HOOKS})
"""The hooks for pluggy."""
