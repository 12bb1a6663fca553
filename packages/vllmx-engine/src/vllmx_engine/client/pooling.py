"""Vectors and scores of texts: requests for the core, and results from its answers."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from vllmx_core.errors import ContextLengthError, InvalidRequestError, NonFiniteLogitsError
from vllmx_core.plan import F32
from vllmx_core.records import Record
from vllmx_core.sampling import SamplingParams

from vllmx_engine.client.request import Request, RequestOptions, check_truncation
from vllmx_engine.text.tokenizer import Tokenizer, TooManyTokensError
from vllmx_engine.wire.messages import CoreInfo, CoreRequest, PoolingInfo, PoolingTask, pack_ids
from vllmx_engine.wire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput

_MAX_CUTS = 4


def encode_fitting(
    tokenizer: Tokenizer,
    parts: tuple[str, str, str],
    first: str | None,
    add_special_tokens: bool,
    limit: int,
    *,
    is_cut: bool,
) -> tuple[list[int], list[int]]:
    """Returns ids, and for each the text of a pair that it belongs to.

    Args:
        parts: the prefix of a text, the text, and its suffix.
        first: the other text of a pair, before these parts.
        limit: the most tokens.
        is_cut: a longer text is cut at its end; prefix and suffix stay.

    Raises TooManyTokensError where nothing is cut, InvalidRequestError.
    """
    before, text, behind = parts
    if is_cut:  # of each no more than could stay is looked at
        before, text = (tokenizer.part_with(each, limit) for each in (before, text))
        first = None if first is None else tokenizer.part_with(first, limit)
    for _ in range(_MAX_CUTS):
        try:
            return tokenizer.encode_pair(
                first, before + text + behind, add_special_tokens, limit=limit, exact=is_cut
            )
        except TooManyTokensError as error:
            if not is_cut:
                raise
            if not text:
                break
            surplus = error.num_tokens - limit
        text = tokenizer.without_last(text, surplus)
    ids, types = tokenizer.encode_pair(first, before + text + behind, add_special_tokens)
    return ids[:limit], types[:limit]


_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
_REMEDY = {
    "embed": "an embedding model, such as Qwen/Qwen3-Embedding-0.6B, or this one with --task embed",
    "token_embed": "a ColBERT model, such as answerdotai/answerai-colbert-small-v1",
    "score": "a reranker, such as BAAI/bge-reranker-v2-m3",
    "classify": "a model with a classification head",
}


@contextmanager
def naming(index: int, count: int) -> Iterator[None]:
    """An error about one of several inputs says which, counted from 0."""
    try:
        yield
    except (InvalidRequestError, NonFiniteLogitsError) as error:
        about_it = isinstance(error, NonFiniteLogitsError) or error.param == "input"
        if count == 1 or not about_it:
            raise
        raise type(error)(f"input {index}: {error.message}", param=error.param) from error


class PoolingText(Record):
    """One input of a call that wants vectors or scores."""

    text: str = ""
    ids: Sequence[int] | None = None
    """The token ids to take instead of `text`."""
    pair: str | None = None
    """Another text that `text` is compared with."""

    @property
    def num_bytes(self) -> int:
        """The size of the text, about."""
        ids = () if self.ids is None else self.ids
        return len(self.text) + len(self.pair or "") + 4 * len(ids)


class PoolingChoice(Record):
    """The conversion of inputs into tokens, and of the model's output into results."""

    add_special_tokens: bool = True
    max_tokens: int | None = None
    """The number of first tokens that are taken of longer inputs; None: those are refused."""
    normalize: bool | None = None
    """Vectors have length 1, scores go through the model's activation; None: as the model says."""
    dimensions: int | None = None
    """Only the first so many numbers of a vector."""
    prompt_name: str | None = None
    """The name of the model's prompt that is written before each text; None: its default, if any.
    """


def first_tokens(truncate: int | None, limit: int) -> int | None:
    """`PoolingChoice.max_tokens` for a `truncate_prompt_tokens`; -1: as many as the model takes.
    Raises InvalidRequestError."""
    if truncate is None:
        return None
    check_truncation(truncate, limit)
    return limit if truncate < 0 else truncate


