"""A response while it is generated, whole, as events, or in the background."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from vllmx_core.errors import VllmxError
from vllmx_core.system.private_traceback import private_traceback

from vllmx_server.apis.responses.as_chat import items_of
from vllmx_server.apis.responses.conversation_store import MAX_ITEMS, ConversationNotKnownError
from vllmx_server.apis.responses.items import named
from vllmx_server.apis.responses.output import Output, Told
from vllmx_server.apis.responses.schema import ResponsesRequest
from vllmx_server.apis.responses.store import KeptResponses, StoredResponse
from vllmx_server.apis.responses.tools import forms_of
from vllmx_server.errors import cut_message, internal_error
from vllmx_server.generating.chat_events import ChatEvents
from vllmx_server.generating.generate import Answer
from vllmx_server.generating.generation import Generation, Usage
from vllmx_server.generating.logprobs import ContentLogprobs
from vllmx_server.generating.served import Served
from vllmx_server.http.event_stream import Held
from vllmx_server.schema.record import encode
from vllmx_server.store.database import logger, new_id, now

if TYPE_CHECKING:
    from vllmx_server.apis.responses.mcp_rounds import ToolRounds


class ResponseAnswer(Answer):
    """Makes one response of a generation, and keeps it at its end where that is wanted.

    Attributes:
        stored: the response as it is now.
        is_cancelled: its client wants no more of it; set before the engine gives it up.
    """

    def __init__(
        self,
        served: Served,
        owner: str,
        body: ResponsesRequest,
        generation: Generation | ToolRounds,
    ) -> None:
        self._served = served
        self._owner = owner
        self._body = body
        self._generation = generation
        logprobs, tools = None, None
        self._events: ChatEvents | ToolRounds
        if isinstance(generation, Generation):
            if body.has_logprobs:
                logprobs = ContentLogprobs(generation.readers, body.top_logprobs or 0)
            self._events = ChatEvents(generation, logprobs)
        else:
            self._events, tools = generation, generation.tools
        self._output = Output(logprobs, forms_of(body.tools), tools)
        self._number = 0
        self.is_cancelled = False
        self.stored = StoredResponse(
            response=_fields(body, served.called(body.model)), input=named(items_of(body))
        )
        self._response = self.stored.response

    async def whole(self) -> Iterator[bytes]:
        """The body of an answer that is not streamed. Raises what the engine raises."""
        async with aclosing(self._events.all()) as events:
            async for event in events:
                for _ in self._output.take(event):
                    pass
        await self._complete()
        return iter((encode(self._response),))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """See `Answer.events`. What the engine raises after its first output, or in the background,
        becomes `response.failed`."""
        begun = False
        try:
            async with aclosing(self._events.all()) as events:
                async for event in events:
                    if not begun:
                        begun = True
                        yield self._begin()
                    for told in self._output.take(event):
                        yield self._event(told)
            await self._complete()
        except Exception as error:
            if not begun:
                if not self._body.background:
                    raise
                yield self._begin()
            if not isinstance(error, VllmxError):
                logger.error("unhandled error in a response\n%s", private_traceback(error))
                error = internal_error()
            yield self._fail(error)
        else:
            yield self._event((self._response["status"], {"response": self._response}))

    @property
    def has_middle(self) -> bool:
        return self._events.has_middle

    def middle(self, text: str, ids: list[int]) -> bytes:
        told = (told for event in self._events.more(text, ids) for told in self._output.take(event))
        return b"".join(map(self._event, told))

    def _begin(self) -> bytes:
        """The first two events."""
        self._response["status"] = "in_progress"
        shown = {"response": self._response}
        return self._event(("created", shown)) + self._event(("in_progress", shown))

    def _fail(self, error: VllmxError) -> bytes:
        """Ends the response by an error, or as its client wishes; returns the events of that."""
        closing = b"".join(map(self._event, self._output.close("incomplete")))
        status = "cancelled" if self.is_cancelled else "failed"
        if not self.is_cancelled:
            self._response["error"] = {"code": "server_error", "message": cut_message(error)}
        self._end(status)
        return closing + self._event((status, {"response": self._response}))

    async def keep(self, events: Sequence[bytes] = ()) -> None:
        """Keeps it as it is now, unless the client wants none, with its events where it is to be
        streamed."""
        if self._body.is_stored:
            told = events if self._body.stream else ()
            await self._served.store(KeptResponses).responses.save(self._owner, self.stored, told)

    async def _complete(self) -> None:
        """Ends the response, and keeps what is to be kept."""
        self._finish()
        await self._converse()
        await self.keep()

    async def _converse(self) -> None:
        """Adds what was asked and answered to the conversation, unless that was deleted
        meanwhile."""
        name = self._body.conversation_id
        if name is not None:
            conversations = self._served.store(KeptResponses).conversations
            with contextlib.suppress(ConversationNotKnownError):
                await conversations.add(self._owner, name, self.stored.items(), spare=MAX_ITEMS)

    def _finish(self) -> None:
        end = self._output.end
        if end is not None and end.finish_reason == "length":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            self._end("incomplete")
        else:
            self._response["completed_at"] = now()
            self._end("completed")

    def _end(self, status: str) -> None:
        self._response["output"] = self._output.items
        self._response["usage"] = usage_of(self._generation.usage)
        self._response["status"] = status

    def _event(self, told: Told) -> bytes:
        name, fields = told
        event = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%b\ndata: %b\n\n" % (name.encode(), encode(event))


def usage_of(usage: Usage) -> dict[str, Any]:
    """The token counts in the form of the API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _format(body: ResponsesRequest) -> dict[str, Any]:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return {"type": "text"}
    found: dict[str, Any] = msgspec.to_builtins(wanted)
    return {name: value for name, value in found.items() if value is not None}


