"""Turns what a user asks into messages for the core: tokens, limits, seeds, choices."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from vllmx_core.bounds import BOUNDS
from vllmx_core.errors import ContextLengthError, InvalidRequestError
from vllmx_core.records import Record, field
from vllmx_core.sampling import SamplingParams

from vllmx_engine.client.answers import AnswerReaders
from vllmx_engine.client.request_limits import (
    check_encoded,
    check_logprobs,
    checked_ids,
    id_outside,
    most_scored_tokens,
    resolve_logprobs,
)
from vllmx_engine.core.generation_config import default_params, eos_ids
from vllmx_engine.grammar.spec import grammar_spec
from vllmx_engine.text.stop import StopSet
from vllmx_engine.text.tokenizer import Tokenizer, TooManyTokensError
from vllmx_engine.wire.grammars import FreePart, Grammar, GrammarSpec, Thoughts
from vllmx_engine.wire.messages import (
    CoreInfo,
    CoreRequest,
    Follower,
    choices_of,
    inputs_of,
    pack_ids,
)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}."""

_SEED_SPACE = 1 << 64


class Request(Record):
    """A checked request, ready for the core."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    core: list[CoreRequest]
    """One for each choice that is generated (best_of, or n)."""
    stops: StopSet | None
    arrival_s: float = field(default_factory=time.monotonic)
    text_s: float = 0.0
    """Seconds of rendering and tokenising before `arrival_s`, including the wait for a thread."""
    grammar_s: float = 0.0
    """Seconds of the grammar check before that."""
    goes_on: bool = True
    """The answer's text goes on with that of the prompt; False: a decoder begins anew."""
    readers: AnswerReaders | None = None
    """The readers of a conversation's answers, where they hold more than content."""

    def timed(self, grammar_s: float, text_begun_s: float) -> Request:
        """The request with what its preparation took; `text_begun_s` is of `time.monotonic`."""
        text_s = max(0.0, self.arrival_s - text_begun_s)
        return msgspec.structs.replace(self, grammar_s=grammar_s, text_s=text_s)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the prompt, and tokens to generate at most in each choice."""
        return len(self.prompt_ids), self.core[0].max_tokens


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The client that asks, and how urgently."""

    priority: int = 0
    """Smaller is served first; 32 bits."""
    client: str = ""
    """The name of the client: capacity is shared fairly between clients."""
    cache_salt: str = ""
    """Only requests of one salt share cached prefixes."""
    session_id: str = ""
    """Requests of one session go on with one another."""
    log_id: str = ""
    """The request's name in logs, next to our own id: of letters, digits and `_.:-`."""
    share: float = 1.0
    """The client's weight in the fair share of capacity: 2 gets twice as much as 1."""
    queue_timeout_s: float = 0.0
    """It ends with QueueTimeoutError when it waited so long for its turn; 0: never."""
    at_end: bool = False
    """Nobody looks at the answer before it ends: its tokens may come many at a time."""
    adapter: str = ""
    """The name of the LoRA adapter that changes the model for it; empty: none, or the base's."""
    prediction: str = ""
    """A text that the answer may repeat in parts: the engine drafts from it, which saves time and
    changes no token."""

    def __post_init__(self) -> None:
        BOUNDS["priority"].checked("priority", self.priority)


def check_truncation(keep: int, limit: int) -> None:
    """Raises InvalidRequestError for a `truncate_prompt_tokens` out of bounds, or greater than a
    context of `limit` tokens."""
    BOUNDS["truncate_prompt_tokens"].checked("truncate_prompt_tokens", keep)
    if keep > limit:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {keep}, more than the context of {limit} tokens: lower"
            " it, or set -1 for as many as fit",
            param="truncate_prompt_tokens",
        )


