"""Answers and events of /v1/responses, and answers of /v1/conversations."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from vllmx_server.generating.answers import TokenLogprob
from vllmx_server.http.answers import Page
from vllmx_server.schema.record import Record

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Record, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(Record, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Record, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Record, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCall(Record, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    """JSON, as the model wrote it."""


class CustomCall(Record, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


class ListedTool(Record, kw_only=True):
    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None


class McpListTools(Record, kw_only=True, tag_field="type", tag="mcp_list_tools"):
    """The tools of an MCP server that the model was offered."""

    id: str
    server_label: str
    tools: list[ListedTool]
    error: str | None


class McpProtocolError(Record, kw_only=True, tag_field="type", tag="mcp_protocol_error"):
    """The server did not answer, or refused the call."""

    code: int
    message: str


class ErrorText(Record, kw_only=True, tag_field="type", tag="text"):
    text: str


class McpToolError(Record, kw_only=True, tag_field="type", tag="mcp_tool_execution_error"):
    """The tool says that it failed."""

    content: list[ErrorText]


class McpCall(Record, kw_only=True, tag_field="type", tag="mcp_call"):
    """A call of an MCP server's tool, and its result."""

    id: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    server_label: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""
    output: str | None
    error: McpProtocolError | McpToolError | None
    approval_request_id: None


OutputItem = MessageItem | ReasoningItem | FunctionCall | CustomCall | McpListTools | McpCall


class ResponseError(Record, kw_only=True):
    code: str
    message: str


class IncompleteDetails(Record, kw_only=True):
    reason: Literal["max_output_tokens"]


class ReasoningShown(Record, kw_only=True):
    effort: str | None
    summary: str | None


class TextShown(Record, kw_only=True):
    format: dict[str, Any]


class InputTokens(Record, kw_only=True):
    cached_tokens: int


class OutputTokens(Record, kw_only=True):
    reasoning_tokens: int


class ConversationShown(Record, kw_only=True):
    id: str


class ResponseUsage(Record, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class Response(Record, kw_only=True):
    """One response: what was asked, and what there is of its answer."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    background: bool
    completed_at: int | None
    conversation: ConversationShown | None
    """The conversation to which the input and the output are added."""
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: TextShown
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class ItemList(Page, kw_only=True):
    """The input items of a response, as they were sent, with ids."""

    data: list[dict[str, Any]]


class CountedInput(Record, kw_only=True):
    """The number of tokens in the prompt of a response."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Compaction(Record, kw_only=True):
    """A shortened conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    """The messages of the user, as they were, and one item of the type `compaction`."""
    usage: ResponseUsage


class ConversationObject(Record, kw_only=True):
    """A conversation without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Record, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class Numbered(Record, tag_field="type"):
    sequence_number: int
    """0 for the first one, 1 for the next."""


class OfResponse(Numbered):
    response: Response


class ResponseCreated(OfResponse, tag="response.created"):
    """The first event."""


class ResponseInProgress(OfResponse, tag="response.in_progress"):
    """The second one."""


class ResponseCompleted(OfResponse, tag="response.completed"):
    """The last event, if all went well."""


class ResponseIncomplete(OfResponse, tag="response.incomplete"):
    """The last event of an answer that was cut."""


class ResponseFailed(OfResponse, tag="response.failed"):
    """The last event of an answer that failed."""


class ResponseCancelled(OfResponse, tag="response.cancelled"):
    """The last event of an answer that somebody cancelled or deleted."""


class ItemAdded(Numbered, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Numbered, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class InItem(Numbered):
    item_id: str
    output_index: int


class InPart(InItem):
    content_index: int


class PartAdded(InPart, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(InPart, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextPiece(InPart, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(InPart, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningPiece(InPart, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(InPart, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(InItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(InItem, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomDelta(InItem, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomDone(InItem, tag="response.custom_tool_call_input.done"):
    input: str


class McpArgumentsDelta(InItem, tag="response.mcp_call_arguments.delta"):
    delta: str


class McpArgumentsDone(InItem, tag="response.mcp_call_arguments.done"):
    arguments: str


class McpCallInProgress(InItem, tag="response.mcp_call.in_progress"):
    """The model begins a call."""


class McpCallCompleted(InItem, tag="response.mcp_call.completed"):
    """The tool has answered."""


class McpCallFailed(InItem, tag="response.mcp_call.failed"):
    """The tool has not answered, or says that it failed."""


class McpListInProgress(InItem, tag="response.mcp_list_tools.in_progress"):
    """The server is asked for its tools."""


class McpListCompleted(InItem, tag="response.mcp_list_tools.completed"):
    """The tools are known."""


class McpListFailed(InItem, tag="response.mcp_list_tools.failed"):
    """The server is not there."""


class ErrorEvent(Numbered, tag="error"):
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
