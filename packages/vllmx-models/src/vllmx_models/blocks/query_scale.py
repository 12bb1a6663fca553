"""Queries that grow with their position, so that attention over long contexts stays sharp (Llama 4,
Ministral 3, Mistral 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.records import Record

from vllmx_models.config import ConfigReader


class QueryScale(Record):
    """1 + beta * log(1 + floor((position + offset) / length))."""

    beta: float
    length: int
    """Positions before the first growth."""
    offset: int = 0

    def table(self, positions: int) -> F32:
        """(positions,) the factor of each position's query."""
        runs = (np.arange(positions, dtype=np.float64) + self.offset) // self.length
        return (1 + self.beta * np.log1p(runs)).astype(np.float32)


def read_query_scale(read: ConfigReader) -> tuple[ConfigReader, QueryScale | None]:
    """The config without `llama_4_scaling_beta` among its RoPE parameters, and what that says."""
    key = "rope_scaling" if read.has("rope_scaling") else "rope_parameters"
    rope: Any = read.config.get(key)
    if not isinstance(rope, Mapping) or "llama_4_scaling_beta" not in rope:
        return read, None
    inner = ConfigReader(rope, read.architecture)
    beta = inner.optional("llama_4_scaling_beta", 0)
    rest = {name: value for name, value in rope.items() if name not in _OWN}
    plain = ConfigReader({**read.config, key: rest}, read.architecture)
    if beta is None:
        return plain, None
    return plain, QueryScale(beta, inner.integer("original_max_position_embeddings", high=1 << 31))


_OWN = ("llama_4_scaling_beta", "max_position_embeddings")
"""Keys that no RoPE scaling has."""
