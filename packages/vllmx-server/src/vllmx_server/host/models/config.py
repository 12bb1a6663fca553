"""Configurations of several models, and their parts of the memory.

A part is a fraction of the memory that is free before the first model is loaded, and the most that
the model takes. Models loaded at the start without a part share the rest of `memory_fraction`; a
model loaded on demand takes of what is free then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One model, by the name that clients use."""

    engine: EngineConfig
    aliases: tuple[str, ...] = ()
    """Other names of it."""
    on_demand: bool = False
    """It is loaded with its first request."""
    memory_part: float | None = None
    """Most of the memory that it takes, of what is free before the first model is loaded; None:
    `engine.memory_fraction` of what is free when it is loaded."""

    @property
    def name(self) -> str:
        return self.engine.name


def check_models(models: Sequence[ModelConfig]) -> None:
    """Raises ConfigError for names that two models share, and for a first one that is not loaded at
    the start."""
    if models and models[0].on_demand:
        raise ConfigError(
            f"model {models[0].name!r} is the first one, which requests without a model get, so it"
            " is loaded at the start: leave out load=on-demand, or name another model first",
            param="model",
        )
    owners: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if name in owners:
                raise ConfigError(
                    f"two models are called {name!r} ({owners[name]!r} and {model.engine.model!r}):"
                    " give each a name of its own",
                    param="model",
                )
            owners[name] = model.engine.model


def with_parts(models: Sequence[ModelConfig], own: Mapping[str, float]) -> list[ModelConfig]:
    """The models with their parts.

    Args:
        models: in the order in which they are loaded.
        own: the parts that are configured for single models, by name.

    Raises:
        ConfigError: the parts of models that are loaded together are more than there is.
    """
    together = [model for model in models if not model.on_demand]
    said = {model.name: own[model.name] for model in together if model.name in own}
    rest = [model for model in together if model.name not in own and not _is_sized(model.engine)]
    taken, listed = sum(said.values()), ", ".join(f"{name} {part:g}" for name, part in said.items())
    if taken > 1.0 + 1e-9:
        raise ConfigError(
            f"models that are loaded together take {taken:g} of the memory by memory_fraction"
            f" ({listed}), which must be at most 1: lower some, or load one on demand",
            param="memory_fraction",
        )
    left = rest[0].engine.memory_fraction - taken if rest else 0.0
    if rest and left <= 1e-9:
        raise ConfigError(
            f"memory_fraction of other models ({listed}) leaves nothing of"
            f" {rest[0].engine.memory_fraction:g} for {rest[0].name}: lower some, or load one on"
            " demand",
            param="memory_fraction",
        )
    parts = {**own, **{model.name: left / len(rest) for model in rest}}
    found = [msgspec.structs.replace(model, memory_part=parts.get(model.name)) for model in models]
    if found and found[0].memory_part is not None:
        found[0] = msgspec.structs.replace(found[0], engine=_part_of_free(found[0]))
    return found


def engine_of(model: ModelConfig, free_bytes: int) -> EngineConfig:
    """The settings for the core of a model other than the first. `free_bytes`: before the first was
    loaded; 0: unknown."""
    if model.memory_part is None:
        return model.engine
    if not free_bytes:
        return _part_of_free(model)
    return dataclasses.replace(model.engine, memory_bytes=max(1, part_bytes(model, free_bytes)))


def part_bytes(model: ModelConfig, free_bytes: int) -> int:
    """The most that a model with a part takes."""
    assert model.memory_part is not None
    return int(model.memory_part * free_bytes)


def _part_of_free(model: ModelConfig) -> EngineConfig:
    assert model.memory_part is not None
    return dataclasses.replace(model.engine, memory_fraction=model.memory_part)


def _is_sized(engine: EngineConfig) -> bool:
    """True if its memory is configured."""
    sizes = (engine.num_kv_blocks, engine.kv_cache_memory_bytes, engine.memory_bytes)
    return any(size is not None for size in sizes)
