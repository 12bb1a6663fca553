"""The metadata that clients hang on what is kept."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
"""OpenAI's limits."""
