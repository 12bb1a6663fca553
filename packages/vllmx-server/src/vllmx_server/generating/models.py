"""The models of a server, as APIs see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

State = Literal["unloaded", "loading", "loaded", "failed"]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One model of several, loaded or not."""

    name: str
    aliases: tuple[str, ...]
    root: str
    state: State
    num_bytes: int | None = None
    """The bytes of weights and KV cache, once it was loaded."""
    max_model_len: int | None = None
    takes_images: bool | None = None
    error: str | None = None
    """Why it could not be loaded."""


class ModelHost(Protocol):
    """Loads and unloads models, here or in another process."""

    async def load(self, name: str) -> object:
        """Returns when the model serves. Raises what loading met."""
        ...

    async def unload(self, name: str) -> None:
        """Ends a model's core. Raises InvalidRequestError while requests need it."""
        ...

    async def cards(self) -> Sequence[ModelInfo]:
        """All models but the default one."""
        ...
