"""Models that make vectors and scores: what the server asks, and the engine's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.client.pooling import PoolingChoice, PoolingText, makes_vectors, similarity
from vllmx_engine.client.request import RequestOptions
from vllmx_engine.wire.messages import PoolingInfo
from vllmx_engine.wire.outputs import PoolingRequestOutput

from vllmx_server.generating.fields import field_error
from vllmx_server.watch.tracing import TextTimes

F32 = npt.NDArray[np.float32]
Task = Literal["embed", "token_embed", "score", "classify"]
_LOADS: dict[Task, tuple[str, str]] = {
    "embed": ("makes no embeddings", "an embedding model, such as Qwen/Qwen3-Embedding-0.6B"),
    "token_embed": (
        "makes no vectors of tokens",
        "a ColBERT model, such as answerdotai/answerai-colbert-small-v1",
    ),
    "score": ("scores no texts", "a reranker, such as BAAI/bge-reranker-v2-m3"),
    "classify": ("has no classes", "a model with a classification head"),
}


class PoolingOptions(msgspec.Struct, frozen=True):
    """Options for the tokens of inputs, and whose they are."""

    add_special_tokens: bool = True
    max_tokens: int | None = None
    """The number of first tokens that are taken of longer inputs; None: those are refused."""
    normalize: bool = True
    """Vectors have length 1, scores go through the model's activation."""
    who: RequestOptions = RequestOptions()
    prompt_name: str | None = None
    """The model's prompt that is written before each text; None: its default, if it has one."""


class Pooled(msgspec.Struct, frozen=True):
    """The result of one input."""

    values: F32
    """See `vllmx_engine.wire.outputs.PoolingOutput.data`."""
    num_tokens: int
    texts: Sequence[TextTimes] = ()
    """The texts that were computed for it, those aside that were for an input before it."""


class Pooler(Protocol):
    """A loaded model that makes vectors or scores."""

    @property
    def tasks(self) -> frozenset[Task]:
        """The tasks that the model can do."""

    @property
    def dimensions(self) -> int:
        """The length of the model's vectors."""

    @property
    def labels(self) -> Sequence[str]:
        """The names of its classes."""

    async def pool(
        self, task: Task, inputs: Sequence[PoolingText], options: PoolingOptions
    ) -> list[Pooled]:
        """One result for each input, in their order; cancelling ends the work. Raises
        InvalidRequestError (ContextLengthError among them), QueueFullError, EngineDeadError."""


def pooler_for(task: Task, pooler: Pooler | None, model: str) -> Pooler:
    """The pooler, if it can do this. Raises InvalidRequestError that says what to load instead."""
    if pooler is not None and task in pooler.tasks:
        return pooler
    lack, remedy = _LOADS[task]
    what = "generates text and" if pooler is None else "is loaded and"
    raise field_error("model", f"{model!r} {what} {lack}: start vllmx serve with {remedy}")


MAX_PAIRED_BYTES = 64 << 20
"""The most text of all pairs of a call: one that is compared with many is tokenised with each."""


class EnginePooler:
    """A `vllmx_server.generating.pooling.Pooler`."""

    def __init__(self, llm: AsyncLLM, model: PoolingInfo) -> None:
        self._llm, self._model = llm, model
        self.tasks: frozenset[Task] = frozenset(model.tasks)
        self.dimensions = model.size
        self.labels: Sequence[str] = model.labels

    async def pool(
        self, task: Task, inputs: Sequence[PoolingText], options: PoolingOptions
    ) -> list[Pooled]:
        if task == "score" and makes_vectors(self.tasks):
            return await self._compared(inputs, options)
        _check_pairs(inputs)
        return await self._answers(task, inputs, options)

    async def _compared(
        self, pairs: Sequence[PoolingText], options: PoolingOptions
    ) -> list[Pooled]:
        """Scores of two texts by their vectors; each text is computed once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in (pair.text, pair.pair or "")))
        found = await self._answers("score", [PoolingText(text) for text in texts], options)
        by_text = dict(zip(texts, found, strict=True))

        def scores() -> list[float]:
            return [
                similarity(by_text[one.text].values, by_text[one.pair or ""].values)
                for one in pairs
            ]

        answers, told = [], set[str]()
        # On a thread: the vectors of two texts' tokens have millions of products.
        for pair, score in zip(pairs, await asyncio.to_thread(scores), strict=True):
            both = (pair.text, pair.pair or "")
            first, second = by_text[both[0]], by_text[both[1]]
            new = [text for text in dict.fromkeys(both) if text not in told]
            told.update(new)
            times = [each for text in new for each in by_text[text].texts]
            values = np.array([score], np.float32)
            answers.append(Pooled(values, first.num_tokens + second.num_tokens, times))
        return answers

    async def _answers(
        self, task: Task, texts: Sequence[PoolingText], options: PoolingOptions
    ) -> list[Pooled]:
        choice = PoolingChoice(
            options.add_special_tokens,
            options.max_tokens,
            None if options.normalize else False,
            prompt_name=options.prompt_name,
        )
        who = replace(options.who, cache_salt=options.who.client, session_id="")
        outputs = await self._llm.pool(task, texts, choice, who)
        return [_pooled(each) for each in outputs]


def _check_pairs(texts: Sequence[PoolingText]) -> None:
    size = sum(each.num_bytes for each in texts if each.pair is not None)
    if size > MAX_PAIRED_BYTES:
        raise InvalidRequestError(
            f"the pairs of this call have {size} bytes of text, where a text that is compared with"
            f" several counts each time; at most {MAX_PAIRED_BYTES} are taken: split the call, or"
            " shorten that text"
        )


def _pooled(output: PoolingRequestOutput) -> Pooled:
    num_tokens, metrics = len(output.prompt_token_ids), output.metrics
    times = [] if metrics is None else [TextTimes(num_tokens, output.text_s, metrics)]
    return Pooled(output.outputs.data, num_tokens, times)


def pooler_of(llm: AsyncLLM) -> Pooler | None:
    """The pooler of a model that makes vectors or scores; None for another one."""
    pooling = llm.info.pooling
    return None if pooling is None else EnginePooler(llm, pooling)
