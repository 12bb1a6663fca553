"""What a model that answers with vectors or scores does, for its users."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingTask = Literal["embed", "score", "classify"]
Activation = Literal["none", "sigmoid", "softmax", "yes"]


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Filled in while the model is loaded."""

    tasks: list[PoolingTask]
    size: int
    """Numbers of a vector, or classes."""
    labels: list[str] = []
    """The names of the classes."""
    activation: Activation = "none"
    """The function from what the model gives to scores; yes: the share of the last of two."""
    normalize: bool = True
    """Vectors are made to have length 1 where nobody says otherwise."""
    prompts: dict[str, str] = {}
    """What is written before a text, by the name of what it is for."""
    default_prompt: str | None = None
    """Name of the prompt of texts without one."""
    pair: str = ""
    """A pair of texts with {query} and {document} in it; empty: as the tokenizer joins two."""