class PoolingBuilder:
    """Checks inputs and makes requests of them. Thread-safe.

    Args:
        info: of the loaded core.
    """

    def __init__(self, tokenizer: Tokenizer, info: CoreInfo) -> None:
        self.info = info
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    def model(self, task: PoolingTask) -> PoolingInfo:
        """Returns the model's pooling. Raises InvalidRequestError, with a model to load instead,
        for another task."""
        pooling = self.info.pooling
        if pooling is not None and task in pooling.tasks:
            return pooling
        what = "generates text" if pooling is None else f"is there to {pooling.tasks[0]} texts"
        raise InvalidRequestError(
            f"model {self.info.model!r} {what} and cannot {task} them: load {_REMEDY[task]}",
            param="model",
        )

    def build(
        self, task: PoolingTask, each: PoolingText, choice: PoolingChoice, options: RequestOptions
    ) -> Request:
        """Raises InvalidRequestError, ContextLengthError among them."""
        model, limit = self.model(task), self.info.max_model_len
        if choice.dimensions is not None and not 1 <= choice.dimensions <= model.size:
            raise InvalidRequestError(
                f"dimensions must be between 1 and the model's {model.size}, got"
                f" {choice.dimensions}",
                param="dimensions",
            )
        try:
            ids, types = self._tokens(model, each, choice, min(choice.max_tokens or limit, limit))
        except TooManyTokensError as error:
            raise ContextLengthError(
                f"the text has {error.count} tokens, the model takes {limit}: shorten it,"
                " or have it cut (truncate_prompt_tokens: -1, in TEI's routes truncate: true)",
                param="input",
            ) from None
        if not ids:
            raise InvalidRequestError("the text has no tokens: give at least one", param="input")
        wrong = [token for token in ids if not 0 <= token < self.info.vocab_size]
        if wrong:
            raise InvalidRequestError(
                f"the text names token id {wrong[0]}, but the vocabulary has ids 0 to"
                f" {self.info.vocab_size - 1}",
                param="input",
            )
        name = f"{self.info.id_prefix}pool-{next(self._numbers)}"
        core = CoreRequest(
            request_id=name,
            prompt=pack_ids(ids),
            params=_PARAMS,
            max_tokens=1,
            seed=0,
            pools=True,
            token_types=pack_ids(types) if any(types) else b"",
            priority=options.priority,
            client=options.client,
            cache_salt=options.cache_salt,
            log_id=options.log_id,
            share=options.share,
            queue_timeout_s=options.queue_timeout_s,
        )
        return Request(name, None, ids, _PARAMS, [core], None)

    def _tokens(
        self, model: PoolingInfo, each: PoolingText, choice: PoolingChoice, limit: int
    ) -> tuple[list[int], list[int]]:
        """Ids, and which text of a pair each belongs to. Raises TooManyTokensError where nothing is
        cut."""
        is_cut = choice.max_tokens is not None
        if each.ids is not None:
            if len(each.ids) > limit and not is_cut:
                raise TooManyTokensError(len(each.ids), exact=True)
            return list(each.ids)[:limit], []
        first, parts = self._parts(model, each, choice)
        special = choice.add_special_tokens
        return encode_fitting(self._tokenizer, parts, first, special, limit, is_cut=is_cut)

    def _parts(
        self, model: PoolingInfo, each: PoolingText, choice: PoolingChoice
    ) -> tuple[str | None, tuple[str, str, str]]:
        """The first text of a pair, if there are two, and the `parts` of `encode_fitting`."""
        if each.pair is None:
            return None, (self._prompt(model, choice), each.text, "")
        if not model.pair:
            return each.text, ("", each.pair, "")
        head, rest = model.pair.split("{query}", 1)
        middle, tail = rest.split("{document}", 1)
        return None, (head + each.text + middle, each.pair, tail)

    @staticmethod
    def _prompt(model: PoolingInfo, choice: PoolingChoice) -> str:
        name = model.default_prompt if choice.prompt_name is None else choice.prompt_name
        if name is None:
            return ""
        if name not in model.prompts:
            known = ", ".join(model.prompts) or "none"
            raise InvalidRequestError(
                f"the model has no prompt {name!r}; known: {known}", param="prompt_name"
            )
        return model.prompts[name]