_AS_ASKED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id",
    "prompt_cache_key", "safety_identifier", "temperature", "top_p", "user",
)  # fmt: skip
"""Fields that a response repeats."""


def _fields(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """The fields of a response that has just begun."""
    reasoning = body.reasoning
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "service_tier": "default",
        "store": body.is_stored,
        "text": {"format": _format(body)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
        **{name: getattr(body, name) for name in _AS_ASKED},
    }


class Running:
    """One that is being answered, with its events so far."""

    def __init__(
        self, answer: ResponseAnswer, generation: Held, release: Callable[[], None]
    ) -> None:
        self.answer = answer
        self._generation = generation
        self._release = release
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._kept = asyncio.Event()
        self._has_ended = False

    @property
    def has_begun(self) -> bool:
        """It is being answered, which what is kept does not say."""
        return bool(self.answer.stored.response["status"] == "in_progress")

    async def run(self) -> None:
        """Returns at its end, of whatever kind; it is kept then."""
        try:
            async for event in self.answer.events():
                self._tell(event)
        finally:
            self._generation.close()
            await self._keep()
            self._release()
            self._has_ended = True
            self._changed.set()
            self._kept.set()

    async def cancel(self) -> None:
        """Takes it out of the engine, and returns when it is kept as cancelled."""
        self.answer.is_cancelled = True
        self._generation.close()
        await self._kept.wait()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yields the events behind number `after`, as they come."""
        index = 0
        while True:
            while index < len(self._events):
                event, index = self._events[index], index + 1
                if number_of(event) > after:
                    yield event
            if self._has_ended:
                return
            self._changed.clear()
            await self._changed.wait()

    def _tell(self, event: bytes) -> None:
        parts = event.split(b"\n\n")
        self._events += [part + b"\n\n" for part in parts if part]
        self._changed.set()

    async def _keep(self) -> None:
        try:
            await self.answer.keep(self._events)
        except VllmxError as error:
            logger.error("a response could not be kept: %s", error.message)


def number_of(event: bytes) -> int:
    """The sequence number of an event as it is sent."""
    _, _, rest = event.partition(b'"sequence_number":')
    return int(rest.partition(b",")[0])


class BackgroundResponses:
    """Background responses of this server that have not ended."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, response_id: str) -> Running | None:
        """None where it has ended, or is none of the background."""
        return self._running.get(response_id)

    def begin(self, running: Running) -> None:
        """Goes on with it until its end."""
        name = running.answer.stored.id
        self._running[name] = running
        task = asyncio.ensure_future(running.run())
        self._tasks.add(task)

        def forget(_: object) -> None:
            self._running.pop(name, None)
            self._tasks.discard(task)

        task.add_done_callback(forget)


def lost(stored: StoredResponse) -> None:
    """The server ended while it was being answered."""
    stored.response["status"] = "failed"
    text = "the server ended while this was being answered: send the request again"
    stored.response["error"] = {"code": "server_error", "message": text}
