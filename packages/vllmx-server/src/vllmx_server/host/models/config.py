"""The configuration of one of several models of a server."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One model, by the name that clients use."""

    engine: EngineConfig
    aliases: tuple[str, ...] = ()
    """Other names of it."""
    on_demand: bool = False
    """It is loaded when somebody asks for it."""
    memory_part: float | None = None
    """Most of the memory that it takes, of what is free before the first model is loaded; None:
    `engine.memory_fraction` of what is free when it is loaded."""

    @property
    def name(self) -> str:
        return self.engine.name


def check_models(models: Sequence[ModelConfig]) -> None:
    """Raises ConfigError for names that two models have, and for a first one that is not there from
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
