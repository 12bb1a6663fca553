"""Responses with MCP tools: the model calls them in rounds until it answers without a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from vllmx_core.errors import shown
from vllmx_engine.client.request import Request as EngineRequest
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.formats.events import ReadAnswer
from vllmx_engine.wire.outputs import RequestMetrics, ToolCall

from vllmx_server.apis.responses.as_chat import chat_of, items_before, items_of
from vllmx_server.apis.responses.items import CallDone, Happening, ToolsListed
from vllmx_server.apis.responses.schema import InputItem, ResponsesRequest
from vllmx_server.apis.responses.store import KeptResponses
from vllmx_server.apis.responses.tools import RequestedServer, functions_of
from vllmx_server.errors import AbortedError, ToolServerError
from vllmx_server.generating.chat_body import ChatCompletionRequest, ChatMessage, ToolFunction
from vllmx_server.generating.chat_body import ToolCall as WrittenCall
from vllmx_server.generating.chat_call import ChatCall, chat_call, submit_chat
from vllmx_server.generating.chat_events import AnswerEnd, ChatEvent, ChatEvents
from vllmx_server.generating.field_names import RESPONSES_FIELDS
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.generation import Generation, Usage
from vllmx_server.generating.reading import body_bytes
from vllmx_server.generating.served import Served
from vllmx_server.generating.tools import ALLOWED, no_longer_required
from vllmx_server.http.client import client_of
from vllmx_server.http.deadline import Deadline
from vllmx_server.mcp.offered import OfferedTool, ToolResult, called, chosen, failure
from vllmx_server.mcp.servers import ToolServers


class RequestTools:
    """The tools of a request: those of MCP servers, and the client's own functions.

    Args:
        wanted: servers.
        offered: the tools that each of them has now.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        wanted: Sequence[RequestedServer],
        offered: Mapping[str, Sequence[OfferedTool]],
    ) -> None:
        self.of_servers = {
            each.label: chosen(offered[each.label], each.allowed, each.param)
            if offered[each.label]
            else []
            for each in wanted
        }
        self._own = {each["function"]["name"] for each in functions_of(body.tools) or ()}

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The servers' tools in the form of chats."""
        return [tool.function for tools in self.of_servers.values() for tool in tools]

    def called(self, name: str) -> OfferedTool | None:
        """The server's tool that the model means; None: the client's, or nobody's."""
        if name in self._own:
            return None
        return called((tool for tools in self.of_servers.values() for tool in tools), name)

    def choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """A `tool_choice` whose tools of servers are named as functions. Raises
        InvalidRequestError."""
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == ALLOWED and isinstance(choice.get("tools"), list):
            named = [each for tool in choice["tools"] for each in self._allowed(tool)]
            return choice | {"tools": named}
        if choice.get("type") != "mcp":
            return choice
        label, name = choice.get("server_label"), choice.get("name")
        for tool in self._of(label):
            if name in (tool.tool, tool.name):
                return _function(tool)
        raise field_error(
            "tool_choice",
            f"names {shown(name)} of {shown(label)}, which is none of the tools of MCP"
            " servers that the request asks for",
        )

    def needed_servers(self, choice: str | dict[str, Any] | None) -> list[str]:
        """Servers at least one of which must have tools to meet `choice`."""
        if choice == "required":
            return [] if self._own or self.functions else list(self.of_servers)
        if not isinstance(choice, dict):
            return []
        tools = choice.get("tools") if choice.get("type") == ALLOWED else [choice]
        found = [tool for tool in tools or () if isinstance(tool, dict)]
        labels = [str(tool.get("server_label")) for tool in found if tool.get("type") == "mcp"]
        if len(labels) < len(found) or any(self._of(label) for label in labels):
            return []  # something else may be called
        return labels

    def _allowed(self, tool: Any) -> list[Any]:
        """One tool that a choice allows, or all of a server's."""
        if not isinstance(tool, dict) or tool.get("type") != "mcp":
            return [tool]
        if tool.get("name") is not None:
            return [self.choice(tool)]
        label = str(tool.get("server_label"))
        if label not in self.of_servers:
            raise field_error(
                "tool_choice",
                f"allows the tools of {shown(label)}, which is none of the MCP servers"
                " that the request asks for",
            )
        return [_function(each) for each in self._of(label)]

    def _of(self, label: Any) -> Sequence[OfferedTool]:
        return self.of_servers.get(label, ()) if isinstance(label, str) else ()


def _function(tool: OfferedTool) -> dict[str, Any]:
    return {"type": "function", "name": tool.name}


