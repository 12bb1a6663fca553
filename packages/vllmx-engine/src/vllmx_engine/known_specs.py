"""What plugins provide, on its way to the core process, which need not look for any then."""

from __future__ import annotations

import msgspec
from vllmx_core.hooks import hookimpl
from vllmx_core.registry import Registry
from vllmx_core.specs import (
    BackendSpec,
    EncoderSpec,
    ExecutorSpec,
    ModelSourceSpec,
    ModelSpec,
    QuantizationSpec,
    QuantizerSpec,
    WeightFormatSpec,
)


class KnownSpecs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a core may need of a registry."""

    backends: list[BackendSpec]
    models: list[ModelSpec]
    weight_formats: list[WeightFormatSpec]
    quantizations: list[QuantizationSpec]
    quantizers: list[QuantizerSpec]
    encoders: list[EncoderSpec]
    executors: list[ExecutorSpec]
    model_sources: list[ModelSourceSpec]

    @classmethod
    def of(cls, registry: Registry) -> KnownSpecs:
        """What a registry knows."""
        return cls(
            backends=registry.all(BackendSpec),
            models=registry.all(ModelSpec),
            weight_formats=registry.all(WeightFormatSpec),
            quantizations=registry.all(QuantizationSpec),
            quantizers=registry.all(QuantizerSpec),
            encoders=registry.all(EncoderSpec),
            executors=registry.all(ExecutorSpec),
            model_sources=registry.all(ModelSourceSpec),
        )

    def registry(self) -> Registry:
        """A registry that knows exactly this."""
        registry = Registry()
        registry.add(_Plugin(self), "plugins of the API process")
        return registry


class _Plugin:
    def __init__(self, specs: KnownSpecs) -> None:
        self._specs = specs

    @hookimpl
    def vllmx_backends(self) -> tuple[BackendSpec, ...]:
        return tuple(self._specs.backends)

    @hookimpl
    def vllmx_models(self) -> tuple[ModelSpec, ...]:
        return tuple(self._specs.models)

    @hookimpl
    def vllmx_weight_formats(self) -> tuple[WeightFormatSpec, ...]:
        return tuple(self._specs.weight_formats)

    @hookimpl
    def vllmx_quantizations(self) -> tuple[QuantizationSpec, ...]:
        return tuple(self._specs.quantizations)

    @hookimpl
    def vllmx_quantizers(self) -> tuple[QuantizerSpec, ...]:
        return tuple(self._specs.quantizers)

    @hookimpl
    def vllmx_encoders(self) -> tuple[EncoderSpec, ...]:
        return tuple(self._specs.encoders)

    @hookimpl
    def vllmx_executors(self) -> tuple[ExecutorSpec, ...]:
        return tuple(self._specs.executors)

    @hookimpl
    def vllmx_model_sources(self) -> tuple[ModelSourceSpec, ...]:
        return tuple(self._specs.model_sources)
