"""Engine: generation in this process for programs that stream, cancel and mix requests.

    engine = Engine(EngineConfig(model="demo"))
    prompt = engine.apply_chat_template([Message("user", "Tell me a story.")])
    seq_id, prompt_length, stream = engine.generate_stream(SamplingParams(max_tokens=64), prompt)
    for piece in stream:
        print(piece, end="")

It computes all requests at once while a caller waits for an answer, and otherwise pauses. Several
threads may use one engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from vllmx_core.config import EngineConfig
from vllmx_core.errors import InvalidRequestError
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams

from vllmx_engine.checked_flags import check_flags
from vllmx_engine.client.chat import ChatMessage, ChatOptions, Message
from vllmx_engine.client.inline import HasEngine, InlineEngine
from vllmx_engine.client.request import Request
from vllmx_engine.client.request_state import RequestState
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import CoreInfo, FinishReason
from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from vllmx_engine.client.answers import AnswerReaders


class TextStream(Iterator[str]):
    """The text of one sequence as it grows. After the end `finish_reason` and `stop_reason` tell
    why; the request's error is raised from the iteration."""

    def __init__(self, owner: Engine, engine: InlineEngine, state: RequestState) -> None:
        self._owner = owner
        """Nobody else may have it: without it the model is freed."""
        self._engine = engine
        self._state = state
        self.token_ids: list[int] = []
        """All so far."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def readers(self) -> AnswerReaders | None:
        """The readers that separate reasoning and calls from content in this text; None if there is
        nothing to separate, or if the engine began without `chat`."""
        return self._state.request.readers

    def __next__(self) -> str:
        """The next piece, never empty."""
        while self.finish_reason is None:
            for output in self._engine.next_output(self._state).outputs:
                self._take(output)
                if output.text:
                    return output.text
        raise StopIteration

    def _take(self, output: CompletionOutput) -> None:
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


class Engine(HasEngine):
    """A loaded model.

    Raises (constructor): the typed reason why the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, *, registry: Registry | None = None) -> None:
        check_flags(config, registry, in_process=True)
        super().__init__(config, registry)
        self._seq_ids = itertools.count()
        self._streams: dict[int, RequestState] = {}

    @property
    def info(self) -> CoreInfo:
        """The loaded core: context length, vocabulary, backend, memory."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def sampling_params(self, **explicit: Any) -> SamplingParams:
        """The model's recommended parameters, replaced where `explicit` names a value."""
        return self._engine.builder.sampling_params(**explicit)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Message | ChatMessage],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation, by the model's chat template.

        Args:
            template_kwargs: variables of the template, such as `enable_thinking`.

        Raises:
            TemplateError: there is no template, or it refuses the conversation.
        """
        options = ChatOptions(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        return self._engine.renderer.render(messages, options)

    def generate_sync(
        self,
        params: SamplingParams | Sequence[SamplingParams],
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    ) -> list[RequestOutput]:
        """Continues the prompts and waits for all of them; outputs are in their order.

        Args:
            params: one for all, or one for each prompt.
            prompts: texts or lists of token ids. A text that begins with the model's BOS token (a
                rendered chat template) gets no second one.

        Raises:
            InvalidRequestError: a prompt that cannot be served; none was started then.
        """
        several: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = [params] * len(several) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(several):
            raise InvalidRequestError(
                f"{len(each)} params were given for {len(several)} prompts: give one for each, or"
                " one for all",
                param="params",
            )
        requests = [self._build(own, prompt) for own, prompt in zip(each, several, strict=True)]
        states = [self._engine.submit(request) for request in requests]
        self._engine.run(states)
        return [state.output() for state in states]

    def generate_stream(
        self,
        params: SamplingParams,
        prompt: str | Sequence[int],
        *,
        chat: ChatOptions | None = None,
    ) -> tuple[int, int, TextStream]:
        """Starts one sequence: (sequence id for `cancel`, tokens of the prompt, its text).

        The stream computes while it is iterated. With `chat`, by which the prompt was made, its
        text has the markers of thoughts and calls for `TextStream.readers`. Raises
        InvalidRequestError, also for n > 1.
        """
        if (params.best_of or params.n) > 1:
            raise InvalidRequestError(
                f"a stream has one sequence, but n is {params.n} and best_of {params.best_of}: use"
                " generate_sync",
                param="n",
            )
        request = self._build(params, prompt)
        if chat is not None:
            request = self._engine.renderer.with_readers(request, chat)
        return self._stream(request)

    def chat_stream(
        self,
        messages: Sequence[Message | ChatMessage],
        params: SamplingParams,
        chat: ChatOptions | None = None,
    ) -> tuple[int, int, TextStream]:
        """Starts the answer to a conversation, which may have images; see `generate_stream`."""
        return self._stream(self._engine.chat_request(messages, params, chat or ChatOptions()))

    def _stream(self, request: Request) -> tuple[int, int, TextStream]:
        state = self._engine.submit(request, "delta")
        seq_id = next(self._seq_ids)
        self._streams = {key: kept for key, kept in self._streams.items() if not kept.finished}
        self._streams[seq_id] = state
        return seq_id, len(request.prompt_ids), TextStream(self, self._engine, state)

    def cancel(self, seq_id: int) -> bool:
        """Ends a stream's sequence with finish reason "abort", after what is computed already.
        False when it has ended before."""
        state = self._streams.pop(seq_id, None)
        if state is None or state.finished:
            return False
        self._engine.abort(state)
        return True

    def _build(self, params: SamplingParams, prompt: str | Sequence[int]) -> Request:
        bos = self.tokenizer.named_tokens.get("bos_token")
        has_bos = isinstance(prompt, str) and bool(bos) and prompt.startswith(bos or "")
        return self._engine.builder.build(prompt, params, add_special_tokens=not has_bos)


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
