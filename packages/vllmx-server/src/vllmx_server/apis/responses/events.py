"""Events of streams of /v1/responses."""

from __future__ import annotations

from vllmx_server.apis.responses.answers import OutputItem, OutputText, ReasoningText, Response
from vllmx_server.generating.logprobs_answer import TokenLogprob
from vllmx_server.schema.record import Record


class Numbered(Record, kw_only=True):
    sequence_number: int
    """0 for the first one, 1 for the next."""


class OfResponse(Numbered, kw_only=True):
    response: Response


class ResponseCreated(OfResponse, tag_field="type", tag="response.created"):
    """The first event."""


class ResponseInProgress(OfResponse, tag_field="type", tag="response.in_progress"):
    """The second one."""


class ResponseCompleted(OfResponse, tag_field="type", tag="response.completed"):
    """The last event, if all went well."""


class ResponseIncomplete(OfResponse, tag_field="type", tag="response.incomplete"):
    """The last event of an answer that was cut."""


class ResponseFailed(OfResponse, tag_field="type", tag="response.failed"):
    """The last event of an answer that failed."""


class ResponseCancelled(OfResponse, tag_field="type", tag="response.cancelled"):
    """The last event of an answer that somebody cancelled or deleted."""


class ItemAdded(Numbered, kw_only=True, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Numbered, kw_only=True, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class InItem(Numbered, kw_only=True):
    item_id: str
    output_index: int


class InPart(InItem, kw_only=True):
    content_index: int


class PartAdded(InPart, kw_only=True, tag_field="type", tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(InPart, kw_only=True, tag_field="type", tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextPiece(InPart, kw_only=True, tag_field="type", tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(InPart, kw_only=True, tag_field="type", tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningPiece(InPart, kw_only=True, tag_field="type", tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(InPart, kw_only=True, tag_field="type", tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(
    InItem, kw_only=True, tag_field="type", tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    InItem, kw_only=True, tag_field="type", tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class CustomDelta(
    InItem, kw_only=True, tag_field="type", tag="response.custom_tool_call_input.delta"
):
    delta: str


class CustomDone(
    InItem, kw_only=True, tag_field="type", tag="response.custom_tool_call_input.done"
):
    input: str


class McpArgumentsDelta(
    InItem, kw_only=True, tag_field="type", tag="response.mcp_call_arguments.delta"
):
    delta: str


class McpArgumentsDone(
    InItem, kw_only=True, tag_field="type", tag="response.mcp_call_arguments.done"
):
    arguments: str


class McpCallInProgress(
    InItem, kw_only=True, tag_field="type", tag="response.mcp_call.in_progress"
):
    """The model begins a call."""


class McpCallCompleted(InItem, kw_only=True, tag_field="type", tag="response.mcp_call.completed"):
    """The tool has answered."""


class McpCallFailed(InItem, kw_only=True, tag_field="type", tag="response.mcp_call.failed"):
    """The tool has not answered, or says that it failed."""


class McpListInProgress(
    InItem, kw_only=True, tag_field="type", tag="response.mcp_list_tools.in_progress"
):
    """The server is asked for its tools."""


class McpListCompleted(
    InItem, kw_only=True, tag_field="type", tag="response.mcp_list_tools.completed"
):
    """The tools are known."""


class McpListFailed(InItem, kw_only=True, tag_field="type", tag="response.mcp_list_tools.failed"):
    """The server is not there."""


class ErrorEvent(Numbered, kw_only=True, tag_field="type", tag="error"):
    """An error that came before there was a response."""

    code: str
    message: str
    param: str | None


ResponsesEvent = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | TextPiece
    | TextDone
    | ReasoningPiece
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomDelta
    | CustomDone
    | McpListInProgress
    | McpListCompleted
    | McpListFailed
    | McpCallInProgress
    | McpArgumentsDelta
    | McpArgumentsDone
    | McpCallCompleted
    | McpCallFailed
    | PartDone
    | ItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ResponseCancelled
    | ErrorEvent
)
