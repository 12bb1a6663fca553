"""Rounds of one response: what the model calls of MCP servers is run, and the model reads what came
of it, until it answers without such calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from vllmx_engine.client.request import Request
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.wire.outputs import RequestMetrics, ToolCall

from vllmx_server.apis.responses.mcp_items import CallDone, Happening, ToolsListed
from vllmx_server.apis.responses.mcp_tools import RequestTools
from vllmx_server.errors import AbortedError
from vllmx_server.generating.chat_body import ChatMessage, ToolFunction
from vllmx_server.generating.chat_body import ToolCall as WrittenCall
from vllmx_server.generating.chat_events import AnswerEnd, ChatEvent, ChatEvents
from vllmx_server.generating.generation import Generation, Usage
from vllmx_server.http.deadline import Deadline
from vllmx_server.mcp.offered import OfferedTool
from vllmx_server.mcp.results import ToolResult, failure
from vllmx_server.mcp.servers import ToolServers
from vllmx_server.watch.metrics import Metrics

MAX_CALLS = 32
"""Calls of one round that are run."""


Submit = Callable[[Sequence[ChatMessage], int, bool], Awaitable[list[RequestStream]]]
"""Starts the next answer of the model, from: what followed on the request's own conversation,
tokens generated so far, and whether it is the last one, in which nothing may be called."""


class ToolRounds:
    """What happens in the rounds of one response, in place of the `Generation` and the events of
    one answer.

    Args:
        first: streams of the first answer, started.
        unlisted: servers whose tools the conversation has not listed yet, with why they have none.
        max_rounds: answers of the model.
        max_calls: of servers' tools, in all; None: as many as the rounds allow.
        max_tokens: of all answers together; None: as many as the context holds.

    Attributes:
        tools: of the request.
        usage: of all rounds so far.
    """

    def __init__(
        self,
        first: list[RequestStream],
        submit: Submit,
        tools: RequestTools,
        servers: ToolServers,
        unlisted: dict[str, str | None],
        *,
        metrics: Metrics,
        started_s: float,
        deadline: Deadline,
        max_rounds: int,
        max_calls: int | None,
        max_tokens: int | None,
    ) -> None:
        self.usage = Usage(0)
        self._metrics = metrics
        self._deadline = deadline
        self._generation = Generation(first, metrics, started_s, deadline, self.usage)
        self._generations = [self._generation]
        self._submit = submit
        self.tools = tools
        self._max_tokens = max_tokens
        self._servers = servers
        self._unlisted = unlisted
        self._rounds_left = max_rounds - 1
        self._calls_left = max_rounds * MAX_CALLS if max_calls is None else max_calls
        self._after: list[ChatMessage] = []
        self._closed = asyncio.Event()

    has_middle = False

    def more(self, text: str, ids: list[int]) -> Sequence[ChatEvent]:
        """See `ChatEvents.more`; nothing comes past `all`."""
        raise AssertionError("rounds have no middle")

    def divert(self, *_: Any) -> None:
        """See `Generation.divert`; nothing comes past `all`."""
        raise AssertionError("rounds have no middle")

    @property
    def requests(self) -> list[tuple[Request, RequestMetrics | None]]:
        """See `Generation.requests`; of all rounds."""
        return [each for made in self._generations for each in made.requests]

    @property
    def finish_reasons(self) -> list[str]:
        """See `Generation.finish_reasons`; of all rounds."""
        return [reason for made in self._generations for reason in made.finish_reasons]

    def close(self) -> None:
        """Ends whatever goes on. Must be called, may be called twice."""
        self._closed.set()
        self._generation.close()

    async def all(self) -> AsyncGenerator[Happening, None]:
        """All that happens, as it comes. Raises what the engine raises, AbortedError after `close`
        and RequestTimeoutError when the time is up."""
        for label, fault in self._unlisted.items():
            yield ToolsListed(label, self.tools.of_servers[label], fault)
        while True:
            found, end = ReadAnswer(), None
            async with aclosing(ChatEvents(self._generation).all()) as events:
                async for event in events:
                    if isinstance(event, AnswerEnd):
                        end = event
                        continue
                    found.add([event])
                    yield event
            assert end is not None
            calls = found.tool_calls if end.finish_reason == "tool_calls" else []
            meant = [(call, tool) for call in calls if (tool := self.tools.called(call.name))]
            if not meant:
                yield end
                return
            results = await self._unless_closed(self._results(meant))
            for number, result in enumerate(results):
                yield CallDone(number, result)
            if len(meant) < len(calls):  # the client's part is to come
                yield end
                return
            if self._max_tokens is not None and self.usage.completion_tokens >= self._max_tokens:
                yield AnswerEnd("length", None)
                return
            self._note(found, meant, results)
            await self._next()

    async def _next(self) -> None:
        """Begins the next round."""
        self._rounds_left -= 1
        started_s = time.monotonic()
        used = self.usage.completion_tokens
        streams = await self._unless_closed(self._submit(self._after, used, self._rounds_left <= 0))
        self._generation.close()
        made = Generation(streams, self._metrics, started_s, self._deadline, self.usage)
        self._generation = made
        self._generations.append(made)

    async def _unless_closed(self, work: Any) -> Any:
        """What `work` returns. After `close`, and when the time is up, it is cancelled."""
        working = asyncio.ensure_future(self._deadline.bound(work))
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((working, closing), return_when=asyncio.FIRST_COMPLETED)
            if self._closed.is_set():
                raise AbortedError("the response was ended: send the request again")
            return working.result()
        finally:
            closing.cancel()
            if not working.done():
                working.cancel()
                working.add_done_callback(_forget)

    async def _results(self, calls: list[tuple[ToolCall, OfferedTool]]) -> list[ToolResult]:
        """What calls come to, which run together."""
        running: list[asyncio.Future[ToolResult]] = []
        for number, (call, tool) in enumerate(calls):
            if number < MAX_CALLS and self._calls_left > 0:
                self._calls_left -= 1
                future = self._servers.call(tool, call.arguments)
                running.append(asyncio.wrap_future(future))
                continue
            refused = asyncio.get_running_loop().create_future()
            refused.set_result(failure("so many calls are not run: answer without this one"))
            running.append(refused)
        return await asyncio.gather(*running)

    def _note(
        self,
        found: ReadAnswer,
        calls: list[tuple[ToolCall, OfferedTool]],
        results: list[ToolResult],
    ) -> None:
        """The round becomes part of the conversation."""
        turn = ChatMessage("assistant", found.content)
        turn.reasoning_content = found.reasoning or None
        turn.tool_calls = [
            WrittenCall(ToolFunction(tool.name, call.arguments), id=call.id) for call, tool in calls
        ]
        self._after.append(turn)
        self._after += [
            ChatMessage("tool", result.text, name=tool.name, tool_call_id=call.id)
            for (call, tool), result in zip(calls, results, strict=True)
        ]


def _forget(working: asyncio.Future[Any]) -> None:
    """Aborts what was started for nobody."""
    if working.cancelled() or working.exception() is not None:
        return
    for each in working.result():
        if isinstance(each, RequestStream):
            each.abort()