class RequestBuilder:
    """Checks requests and makes `CoreRequest`s of them. Thread-safe.

    Args:
        tokenizer: of the model.
        info: of the loaded core: its limits.
        seed: `EngineConfig.seed`: seeds of requests without one follow from it, in order.
    """

    def __init__(self, tokenizer: Tokenizer, info: CoreInfo, seed: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.info = info
        ids = tokenizer.eos_token_ids.union(eos_ids(info.generation_config))
        self._eos_ids = sorted(i for i in ids if 0 <= i < info.vocab_size)  # -1 means none
        self.check_grammar: Callable[[GrammarSpec], str] | None = None
        """Makes of a grammar what the core is given. Raises GrammarError. For requests that are
        built without theirs."""
        self._seeds = random.Random(seed)  # noqa: S311 - draws of text, not secrets
        self._numbers = itertools.count()
        self.defaults = default_params(info.generation_config)

    @property
    def eos_ids(self) -> list[int]:
        """Ends of sequence that the model's files name."""
        return self._eos_ids

    def check_chats(self) -> None:
        """Raises InvalidRequestError for a model that answers no conversations."""
        self.check_generates()
        if self.info.audio_rows:
            raise InvalidRequestError(
                f"model {self.info.model!r} writes down what an audio says: send one to"
                " /v1/audio/transcriptions, or use LLM.transcribe",
                param="model",
            )

    def check_generates(self) -> None:
        """Raises InvalidRequestError for a model that makes vectors or scores."""
        if self.info.pooling is not None:
            raise InvalidRequestError(
                f"model {self.info.model!r} makes vectors or scores and generates no text: ask it"
                f" to {self.info.pooling.tasks[0]}, or load a generating model",
                param="model",
            )

    def check_beams(self) -> None:
        """Raises InvalidRequestError for a model whose answers do not go on with their prompts."""
        if self.info.encoder_tokens:
            raise InvalidRequestError(
                "a beam search follows the prompt with what it found, and this model's encoder"
                " reads the prompt alone: leave use_beam_search out",
                param="use_beam_search",
            )

    def sampling_params(self, **explicit: Any) -> SamplingParams:
        """The model's recommended parameters, replaced where `explicit` names a value."""
        return SamplingParams(**{**self.defaults, **explicit})

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions = RequestOptions(),
        add_special_tokens: bool = True,
        fit_max_tokens: bool = True,
        grammar: str | None = None,
        thoughts: Thoughts | None = None,
        free: FreePart | None = None,
    ) -> Request:
        """Builds a request. All checks that can refuse it are here.

        Args:
            params: None: the model's recommended ones.
            add_special_tokens: BOS and the like around a text; False after a chat template, which
                brings its own.
            fit_max_tokens: a `max_tokens` that the context cannot hold is cut, not refused.
            grammar: the result of checking `params.structured_outputs`; None: it is checked here.
            thoughts: the budget of reasoning tokens.
            free: the part of the answer before its grammar, if it has one.

        Raises:
            GrammarError: no answer can follow `params.structured_outputs`.
            ContextLengthError: no room after the prompt for one token, or for `max_tokens`.
            InvalidRequestError: an empty prompt, or a token id outside the vocabulary.
        """
        self.check_generates()
        params = self._resolved(params or self.sampling_params())
        if params.truncate_prompt_tokens is None:
            text, ids = self._tokens(prompt, add_special_tokens, self._most_tokens)
        else:
            text, ids = self._truncated(prompt, add_special_tokens, params)
        self._check_prompt(ids)
        begun = 1 if self.info.encoder_tokens else len(ids)  # in the decoder's context
        if self.info.encoder_tokens:
            check_encoded(params)
        if not fit_max_tokens:
            self._check_room(begun, params.max_tokens)
        params.check_vocab(self.info.vocab_size)
        found = self._grammar(params, grammar, thoughts, free)
        number = next(self._numbers)
        core = self._core_requests(number, ids, params, options, found)
        check_logprobs(params, [(begun, core[0].max_tokens)])
        return Request(
            request_id or f"req-{number}",
            text,
            ids,
            params,
            core,
            StopSet(params.stop) if params.stop else None,
            goes_on=not self.info.encoder_tokens,
        )

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """Replaces -1, for all log-probabilities, by their number, and any number by that of the
        named ids."""
        named = tuple(dict.fromkeys(params.logprob_token_ids))
        if params.logprobs is None and params.prompt_logprobs is None and not named:
            return params
        limit, size = self.info.max_logprobs, self.info.vocab_size
        logprobs: int | None = len(named)
        if not named:
            logprobs = resolve_logprobs("logprobs", params.logprobs, limit, size)
        of_prompt = resolve_logprobs("prompt_logprobs", params.prompt_logprobs, limit, size)
        known = (params.logprobs, params.prompt_logprobs, params.logprob_token_ids)
        if (logprobs, of_prompt, named) == known:
            return params
        return dataclasses.replace(
            params, logprobs=logprobs, prompt_logprobs=of_prompt, logprob_token_ids=named
        )

    def _truncated(
        self, prompt: Prompt, add_special_tokens: bool, params: SamplingParams
    ) -> tuple[str | None, list[int]]:
        """Returns the result of `_tokens` without the ids that `truncate_prompt_tokens` drops."""
        limit, keep = self.info.max_model_len, params.truncate_prompt_tokens or -1
        if self.info.encoder_tokens:
            limit, keep = self._most_tokens, self._most_tokens if keep < 0 else keep
        check_truncation(keep, limit)
        if keep < 0:
            keep = max(1, limit - (params.max_tokens or 1))
        text, ids = self._tokens(prompt, add_special_tokens, None, keep)
        return (text, ids) if len(ids) <= keep else (None, ids[-keep:])

    def _tokens(
        self, prompt: Prompt, add_special_tokens: bool, limit: int | None, keep: int | None = None
    ) -> tuple[str | None, list[int]]:
        """A text and its ids: of a long text no more than its end, where only the last `keep`
        tokens are wanted."""
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), checked_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidRequestError(
                    f"a prompt needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}",
                    param="prompt",
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            if keep is not None:
                prompt = self.tokenizer.part_with(prompt, keep, from_end=True)
            try:
                ids = self.tokenizer.encode(prompt, add_special_tokens, limit=limit)
                return str(prompt), ids
            except TooManyTokensError as error:
                raise self._too_long(error.num_tokens, error.count) from None
        return None, checked_ids(prompt)

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise InvalidRequestError("the prompt has no tokens: give at least one", param="prompt")
        wrong = id_outside(ids, self.info.vocab_size)
        if wrong is not None:
            raise InvalidRequestError(
                f"the prompt names token id {wrong}, but the vocabulary has ids 0 to"
                f" {self.info.vocab_size - 1}",
                param="prompt",
            )
        if len(ids) > self._most_tokens:
            raise self._too_long(len(ids), str(len(ids)))

    @property
    def _most_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.info.encoder_tokens or self.info.max_model_len - 1

    def _check_room(self, prompt_tokens: int, max_tokens: int | None) -> None:
        room = self.info.max_model_len - prompt_tokens
        if max_tokens is not None and max_tokens > room:
            raise ContextLengthError(
                f"max_tokens is {max_tokens} and the prompt has {prompt_tokens} tokens, but this"
                f" model's maximum context length is {self.info.max_model_len} tokens: lower"
                f" max_tokens to {room}, or shorten the prompt",
                param="max_tokens",
            )

    def _too_long(self, num_tokens: int, count: str) -> ContextLengthError:
        # Clients look for these words to know that they must shorten a conversation.
        limit = self.info.max_model_len
        wanted = (
            f"this model's maximum context length is {limit} tokens, and the answer needs at least"
            f" one: shorten it to {limit - 1} tokens"
        )
        if self.info.encoder_tokens:
            limit = self._most_tokens
            wanted = f"the encoder reads {limit}: shorten it"
        return ContextLengthError.of_prompt(
            f"prompt is too long: it has {count} tokens, but {wanted}", num_tokens, limit
        )

    def _grammar(
        self,
        params: SamplingParams,
        text: str | None,
        thoughts: Thoughts | None,
        free: FreePart | None,
    ) -> Grammar | None:
        form = params.structured_outputs
        if form is None:
            return None if thoughts is None else Grammar("", thoughts=thoughts)
        if text is None:
            assert self.check_grammar is not None, "nobody checks grammars here"
            text = self.check_grammar(grammar_spec(form))
        if form.after_ids:
            free = FreePart((form.after_ids,))
        return Grammar(text, free, thoughts)

    def _core_requests(
        self,
        number: int,
        ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
        grammar: Grammar | None,
    ) -> list[CoreRequest]:
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        stop_ids = [] if params.ignore_eos else self._eos_ids
        images, ids = inputs_of(self.info, ids)
        leader = CoreRequest(
            request_id=f"{self.info.id_prefix}{number}.0",
            prompt=pack_ids(ids),
            images=images,
            params=_core_params(params),
            stop_ids=[*stop_ids, *params.stop_token_ids],
            bad_words_ids=self._bad_words(params.bad_words),
            grammar=grammar,
            max_tokens=self._max_tokens(len(ids), params),
            seed=choice_seed(seed, 0),
            priority=options.priority,
            client=options.client,
            cache_salt=options.cache_salt,
            session_id=options.session_id,
            prediction=self._prediction(options.prediction),
            log_id=options.log_id,
            adapter=options.adapter,
            share=options.share,
            queue_timeout_s=options.queue_timeout_s,
            at_end=options.at_end and not params.stop,  # the end at a stop string is found here
        )
        followers = [
            Follower(f"{self.info.id_prefix}{number}.{index}", choice_seed(seed, index))
            for index in range(1, params.best_of or params.n)
        ]
        return choices_of(leader, followers)

    def _prediction(self, text: str) -> bytes:
        """The ids of a predicted answer, as far as the context could hold them."""
        if not text:
            return b""
        part = self.tokenizer.part_with(text, self.info.max_model_len)
        ids = self.tokenizer.encode(part, add_special_tokens=False)
        return pack_ids(ids[: self.info.max_model_len])

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        room = self.info.max_model_len - prompt_tokens
        if params.max_tokens is None:
            return min(room, most_scored_tokens(params))
        return min(params.max_tokens, room)

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Ids of each word at the start of a text and after a space, where they are others than
        behind a space that is a token of its own."""
        if not words:  # the tokenizer's threads cost more than nothing
            return []
        found: list[list[int]] = []
        bare_words = [word.lstrip(" ") for word in words]
        encode = partial(self.tokenizer.encode_batch, add_special_tokens=False)
        bare_ids, spaced_ids = encode(bare_words), encode([f" {word}" for word in bare_words])
        for word, bare, spaced in zip(words, bare_ids, spaced_ids, strict=True):
            if not bare:
                raise InvalidRequestError(
                    f"bad_words has {word!r}, which is not a word", param="bad_words"
                )
            found.append(bare)
            if spaced[-len(bare) :] != bare:
                found.append(spaced)
        return found


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice, by a request's seed: the seed itself for the first, and for the others
    a hash, so that requests with neighbouring seeds have no answers in common."""
    seed %= _SEED_SPACE
    if index == 0:
        return seed
    text = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _core_params(params: SamplingParams) -> SamplingParams:
    """Leaves out the texts, which are the frontend's business. With best_of the choices are ranked
    by log-probability, so the core must report it."""
    logprobs = params.logprobs
    if logprobs is None and (params.best_of or params.n) > params.n:
        logprobs = 0
    has_texts = params.stop or params.bad_words or params.structured_outputs is not None
    if not has_texts and (logprobs, None) == (params.logprobs, params.truncate_prompt_tokens):
        return params  # as those of most requests, and to make others would check each value again
    return dataclasses.replace(
        params,
        logprobs=logprobs,
        stop=(),
        bad_words=(),
        truncate_prompt_tokens=None,
        structured_outputs=None,
    )
