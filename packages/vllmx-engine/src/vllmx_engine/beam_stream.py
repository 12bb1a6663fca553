"""The stream of a beam search, which runs as a task of its own."""

from __future__ import annotations

import asyncio
import time

from vllmx_core.errors import EngineDeadError, InvalidRequestError, QueueFullError, VllmxError
from vllmx_core.sampling import SamplingParams

from vllmx_engine.client.beams import BeamSearch, BeamSearchParams, choices_of, row_of
from vllmx_engine.client.request import Request, RequestBuilder, RequestOptions
from vllmx_engine.client.request_stream import RequestStream, Sink
from vllmx_engine.streams import Streams, all_or_none
from vllmx_engine.wire.outputs import RequestMetrics, RequestOutput

_AGAIN_S = 0.02
"""Seconds until a step that found the queue full tries again."""


class BeamStream(RequestStream):
    """One output, at the end: the beams, best first.

    Args:
        request: its prompt begins all beams.
        options: of the requests for single tokens.
    """

    def __init__(
        self,
        request: Request,
        beams: BeamSearchParams,
        streams: Streams,
        builder: RequestBuilder,
        options: RequestOptions,
    ) -> None:
        super().__init__(request, lambda _: None, lambda _, __: None)
        if request.core[0].images:
            raise InvalidRequestError("a beam search reads no images: leave use_beam_search out")
        if request.core[0].grammar is not None:  # of tool_choice, or a budget of thoughts
            raise InvalidRequestError(
                "a beam search follows no grammar, which this request needs, such as for its"
                " tool_choice: leave use_beam_search out",
                param="use_beam_search",
            )
        builder.check_beams()
        self._streams = streams
        self._builder = builder
        self._options = options
        room = builder.info.max_model_len - len(request.prompt_ids)
        self._search = BeamSearch(beams, builder.eos_ids, room)
        self._build(self._search.step_params, ())  # refused now if it ever is
        self._error: VllmxError | None = None
        self._streams.hold(self)
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._forget)

    def _build(self, params: SamplingParams, ids: tuple[int, ...]) -> Request:
        prompt = [*self.request.prompt_ids, *ids]
        return self._builder.build(prompt, params, options=self._options)

    async def _run(self) -> RequestOutput:
        search, metrics = self._search, RequestMetrics(self.request.arrival_s)
        params = search.step_params
        while search.running:
            requests = [self._build(params, beam.ids) for beam in search.running]
            streams = await self._launch(requests, is_first=metrics.first_token_s is None)
            with all_or_none(streams):
                search.take([row_of(await stream.last()) for stream in streams])
            metrics.last_token_s = time.monotonic()
            if metrics.first_token_s is None:
                metrics.first_token_s = metrics.last_token_s
        choices = choices_of(search, self.request, self._builder.tokenizer)
        metrics.num_generation_tokens = sum(len(each.token_ids) for each in choices)
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            outputs=choices,
            finished=True,
            metrics=metrics,
        )

    async def _launch(self, requests: list[Request], *, is_first: bool) -> list[RequestStream]:
        """Waits for room in the queue, once the search was let in."""
        while True:
            try:
                return await self._streams.launch_all(requests, "final", is_step=True)
            except QueueFullError:
                if is_first:
                    raise
            await asyncio.sleep(_AGAIN_S)

    def _forget(self, task: asyncio.Task[RequestOutput]) -> None:
        self._streams.forget(self)
        if not task.cancelled():
            task.exception()  # which the consumer may never ask for

    def divert(self, sink: Sink) -> None:
        """Nothing comes before the end."""

    def abort(self) -> None:
        """Ends the search; a consumer that waits gets EngineDeadError."""
        self.fail(EngineDeadError("the beam search was aborted: send the request again"))

    def fail(self, error: VllmxError) -> None:
        """Ends the search; the consumer gets this error."""
        if not self._task.done():
            self._error = error
            self._task.cancel()

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        self._ended = True
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None
