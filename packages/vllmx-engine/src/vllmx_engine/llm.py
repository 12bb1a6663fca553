"""LLM: offline generation in this process."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from vllmx_core.config import DEMO_MODEL
from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import Registry
from vllmx_core.records import Record
from vllmx_core.sampling import SamplingParams

from vllmx_engine.checked_flags import check_flags
from vllmx_engine.client.arguments import (
    LoRAArgument,
    ParamsArgument,
    one_each,
    options_of,
)
from vllmx_engine.client.beams import BeamSearchOutput, BeamSearchParams, search_beams
from vllmx_engine.client.chat import ChatMessage, ChatOptions, Message
from vllmx_engine.client.forced_calls import choice_of
from vllmx_engine.client.pooling import (
    PoolingChoice,
    PoolingText,
    first_tokens,
    makes_vectors,
    naming,
    pairs_of,
    pooled_output,
    similarity_output,
)
from vllmx_engine.client.request import Prompt, Request, RequestOptions
from vllmx_engine.client.request_limits import checked_ids
from vllmx_engine.client.request_state import RequestState
from vllmx_engine.client.sleeping import CanSleep
from vllmx_engine.core.drafters import Drafter
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.speculation import Drafting
from vllmx_engine.llm_arguments import engine_config
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import CoreInfo, CoreStats, PoolingTask
from vllmx_engine.wire.outputs import PoolingRequestOutput, RequestOutput

if TYPE_CHECKING:
    from vllmx_engine.speech.transcriber import Transcription

logger = logging.getLogger("vllmx.llm")

Conversation = Sequence[ChatMessage | Message]


class Progress(Record):
    """The progress of a call of `LLM.generate`."""

    num_done: int
    num_total: int
    generated_tokens: int
    elapsed_s: float


class LLM(CanSleep):
    """A loaded model for scripts: `LLM("demo").generate("Once upon")[0].outputs[0].text`.

    Args:
        model: a folder, a file, a Hugging Face id, or "demo".
        registry: plugins; None: all that are installed.
        **config: any other field of `EngineConfig`, by vLLM's name too where it has another one.

    Raises:
        VllmxError: the typed reason why the model cannot be loaded.
    """

    def __init__(
        self, model: str = DEMO_MODEL, *, registry: Registry | None = None, **config: Any
    ) -> None:
        found = engine_config(model, config)
        check_flags(found, registry, in_process=True)
        super().__init__(found, registry)

    @property
    def info(self) -> CoreInfo:
        """The loaded core: context length, vocabulary, backend, memory."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def stats(self) -> CoreStats:
        """Counters and gauges of the engine since it was loaded."""
        return self._engine.on_core(EngineCore.stats)

    def draft_with(self, drafter: Drafter | None, num_tokens: int | None = None) -> None:
        """Replaces the drafter of later requests, which changes no answer.

        Args:
            drafter: None: only requests with a prediction draft.
            num_tokens: draft tokens of a sequence in each step; None: as many as pay.
        """
        self._engine.on_core(lambda core: core.draft_with(Drafting(drafter, num_tokens)))

    def sampling_params(self, **explicit: Any) -> SamplingParams:
        """The model's recommended parameters, replaced where `explicit` names a value."""
        return self._engine.builder.sampling_params(**explicit)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsArgument = None,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRAArgument = None,
        use_tqdm: bool = True,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt; the outputs are in the order of the prompts.

        All prompts are checked before the first is started. A request that fails on its way (the
        model gave NaN, say) has finish reason "error" and a text in `error`; the others go on.

        Args:
            prompts: one prompt or several: texts, lists of token ids, or vLLM's dictionaries.
            sampling_params: one for all or one for each; None: what the model recommends.
            priority: of each prompt; smaller is served first.
            lora_request: an adapter for all, or one or None for each.
            use_tqdm: show a line of progress where standard error is a terminal.
            progress: called a few times a second instead, and at the end.

        Raises:
            InvalidRequestError: a prompt that cannot be served.
        """
        several = _as_prompts(prompts)
        params = one_each(sampling_params, len(several))
        builder = self._engine.builder
        options = options_of(self._engine, len(several), priority, lora_request)
        requests = [
            builder.build(prompt, each, options=own)
            for prompt, each, own in zip(several, params, options, strict=True)
        ]
        return self._run(requests, use_tqdm, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsArgument = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRAArgument = None,
        use_tqdm: bool = True,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several; otherwise as `generate`. Each output also has the
        parts of its text: `content`, `reasoning` and `tool_calls`.

        Args:
            sampling_params: None: the model's recommended ones, and as many tokens as the context
                holds.
            tool_choice: also as OpenAI's API writes it.
            tools, add_generation_prompt, continue_final_message, chat_template_kwargs: see
                `ChatOptions`.

        Raises:
            TemplateError: the chat template refuses a conversation.
        """
        options = ChatOptions(
            tools=tools,
            tool_choice=choice_of(tool_choice),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs or {},
        )
        conversations = _as_conversations(messages)
        if sampling_params is None:
            sampling_params = self.sampling_params(max_tokens=None)
        params = one_each(sampling_params, len(conversations))
        owns = options_of(self._engine, len(conversations), None, lora_request)
        requests = [
            self._engine.chat_request(conversation, each, options, own)
            for conversation, each, own in zip(conversations, params, owns, strict=True)
        ]
        outputs = self._run(requests, use_tqdm, progress)
        for request, output in zip(requests, outputs, strict=True):
            for choice in output.outputs:
                if request.readers is None:
                    choice.content = choice.text
                else:
                    request.readers.read(choice)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRAArgument = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt: `sequences`, best first. `lora_request`: as in
        `generate`.

        Raises:
            InvalidRequestError: a prompt that cannot be served, or more beams than --max-logprobs
                allows.
        """
        several = _as_prompts(prompts)
        options = options_of(self._engine, len(several), None, lora_request)
        builder = self._engine.builder
        return search_beams(builder, several, params, options, self._run_quietly)

    def transcribe(
        self,
        audio: bytes | F32,
        *,
        language: str | None = None,
        translate: bool = False,
        prompt: str = "",
        temperature: float = 0.0,
        timestamps: bool = False,
    ) -> Transcription:
        """Writes down what an audio says, with a model such as Whisper.

        Args:
            audio: the bytes of a file, or mono samples between -1 and 1 at the model's rate (16,000
                a second).
            language: a code such as "en"; None: the model finds it.
            translate: the text is English, whatever the language is.
            prompt: text that came before, for names and style.
            timestamps: `segments` of the result have times.

        Raises:
            InvalidRequestError: the audio cannot be read, or the model writes down none.
        """
        from vllmx_engine.speech.offline import transcribe  # few programs need it
        from vllmx_engine.speech.transcriber import SpeechTask

        task = SpeechTask(language, translate, prompt, timestamps, temperature)
        return transcribe(self._engine, audio, task)

    def _run_quietly(self, requests: list[Request]) -> list[RequestOutput]:
        return self._run(requests, False, None)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """A vector for each text, in the order of the texts: `outputs.embedding`.

        Args:
            dimensions: only the first so many numbers, of length 1 again.
            normalize: whether vectors have length 1; None: as the model says.
            prompt_name: which of the model's prompts is written before each text, such as "query".
            truncate_prompt_tokens: of a longer text the first so many tokens are taken, with -1 as
                many as the model takes; None: it is refused.

        Raises:
            InvalidRequestError: the model makes no vectors, or a text cannot be served.
        """
        choice = PoolingChoice(
            max_tokens=self._most(truncate_prompt_tokens),
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
        )
        return self._pool("embed", _pooling_texts(prompts), choice, use_tqdm)

    def token_embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """ColBERT's vectors of the tokens of each text, (tokens, dimensions): `outputs.data`.
        Arguments and errors are those of `embed`."""
        choice = PoolingChoice(max_tokens=self._most(truncate_prompt_tokens), normalize=normalize)
        return self._pool("token_embed", _pooling_texts(prompts), choice, use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Scores pairs of texts, one text with each of several or pair by pair: `outputs.score`. An
        embedding model gives the cosine of their vectors, ColBERT MaxSim. Raises as `embed`."""
        first, second = pairs_of(text_1, text_2)
        choice = PoolingChoice(max_tokens=self._most(truncate_prompt_tokens), normalize=normalize)
        if not makes_vectors(self._engine.pooling.model("score").tasks):
            pairs = [PoolingText(a, pair=b) for a, b in zip(first, second, strict=True)]
            return self._pool("score", pairs, choice, use_tqdm)
        texts = list(dict.fromkeys([*first, *second]))
        found = self._pool("score", list(map(PoolingText, texts)), choice, use_tqdm)
        by_text = dict(zip(texts, found, strict=True))
        return [
            similarity_output(by_text[a], by_text[b]) for a, b in zip(first, second, strict=True)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """The probabilities of the model's classes (`info.pooling.labels`) for each text:
        `outputs.probs`. Raises as `embed`."""
        choice = PoolingChoice(max_tokens=self._most(truncate_prompt_tokens), normalize=normalize)
        return self._pool("classify", _pooling_texts(prompts), choice, use_tqdm)

    def _most(self, truncate: int | None) -> int | None:
        return first_tokens(truncate, self.info.max_model_len)

    def _pool(
        self, task: PoolingTask, texts: list[PoolingText], choice: PoolingChoice, use_tqdm: bool
    ) -> list[PoolingRequestOutput]:
        pooling = self._engine.pooling
        model, options = pooling.model(task), RequestOptions()
        requests = list[Request]()
        for number, each in enumerate(texts):
            with naming(number, len(texts)):
                requests.append(pooling.build(task, each, choice, options))
        outputs = self._run(requests, use_tqdm, None)
        return [pooled_output(model, output, choice) for output in outputs]

    def _run(
        self,
        requests: list[Request],
        use_tqdm: bool,
        progress: Callable[[Progress], None] | None,
    ) -> list[RequestOutput]:
        states = [self._engine.submit(request) for request in requests]
        if progress is None and use_tqdm and sys.stderr.isatty():
            progress = write_progress_line
        reporter = None if progress is None else _Reporter(states, progress)
        self._engine.run(states, None if reporter is None else reporter.report)
        if reporter is not None:
            reporter.report()
        for state in states:
            if state.error is not None:
                logger.warning("request %s failed: %s", state.request.request_id, state.error)
        return [state.output() for state in states]


def _pooling_texts(prompts: Prompt | Sequence[Prompt]) -> list[PoolingText]:
    return [_pooling_text(each) for each in _as_prompts(prompts)]


def _pooling_text(prompt: Any) -> PoolingText:
    """A text, ids, or vLLM's dictionary of either."""
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        if ids is None and not isinstance(prompt.get("prompt"), str):
            raise InvalidRequestError(
                f"a prompt needs 'prompt', a text, or 'prompt_token_ids', got {sorted(prompt)}",
                param="prompt",
            )
        prompt = prompt["prompt"] if ids is None else ids
    return PoolingText(prompt) if isinstance(prompt, str) else PoolingText(ids=checked_ids(prompt))


class _Reporter:
    """Says how far some requests are."""

    def __init__(self, states: list[RequestState], callback: Callable[[Progress], None]) -> None:
        self._states = states
        self._callback = callback
        self._started_s = time.monotonic()

    def report(self) -> None:
        """Calls the callback."""
        done = sum(state.finished for state in self._states)
        tokens = sum(state.metrics.num_generation_tokens for state in self._states)
        elapsed_s = time.monotonic() - self._started_s
        self._callback(Progress(done, len(self._states), tokens, elapsed_s))


def write_progress_line(progress: Progress) -> None:
    """A progress callback: rewrites one line on standard error."""
    rate = progress.generated_tokens / max(progress.elapsed_s, 1e-9)
    end = "\n" if progress.num_done == progress.num_total else ""
    sys.stderr.write(
        f"\r{progress.num_done}/{progress.num_total} prompts,"
        f" {progress.generated_tokens} tokens, {rate:.1f} tokens/s{end}"
    )
    sys.stderr.flush()


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt becomes a list of one."""
    if not isinstance(prompts, str | Mapping) and not hasattr(prompts, "__len__"):
        raise InvalidRequestError(
            f"prompts is {shown(prompts)}: give a text, a list of token ids, or a list of prompts",
            param="prompt",
        )
    if isinstance(prompts, str | Mapping) or (
        len(prompts) > 0 and isinstance(prompts[0], Integral)
    ):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Any) -> list[Any]:
    """One conversation becomes a list of one."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequestError(
            f"messages is {shown(messages)}: give a list of messages, or a list of such lists",
            param="messages",
        )
    if len(messages) > 0 and isinstance(messages[0], Mapping | Message):
        return [messages]
    return list(messages)