def makes_vectors(tasks: Container[str]) -> bool:
    """True for a model that scores two texts by their vectors."""
    return "embed" in tasks or "token_embed" in tasks


def finished_values(model: PoolingInfo, vector: F32, choice: PoolingChoice) -> F32:
    """Returns the user's result of the model's output."""
    if makes_vectors(model.tasks):
        normalize = model.normalize if choice.normalize is None else choice.normalize
        if "token_embed" in model.tasks:
            vector = vector.reshape(-1, model.size)
        if model.activation == "log1p":
            sparse: F32 = np.log1p(np.maximum(vector, 0))
            return sparse
        return first_values(vector, choice.dimensions, normalize=normalize)
    if choice.normalize is False:
        return vector[-1:] - vector[:1] if model.activation == "yes" else vector
    match model.activation:
        case "sigmoid":
            return _sigmoid(vector)
        case "yes":
            return _sigmoid(vector[-1:] - vector[:1])
        case "softmax":
            shares = np.exp(vector - vector.max())
            found: F32 = (shares / shares.sum()).astype(np.float32)
            return found
    return vector


def pooled_output(
    model: PoolingInfo,
    output: RequestOutput,
    choice: PoolingChoice,
    text_s: float = 0.0,
) -> PoolingRequestOutput:
    """The output of a request that has ended, well or not. `text_s`: what tokenising took."""
    data = np.frombuffer(output.outputs[0].vector, np.float32)
    if data.size:
        data = finished_values(model, data, choice)
    return PoolingRequestOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        outputs=PoolingOutput(data),
        error=output.error,
        metrics=output.metrics,
        text_s=text_s,
    )


def pairs_of(
    first: str | Sequence[str], second: str | Sequence[str]
) -> tuple[list[str], list[str]]:
    """One text with each of several, or pair by pair. Raises InvalidRequestError."""
    left = [first] if isinstance(first, str) else list(first)
    right = [second] if isinstance(second, str) else list(second)
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right) or not left:
        raise InvalidRequestError(
            f"{len(left)} texts cannot be paired with {len(right)}: give one, or as many as the"
            " others",
            param="text_1",
        )
    return left, right


def similarity_output(
    first: PoolingRequestOutput, second: PoolingRequestOutput
) -> PoolingRequestOutput:
    """The score of two texts by their vectors."""
    error = first.error or second.error
    score = [] if error else [similarity(first.outputs.data, second.outputs.data)]
    return PoolingRequestOutput(
        request_id=f"{first.request_id},{second.request_id}",
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        outputs=PoolingOutput(np.array(score, np.float32)),
        error=error,
    )


def similarity(first: F32, second: F32) -> float:
    """Returns the cosine of two vectors, from -1 to 1; 0 if one is zero. Vectors of the tokens of a
    query and of a document, (n, D), give MaxSim (arXiv:2004.12832): the sum over the query's of the
    greatest product with one of the document's."""
    if first.ndim > 1:
        return float((first @ second.T).max(axis=1).sum())
    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    found = float(first @ second) / lengths if lengths else 0.0
    return min(1.0, max(-1.0, found))  # sums are rounded


def first_values(vector: F32, dimensions: int | None, *, normalize: bool) -> F32:
    """The first `dimensions` numbers of vectors (..., D), of length 1 with `normalize`."""
    cut = vector if dimensions is None else vector[..., :dimensions]
    if not normalize:
        return cut
    lengths = np.linalg.norm(cut, axis=-1, keepdims=True)
    found: F32 = (cut / np.where(lengths, lengths, 1)).astype(np.float32)
    return found


def _sigmoid(x: F32) -> F32:
    found: F32 = (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)
    return found
