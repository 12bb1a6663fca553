"""Answers of POST /v1/embeddings, /pooling, /score, /rerank, /classify."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from vllmx_server.generating.answers import PoolingUsage
from vllmx_server.schema.record import Record


class PoolingList(Record, kw_only=True):
    """The fields that lists of rows share."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PoolingUsage


class Embedding(Record, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """The vector as numbers, or as base64 of 32-bit floats, little-endian."""


class EmbeddingList(PoolingList, kw_only=True):
    data: list[Embedding]


class PooledRow(Record, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str
    """A vector, a vector for each token, or the probabilities of the classes."""


class PooledList(PoolingList, kw_only=True):
    data: list[PooledRow]


class Classified(Record, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifiedList(PoolingList, kw_only=True):
    data: list[Classified]


class Score(Record, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(PoolingList, kw_only=True):
    data: list[Score]


class RankedText(Record, kw_only=True):
    text: str


class Ranked(Record, kw_only=True):
    index: int
    """The place of the document among those that were sent."""
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Record, kw_only=True):
    """The documents, the best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


class RankedByTEI(Record, kw_only=True):
    """One text of a TEI ranking, which lists the best first."""

    index: int
    """The place of the text among those that were sent."""
    score: float
    text: str | UnsetType = UNSET
