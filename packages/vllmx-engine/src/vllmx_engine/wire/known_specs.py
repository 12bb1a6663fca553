"""What plugins provide, on its way to the core process, which need not look for any then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import (
    BackendSpec,
    EncoderSpec,
    ExecutorSpec,
    ModelImplSpec,
    ModelSourceSpec,
    ModelSpec,
    QuantizationSpec,
    QuantizerSpec,
    WeightFormatSpec,
)


class KnownSpecs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a core may need of a registry: (key of the plugin, spec)."""

    backends: list[tuple[str, BackendSpec]]
    models: list[tuple[str, ModelSpec]]
    model_impls: list[tuple[str, ModelImplSpec]]
    weight_formats: list[tuple[str, WeightFormatSpec]]
    quantizations: list[tuple[str, QuantizationSpec]]
    quantizers: list[tuple[str, QuantizerSpec]]
    encoders: list[tuple[str, EncoderSpec]]
    executors: list[tuple[str, ExecutorSpec]]
    model_sources: list[tuple[str, ModelSourceSpec]]
    preferred: list[str]

    @classmethod
    def of(cls, registry: Registry) -> KnownSpecs:
        """What a registry knows."""
        return cls(
            backends=registry.provided(BackendSpec),
            models=registry.provided(ModelSpec),
            model_impls=registry.provided(ModelImplSpec),
            weight_formats=registry.provided(WeightFormatSpec),
            quantizations=registry.provided(QuantizationSpec),
            quantizers=registry.provided(QuantizerSpec),
            encoders=registry.provided(EncoderSpec),
            executors=registry.provided(ExecutorSpec),
            model_sources=registry.provided(ModelSourceSpec),
            preferred=list(registry.preferred),
        )

    def registry(self) -> Registry:
        """A registry that knows exactly this."""
        by_hook: dict[str, list[tuple[str, Any]]] = {
            f"vllmx_{name}": getattr(self, name)
            for name in self.__struct_fields__
            if name != "preferred"
        }
        registry = Registry()
        keys = {key: None for pairs in by_hook.values() for key, _ in pairs}
        for key in keys:
            hooks = {
                hook: tuple(spec for owner, spec in pairs if owner == key)
                for hook, pairs in by_hook.items()
            }
            registry.add(_Plugin(hooks), key)
        registry.prefer(self.preferred)
        return registry


class _Plugin:
    """A plugin whose hooks return what is given."""

    def __init__(self, hooks: dict[str, tuple[Any, ...]]) -> None:
        for name, specs in hooks.items():
            setattr(self, name, _hook(name, specs))


def _hook(name: str, specs: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
    def hook() -> tuple[Any, ...]:
        return specs

    hook.__name__ = name
    return hookimpl(hook)