class ToolRequest:
    """One request.

    Args:
        wanted: servers that it asks for.
    """

    def __init__(
        self,
        request: Request,
        served: Served,
        body: ResponsesRequest,
        wanted: Sequence[RequestedServer],
    ) -> None:
        servers = served.store(KeptResponses).tool_servers
        assert servers is not None
        self.body = body
        self.servers: ToolServers = servers
        self.metrics = served.metrics
        self.max_rounds = served.config.mcp_max_rounds
        self.tools: RequestTools
        self._request = request
        self._served = served
        self._wanted = wanted
        self._before: list[InputItem] = []
        self._faults: dict[str, str | None] = {}
        self._num_bytes = 0

    async def first_call(self) -> ChatCall:
        """The first call of the model, once the servers were tried. Raises InvalidRequestError."""
        labels = [each.label for each in self._wanted]
        for label in labels:
            await asyncio.wrap_future(self.servers.settled(label))
        self._faults = {label: self.servers.fault(label) for label in labels}
        offered = {label: self.servers.tools(label) for label in labels}
        self.tools = RequestTools(self.body, self._wanted, offered)
        self._check_choice()
        self._before = await items_before(self._request, self._served, self.body)
        self._num_bytes = body_bytes(self._request)
        self._num_bytes += len(msgspec.json.encode(self.tools.functions))
        return await self._built((), 0, False)

    def _check_choice(self) -> None:
        """Raises ToolServerError if a call is required that only unreachable servers could take."""
        needed = self.tools.needed_servers(self.body.tool_choice)
        for label in needed:
            if (fault := self._faults.get(label)) is not None:
                raise ToolServerError(
                    f"tool_choice asks for a call of a tool, but the MCP server {label!r} cannot be"
                    f' reached ({fault}): set tool_choice to "auto", or try again once it runs',
                    param="tool_choice",
                )

    def unlisted(self) -> dict[str, str | None]:
        """Servers whose tools the conversation has not listed yet, with why they have none."""
        known = {
            item.server_label
            for item in (*self._before, *items_of(self.body))
            if item.type == "mcp_list_tools"
        }
        return {
            label: fault for label, fault in self._faults.items() if label not in known or fault
        }

    def rounds(
        self, streams: list[RequestStream], started_s: float, deadline: Deadline
    ) -> ToolRounds:
        """The rounds that begin with the first answer."""
        return ToolRounds(self, streams, started_s, deadline)

    async def submit(
        self, after: Sequence[ChatMessage], used: int, is_last: bool
    ) -> list[RequestStream]:
        """Starts the next answer of the model.

        Args:
            after: messages that followed on the request's own conversation.
            used: tokens generated so far.
            is_last: nothing may be called in it.
        """
        call = await self._built(after, used, is_last)
        with RESPONSES_FIELDS.told():
            return await submit_chat(self._request, self._served, call, by_events=True)

    async def _built(self, after: Sequence[ChatMessage], used: int, is_last: bool) -> ChatCall:
        size = self._num_bytes + sum(len(each.content or ()) for each in after)
        self._request.scope["state"]["body_bytes"] = size
        return await self._served.llm.text.run(
            client_of(self._request), size, lambda _: self._call(after, used, is_last)
        )

    def _call(self, after: Sequence[ChatMessage], used: int, is_last: bool) -> ChatCall:
        def extend(chat: ChatCompletionRequest) -> None:
            chat.messages += after
            chat.tools = [*(chat.tools or ()), *self.tools.functions] or None
            if is_last:
                chat.tool_choice = "none"
            elif after and chat.tool_choice != "none":
                chat.tool_choice = no_longer_required(chat.tool_choice)
            if chat.max_tokens is not None:
                chat.max_tokens -= used

        choice = self.tools.choice(self.body.tool_choice)
        body = msgspec.structs.replace(self.body, tool_choice=choice)
        chat = chat_of(body, self._before, extend)
        with RESPONSES_FIELDS.told():
            return chat_call(self._served, chat)


MAX_CALLS = 32
"""Calls of one round that are run."""


class ToolRounds:
    """The rounds of one response, in place of the `Generation` and the events of one answer.

    Args:
        first: streams of the first answer, started.

    Attributes:
        tools: of the request.
        usage: of all rounds so far.
    """

    def __init__(
        self, asked: ToolRequest, first: list[RequestStream], started_s: float, deadline: Deadline
    ) -> None:
        self._asked = asked
        self.tools = asked.tools
        self.usage = Usage(0)
        self._deadline = deadline
        self._generation = Generation(first, asked.metrics, started_s, deadline, self.usage)
        self._generations = [self._generation]
        self._rounds_left = asked.max_rounds - 1
        max_calls = asked.body.max_tool_calls
        self._calls_left = asked.max_rounds * MAX_CALLS if max_calls is None else max_calls
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
    def requests(self) -> list[tuple[EngineRequest, RequestMetrics | None]]:
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
        for label, fault in self._asked.unlisted().items():
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
            most = self._asked.body.max_output_tokens
            if most is not None and self.usage.completion_tokens >= most:
                yield AnswerEnd("length", None)
                return
            self._note(found, meant, results)
            await self._next()

    async def _next(self) -> None:
        """Begins the next round."""
        self._rounds_left -= 1
        started_s = time.monotonic()
        submitting = self._asked.submit(
            self._after, self.usage.completion_tokens, self._rounds_left <= 0
        )
        streams = await self._unless_closed(submitting)
        self._generation.close()
        made = Generation(streams, self._asked.metrics, started_s, self._deadline, self.usage)
        self._generation = made
        self._generations.append(made)

    async def _unless_closed(self, work: Any) -> Any:
        """Returns the result of `work`, which is cancelled by `close` and when the time is up."""
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
        """Runs calls together and returns their results."""
        running: list[asyncio.Future[ToolResult]] = []
        for number, (call, tool) in enumerate(calls):
            if number < MAX_CALLS and self._calls_left > 0:
                self._calls_left -= 1
                future = self._asked.servers.call(tool, call.arguments)
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
