"""AsyncLLM: the engine for asyncio programs, the HTTP server above all.

    llm = await AsyncLLM.start(EngineConfig(model="demo"))       # typed errors when it cannot load
    stream = await llm.submit("Once upon", llm.sampling_params(max_tokens=64), kind="delta")
    async with stream:                                           # leaving it early aborts
        async for output in stream:                              # RequestOutput
            print(output.outputs[0].text, end="")
    await llm.shutdown()

`submit` and `submit_chat` refuse what can be refused before they return (InvalidRequestError and
its kind, QueueFullError, EngineDeadError), so that a server can still answer with a status code.
`generate` and `chat` are the same as async generators. All methods belong to the event loop's
thread, but for `render_chat`, which may run anywhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

from vllmx_core.config import EngineConfig
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams

from vllmx_engine.async_core import AsyncCore
from vllmx_engine.checked_flags import check_flags
from vllmx_engine.client.async_text import (
    INLINE_BYTES,
    chat_cost,
    chat_size,
    prompt_size,
    rules_size,
)
from vllmx_engine.client.beams import BeamSearchParams
from vllmx_engine.client.chat import ChatMessage, ChatOptions, ChatRenderer, Message, load_tokenizer
from vllmx_engine.client.forced_calls import asks_for_calls
from vllmx_engine.client.pooling import PoolingChoice, PoolingText, naming, pooled_output
from vllmx_engine.client.request import Prompt, Request, RequestBuilder, RequestOptions
from vllmx_engine.client.request_limits import check_logprobs
from vllmx_engine.client.request_state import OutputKind
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.core_start import CoreStart
from vllmx_engine.streams import all_or_none
from vllmx_engine.text.text_threads import Stopped
from vllmx_engine.wire.messages import PoolingTask
from vllmx_engine.wire.outputs import PoolingRequestOutput, RequestOutput

if TYPE_CHECKING:
    from vllmx_engine.speech.transcriber import Transcriber

_NOBODY = RequestOptions()


class AsyncLLM(AsyncCore):
    """A loaded model behind asyncio, which takes requests. Made by `start`."""

    @classmethod
    async def start(
        cls, config: EngineConfig, *, registry: Registry | None = None, in_process: bool = False
    ) -> Self:
        """Loads the model and returns when it is ready.

        Args:
            registry: plugins; None: all that are installed.
            in_process: run the core on a thread of this process instead of in a process of its
                own. It is not restarted when it dies; for tests and debugging.

        Raises:
            VllmxError: the typed reason why it cannot be loaded, whichever process met it.
        """
        check_flags(config, registry, in_process=in_process)
        async with await CoreStart.begin(config, registry, in_process=in_process) as core:
            return await cls.over(core)

    @classmethod
    async def over(cls, core: CoreStart) -> Self:
        """The second half of `start`, for a program that had more to do while the model loads.
        Leave `core` as a context afterwards. Raises what `start` raises."""
        found = core.found
        tokenizer = await asyncio.to_thread(load_tokenizer, found)
        await asyncio.to_thread(ChatRenderer.import_templates)
        renderer = ChatRenderer.of(found.config, tokenizer, found.registry)
        found_format = asyncio.create_task(asyncio.to_thread(renderer.look_for_format))
        try:
            frontend = await core.ready()
        finally:  # the first chat reports its error
            await asyncio.gather(found_format, return_exceptions=True)
        try:
            builder = RequestBuilder(tokenizer, frontend.info, found.config.seed)
            return cls(found.config, frontend, renderer, builder)
        except BaseException:
            await frontend.close()
            raise

    @property
    def default_sampling_params(self) -> Mapping[str, Any]:
        """The model's recommended values, by field of SamplingParams; explicit values override
        them."""
        return self._builder.defaults

    def sampling_params(self, **explicit: Any) -> SamplingParams:
        """SamplingParams of the recommended values, replaced by the explicit ones."""
        return self._builder.sampling_params(**explicit)

    # --- requests ---------------------------------------------------------------------------------
    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        kind: OutputKind = "delta",
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
        cache_salt: str = "",
        session_id: str = "",
        log_id: str = "",
        add_special_tokens: bool = True,
        fit_max_tokens: bool = True,
    ) -> RequestStream:
        """Starts a request and returns its stream.

        Args:
            prompt: text or token ids.
            params: None: the model's recommended ones.
            kind: the content of each output: only the new part ("delta"), all so far
                ("cumulative"), or one output at the end ("final", the cheapest). With best_of > n
                always "final".
            request_id: None: one is made. Must not be in flight already.
            priority: smaller is served first.
            client: the sender, for fair share.
            cache_salt: only requests of one salt share cached prefixes.
            session_id: requests of one session continue each other.
            log_id: its name in logs, next to our own id, of letters, digits and `_.:-`.
            add_special_tokens: BOS and the like around a text.
            fit_max_tokens: a `max_tokens` that the context cannot hold is cut, not refused.

        Raises:
            InvalidRequestError: it can never be served (ContextLengthError among them).
            QueueFullError: too many wait already.
            EngineDeadError: the core is being restarted or gone, or the engine drains.
        """
        found = await self.submit_all(
            [prompt],
            params,
            kind=kind,
            request_id=request_id,
            options=RequestOptions(priority, client, cache_salt, session_id, log_id),
            add_special_tokens=add_special_tokens,
            fit_max_tokens=fit_max_tokens,
        )
        return found[0]

    async def submit_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        kind: OutputKind = "delta",
        request_id: str | None = None,
        options: RequestOptions,
        add_special_tokens: bool = True,
        fit_max_tokens: bool = True,
        beams: BeamSearchParams | None = None,
    ) -> list[RequestStream]:
        """`submit` for each prompt, all or none: nothing is sent before all are accepted.

        Args:
            request_id: None: each prompt gets one; with several prompts it must be None.
            beams: each stream has one output, the beams of a search.
        """
        params = params or self.sampling_params()
        self.check_open(len(prompts) * params.num_choices, options.client)
        begun_s = time.monotonic()
        grammar = await self.grammars.checked(params, options.client)
        grammar_s = time.monotonic() - begun_s
        build = partial(
            self._builder.build,
            params=params,
            request_id=request_id,
            options=options,
            add_special_tokens=add_special_tokens,
            fit_max_tokens=fit_max_tokens,
            grammar=grammar,
        )
        rules, requests = rules_size(params), list[Request]()
        for prompt in prompts:
            if requests:
                await asyncio.sleep(0)  # many short prompts must not hold up other requests
            size, begun_s = prompt_size(prompt) + rules, time.monotonic()
            request = await self.convert(options.client, size, partial(build, prompt))
            requests.append(request.timed(grammar_s, begun_s))
            check_logprobs(params, [request.lengths for request in requests])
        if beams is not None:
            return [self._beam_stream(request, beams, options) for request in requests]
        return await self._streams.launch_all(requests, kind)

    @cached_property
    def transcriber(self) -> Transcriber:
        """Makes requests for what audio says. Raises InvalidRequestError for a model that writes
        down none, ConfigError, UnsupportedModelError."""
        from vllmx_engine.speech.chat_transcriber import transcriber_for  # few servers need it

        return transcriber_for(self._builder)

    def submit_built(self, request: Request, kind: OutputKind) -> RequestStream:
        """Starts a request that a `Transcriber` made. Raises what `submit` raises."""
        return self._streams.launch(request, kind)

    def _beam_stream(
        self, request: Request, beams: BeamSearchParams, options: RequestOptions
    ) -> RequestStream:
        from vllmx_engine.beam_stream import BeamStream  # few servers need it

        return BeamStream(request, beams, self._streams, self._builder, options)

    async def submit_chat(
        self,
        messages: Sequence[ChatMessage | Message],
        params: SamplingParams | None = None,
        *,
        chat: ChatOptions | None = None,
        kind: OutputKind = "delta",
        request_id: str | None = None,
        options: RequestOptions = _NOBODY,
        add_special_tokens: bool = False,
        fit_max_tokens: bool = True,
        num_bytes: int = 0,
        beams: BeamSearchParams | None = None,
    ) -> RequestStream:
        """Renders a conversation with the model's chat template and goes on as `submit`.

        Without `params` the answer may be as long as the context holds. Templates write their own
        special tokens; `add_special_tokens` adds more. Raises TemplateError too. Cancelling stops
        the rendering. `num_bytes`: of all that the template is given, where the caller knows it;
        else tools and the like count as nothing in `text`'s budget.
        """
        self._builder.check_chats()
        found = params or self.sampling_params(max_tokens=None)
        self.check_open(found.num_choices, options.client)
        conversation, pictures = await self.take_images(messages, options.client)
        if asks_for_calls(chat):
            with_calls = partial(self._renderer.with_calls, found, chat)
            is_short = self._renderer.has_format and 0 < num_bytes <= INLINE_BYTES
            found = with_calls() if is_short else await asyncio.to_thread(with_calls)
        begun_s = time.monotonic()
        grammar = await self.grammars.checked(found, options.client)
        text_begun_s = time.monotonic()

        def build(stopped: Stopped) -> Request:
            prompt = self.render_chat(conversation, chat, stopped)
            request = self._builder.build(
                pictures.written(prompt),
                found,
                request_id=request_id,
                options=options,
                add_special_tokens=add_special_tokens,
                fit_max_tokens=fit_max_tokens,
                grammar=grammar,
                thoughts=self._renderer.thoughts(found, prompt, chat),
                free=self._renderer.free_part(found, prompt, self._builder.eos_ids, chat),
            )
            request = pictures.placed(request, prompt, stopped)
            return self._renderer.with_readers(request, chat)

        size = chat_cost(num_bytes or chat_size(conversation), pictures) + rules_size(found)
        request = await self.text.run(options.client, size, build)
        request = request.timed(text_begun_s - begun_s, text_begun_s)
        if beams is not None:
            return self._beam_stream(request, beams, options)
        return self._streams.launch(request, kind)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """`submit` as an async generator; closing it aborts."""
        async with await self.submit(prompt, params, **options) as stream:
            async for output in stream:
                yield output

    async def chat(
        self,
        messages: Sequence[ChatMessage | Message],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """`submit_chat` as an async generator, just so."""
        async with await self.submit_chat(messages, params, **options) as stream:
            async for output in stream:
                yield output

    async def pool(
        self,
        task: PoolingTask,
        texts: Sequence[PoolingText],
        choice: PoolingChoice,
        options: RequestOptions,
    ) -> list[PoolingRequestOutput]:
        """Returns the model's vector or scores for each text, in order. Cancelling ends the work.
        Raises the error of the first text that has one, and the errors of `submit`."""
        model = self._pooling.model(task)
        size = self._streams.most_together
        found: list[PoolingRequestOutput] = []
        for at in range(0, len(texts), size):
            numbers, requests = range(len(texts))[at : at + size], list[Request]()
            self.check_open(len(numbers), options.client)
            for number in numbers:
                text = texts[number]
                build = partial(self._pooling.build, task, text, choice, options)
                begun_s = time.monotonic()
                with naming(number, len(texts)):
                    request = await self.convert(options.client, text.num_bytes, build)
                requests.append(request.timed(0.0, begun_s))
                await asyncio.sleep(0)
            streams = await self._streams.launch_all(requests, "final")
            with all_or_none(streams):
                for number, stream in zip(numbers, streams, strict=True):
                    with naming(number, len(texts)):
                        async for each in stream:
                            text_s = stream.request.text_s
                            found.append(pooled_output(model, each, choice, text_s))
        return found
