"""What the server asks of a model that makes vectors and scores instead of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.pooling import PoolingText
from vllmx_engine.client.request import RequestOptions

from vllmx_server.watch.tracing import TextTimes

F32 = npt.NDArray[np.float32]
Task = Literal["embed", "score", "classify"]
_LOADS: dict[Task, tuple[str, str]] = {
    "embed": ("makes no embeddings", "an embedding model, such as Qwen/Qwen3-Embedding-0.6B"),
    "score": ("scores no texts", "a reranker, such as BAAI/bge-reranker-v2-m3"),
    "classify": ("has no classes", "a model with a classification head"),
}


class PoolingOptions(msgspec.Struct, frozen=True):
    """How inputs become tokens, and whose they are."""

    add_special_tokens: bool = True
    max_tokens: int | None = None
    """The number of first tokens that are taken of longer inputs; None: those are refused."""
    normalize: bool = True
    """Vectors have length 1, scores go through the model's activation."""
    who: RequestOptions = RequestOptions()
    prompt_name: str | None = None
    """The model's prompt that is written before each text; None: its default, if it has one."""


class Pooled(msgspec.Struct, frozen=True):
    """What came of one input."""

    values: F32
    """(dimensions,) of a vector, (1,) of a score, (classes,) of probabilities."""
    num_tokens: int
    texts: Sequence[TextTimes] = ()
    """The texts that were computed for it, those aside that were for an input before it."""


class Pooler(Protocol):
    """A loaded model that makes vectors or scores."""

    @property
    def tasks(self) -> frozenset[Task]:
        """The tasks that the model can do."""
        ...

    @property
    def dimensions(self) -> int:
        """The length of the model's vectors."""
        ...

    @property
    def labels(self) -> Sequence[str]:
        """The names of its classes."""
        ...

    async def pool(
        self, task: Task, inputs: Sequence[PoolingText], options: PoolingOptions
    ) -> list[Pooled]:
        """One result for each input, in their order; cancelling ends the work. Raises
        InvalidRequestError (ContextLengthError among them), QueueFullError, EngineDeadError."""
        ...


def pooler_for(task: Task, pooler: Pooler | None, model: str) -> Pooler:
    """The pooler, if it can do this. Raises InvalidRequestError that says what to load instead."""
    if pooler is not None and task in pooler.tasks:
        return pooler
    lack, remedy = _LOADS[task]
    what = "generates text and" if pooler is None else "is loaded and"
    raise InvalidRequestError(
        f"model {model!r} {what} {lack}: start vllmx serve with {remedy}", param="model"
    )
