"""The hooks of the entry-point group `vllmx`.

A plugin is a small module (or object) with some of these functions, each marked `@hookimpl`, each
without arguments, each returning a tuple of specs. It must import nothing heavy.
"""

from __future__ import annotations

import pluggy

from vllmx_core.plugins.specs import (
    ApiSpec,
    BackendSpec,
    CommandSpec,
    EncoderSpec,
    ExecutorSpec,
    ModelImplSpec,
    ModelSourceSpec,
    ModelSpec,
    ParserSpec,
    QuantizationSpec,
    QuantizerSpec,
    WeightFormatSpec,
)

GROUP = "vllmx"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Hooks:
    """Hook specifications; see the module's docstring."""

    @hookspec
    def vllmx_backends(self) -> tuple[BackendSpec, ...]:
        """Device backends."""
        raise NotImplementedError

    @hookspec
    def vllmx_models(self) -> tuple[ModelSpec, ...]:
        """Model architectures."""
        raise NotImplementedError

    @hookspec
    def vllmx_model_impls(self) -> tuple[ModelImplSpec, ...]:
        """Code for architectures without a plugin of their own."""
        raise NotImplementedError

    @hookspec
    def vllmx_weight_formats(self) -> tuple[WeightFormatSpec, ...]:
        """Checkpoint formats."""
        raise NotImplementedError

    @hookspec
    def vllmx_quantizations(self) -> tuple[QuantizationSpec, ...]:
        """Quantisation schemes."""
        raise NotImplementedError

    @hookspec
    def vllmx_quantizers(self) -> tuple[QuantizerSpec, ...]:
        """Types of in-situ quantisation."""
        raise NotImplementedError

    @hookspec
    def vllmx_encoders(self) -> tuple[EncoderSpec, ...]:
        """Fast code for quantised types."""
        raise NotImplementedError

    @hookspec
    def vllmx_executors(self) -> tuple[ExecutorSpec, ...]:
        """Executors, which run a model on several ranks."""
        raise NotImplementedError

    @hookspec
    def vllmx_commands(self) -> tuple[CommandSpec, ...]:
        """Sub-commands."""
        raise NotImplementedError

    @hookspec
    def vllmx_model_sources(self) -> tuple[ModelSourceSpec, ...]:
        """Finders of a model name's files."""
        raise NotImplementedError

    @hookspec
    def vllmx_parsers(self) -> tuple[ParserSpec, ...]:
        """Formats of answers."""
        raise NotImplementedError

    @hookspec
    def vllmx_apis(self) -> tuple[ApiSpec, ...]:
        """APIs of the HTTP server."""
        raise NotImplementedError
