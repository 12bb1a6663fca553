"""A request for a response with tools of MCP servers, until the model's first answer and again for
each that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.requests import Request
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.apis.responses.as_chat import chat_of, items_of
from vllmx_server.apis.responses.kept import KeptResponses
from vllmx_server.apis.responses.mcp_servers import RequestedServer
from vllmx_server.apis.responses.mcp_tools import RequestTools
from vllmx_server.apis.responses.rounds import ToolRounds
from vllmx_server.apis.responses.schema import InputItem, ResponsesRequest
from vllmx_server.errors import ToolServerError
from vllmx_server.generating.chat_body import ChatCompletionRequest, ChatMessage
from vllmx_server.generating.chat_call import ChatCall, chat_call, submit_chat
from vllmx_server.generating.field_names import RESPONSES_FIELDS
from vllmx_server.generating.reading import body_bytes
from vllmx_server.generating.served import Served
from vllmx_server.generating.tools import no_longer_required
from vllmx_server.http.client import client_of
from vllmx_server.http.deadline import Deadline
from vllmx_server.mcp.servers import ToolServers

Before = Callable[[Request, Served, ResponsesRequest], Awaitable[list[InputItem]]]
"""Reads the conversation that a request goes on with; its bytes are counted as the body's."""


class ToolRequest:
    """One request.

    Args:
        wanted: servers that it asks for.
        before: reads the conversation before it.
    """

    def __init__(
        self,
        request: Request,
        served: Served,
        body: ResponsesRequest,
        wanted: Sequence[RequestedServer],
        before: Before,
    ) -> None:
        servers = served.store(KeptResponses).tool_servers
        assert servers is not None
        self._request = request
        self._served = served
        self._body = body
        self._wanted = wanted
        self._read = before
        self._before: list[InputItem] = []
        self._servers: ToolServers = servers
        self._faults: dict[str, str | None] = {}
        self._num_bytes = 0
        self._tools: RequestTools

    async def first_call(self) -> ChatCall:
        """The first call of the model, once the servers were tried. Raises InvalidRequestError."""
        labels = [each.label for each in self._wanted]
        for label in labels:
            await asyncio.wrap_future(self._servers.settled(label))
        self._faults = {label: self._servers.fault(label) for label in labels}
        offered = {label: self._servers.tools(label) for label in labels}
        self._tools = RequestTools(self._body, self._wanted, offered)
        self._check_choice()
        self._before = await self._read(self._request, self._served, self._body)
        self._num_bytes = body_bytes(self._request)
        self._num_bytes += len(msgspec.json.encode(self._tools.functions))
        return await self._built((), 0, False)

    def _check_choice(self) -> None:
        """Raises ToolServerError if a call is required that only unreachable servers could take."""
        needed = self._tools.needed_servers(self._body.tool_choice)
        for label in needed:
            if (fault := self._faults.get(label)) is not None:
                raise ToolServerError(
                    f"tool_choice asks for a call of a tool, but the MCP server {label!r} cannot be"
                    f' reached ({fault}): set tool_choice to "auto", or try again once it runs',
                    param="tool_choice",
                )

    def rounds(
        self, streams: list[RequestStream], started_s: float, deadline: Deadline
    ) -> ToolRounds:
        """What follows on the first answer."""
        body, config = self._body, self._served.config
        known = {
            item.server_label
            for item in (*self._before, *items_of(body))
            if item.type == "mcp_list_tools"
        }
        return ToolRounds(
            streams,
            self._round,
            self._tools,
            self._servers,
            {label: fault for label, fault in self._faults.items() if label not in known or fault},
            metrics=self._served.metrics,
            started_s=started_s,
            deadline=deadline,
            max_rounds=config.mcp_max_rounds,
            max_calls=body.max_tool_calls,
            max_tokens=body.max_output_tokens,
        )

    async def _round(
        self, after: Sequence[ChatMessage], used: int, is_last: bool
    ) -> list[RequestStream]:
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
            chat.tools = [*(chat.tools or ()), *self._tools.functions] or None
            if is_last:
                chat.tool_choice = "none"
            elif after and chat.tool_choice != "none":
                chat.tool_choice = no_longer_required(chat.tool_choice)
            if chat.max_tokens is not None:
                chat.max_tokens -= used

        choice = self._tools.choice(self._body.tool_choice)
        body = msgspec.structs.replace(self._body, tool_choice=choice)
        chat = chat_of(body, self._before, extend)
        with RESPONSES_FIELDS.told():
            return chat_call(self._served, chat)
