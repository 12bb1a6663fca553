"""The model's answer as items of a response, and as events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllmx_engine.formats.events import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    ReasoningPiece,
)

from vllmx_server.apis.responses.items import (
    CallDone,
    Happening,
    ToolsListed,
    finish_call,
    listed,
    new_call,
)
from vllmx_server.apis.responses.tools import ToolForm, free_form
from vllmx_server.generating.answers import TokenLogprob
from vllmx_server.generating.chat_events import AnswerEnd
from vllmx_server.generating.logprobs import ContentLogprobs
from vllmx_server.store.database import new_id

if TYPE_CHECKING:
    from vllmx_server.apis.responses.mcp_rounds import RequestTools

Told = tuple[str, dict[str, Any]]
"""The type of an event without "response.", and its own fields."""


class Output:
    """Takes what happens while a model answers.

    Args:
        logprobs: of the text, where they are wanted.
        forms: tools that are not plain functions, by what the model calls them.
        tools: of a request with tools of MCP servers.

    Attributes:
        items: of the output; the last one may still grow.
        end: why it ended.
    """

    def __init__(
        self,
        logprobs: ContentLogprobs | None = None,
        forms: Mapping[str, ToolForm] = MappingProxyType({}),
        tools: RequestTools | None = None,
    ) -> None:
        self._forms = forms
        self._tools = tools
        self._waiting: list[int] = []
        """Items of this round's calls of MCP servers' tools, by number; -1: ended."""
        self._logprobs = logprobs
        self.items: list[dict[str, Any]] = []
        self.end: AnswerEnd | None = None
        self._pieces: list[str] = []
        """The pieces of the open item's text."""
        self._open: str | None = None
        """The open item's type."""

    def take(self, event: Happening) -> Iterator[Told]:
        """The events of what happened next."""
        if isinstance(event, ContentPiece):
            yield from self._more("message", event.text)
        elif isinstance(event, ReasoningPiece):
            yield from self._more("reasoning", event.text)
        elif isinstance(event, CallBegin):
            yield from self._end_open("completed")
            tool = None if self._tools is None else self._tools.called(event.name)
            if tool is not None:
                yield from self._begin(new_call(tool))
                self._waiting.append(len(self.items) - 1)
                yield "mcp_call.in_progress", self._place()
                return
            form = self._forms.get(event.name) or ToolForm(event.name)
            yield from self._begin(_new_call(event.id, form))
        elif isinstance(event, ArgumentsPiece):
            self._pieces.append(event.text)
            if self._open in ("function_call", "mcp_call"):
                yield f"{self._open}_arguments.delta", {**self._place(), "delta": event.text}
        elif isinstance(event, CallEnd):
            yield from self._end_open("completed")
        elif isinstance(event, CallDone):
            yield from self._call_done(event)
        elif isinstance(event, ToolsListed):
            yield from self._listed(event)
        else:
            self.end = event
            yield from self.close("completed" if self._is_whole(event) else "incomplete")

    def _is_whole(self, end: AnswerEnd) -> bool:
        """True if the item that is open at the end of an answer is complete: a stop string cut an
        open call unless the answer ends by calls."""
        is_call = self._open is not None and self._open.endswith("_call")
        return end.finish_reason != "length" and (not is_call or end.finish_reason == "tool_calls")

    def close(self, status: str) -> Iterator[Told]:
        """Ends what is open, calls that nothing came of included."""
        yield from self._end_open(status)
        for index in self._waiting:
            if index >= 0:
                item = self.items[index]
                item["status"] = "incomplete"
                yield "output_item.done", {"output_index": index, "item": item}
        self._waiting = []

    def _listed(self, event: ToolsListed) -> Iterator[Told]:
        item = listed(event.label, event.tools, event.fault)
        yield from self._begin({**item, "tools": [], "error": None})
        place, self._open = self._place(), None
        yield "mcp_list_tools.in_progress", place
        self.items[-1] = item
        yield f"mcp_list_tools.{'completed' if event.fault is None else 'failed'}", self._place()
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _call_done(self, event: CallDone) -> Iterator[Told]:
        yield from self._end_open("completed")
        index, self._waiting[event.number] = self._waiting[event.number], -1
        item = self.items[index]
        finish_call(item, event.result)
        place = {"item_id": item["id"], "output_index": index}
        yield f"mcp_call.{item['status']}", place
        yield "output_item.done", {"output_index": index, "item": item}
        if all(each < 0 for each in self._waiting):
            self._waiting = []

    def _end_open(self, status: str) -> Iterator[Told]:
        if self._open is None:
            return
        text, item, place = "".join(self._pieces), self.items[-1], self._place()
        if self._open == "function_call":
            item["arguments"] = text
            yield (
                "function_call_arguments.done",
                {**place, "name": item["name"], "arguments": text},
            )
        elif self._open == "mcp_call":
            item["arguments"] = text
            self._open, self._pieces = None, []
            yield "mcp_call_arguments.done", {**place, "arguments": text}
            return  # it ends with what comes of it
        elif self._open == "custom_tool_call":
            item["input"] = text = free_form(text)
            yield "custom_tool_call_input.delta", {**place, "delta": text}
            yield "custom_tool_call_input.done", {**place, "input": text}
        else:
            part = item["content"][0]
            part["text"] = text
            at = {**place, "content_index": 0}
            if self._open == "message":
                self._new_logprobs()
                yield "output_text.done", {**at, "text": text, "logprobs": part["logprobs"]}
            else:
                yield "reasoning_text.done", {**at, "text": text}
            yield "content_part.done", {**at, "part": part}
        item["status"] = status
        self._open, self._pieces = None, []
        yield "output_item.done", {"output_index": place["output_index"], "item": item}

    def _more(self, kind: str, text: str) -> Iterator[Told]:
        if self._open != kind:
            yield from self._end_open("completed")
            yield from self._begin(_new_message() if kind == "message" else _new_reasoning())
            part = self.items[-1]["content"][0]
            yield "content_part.added", {**self._place(), "content_index": 0, "part": part}
        self._pieces.append(text)
        at = {**self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            yield "output_text.delta", {**at, "logprobs": self._new_logprobs()}
        else:
            yield "reasoning_text.delta", at

    def _new_logprobs(self) -> list[TokenLogprob]:
        """The log-probabilities since the last call, which the open message keeps."""
        new = [] if self._logprobs is None else self._logprobs.take()
        self.items[-1]["content"][0]["logprobs"] += new
        return new

    def _begin(self, item: dict[str, Any]) -> Iterator[Told]:
        self._open = item["type"]
        shown = {**item, "content": []} if "content" in item else dict(item)
        self.items.append(item)
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": shown}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _new_call(call_id: str, form: ToolForm) -> dict[str, Any]:
    namespace = {} if form.namespace is None else {"namespace": form.namespace}
    return {
        "id": new_id("ctc_" if form.is_custom else "fc_"),
        "type": "custom_tool_call" if form.is_custom else "function_call",
        "status": "in_progress",
        "call_id": call_id,
        "name": form.name,
        **namespace,
        "input" if form.is_custom else "arguments": "",
    }


def _new_message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": new_id("msg_"),
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [part],
    }


def _new_reasoning() -> dict[str, Any]:
    return {
        "id": new_id("rs_"),
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
    }
