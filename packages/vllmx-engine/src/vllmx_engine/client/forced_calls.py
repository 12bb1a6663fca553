"""The grammar of an answer under `tool_choice` and strict tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.errors import InvalidRequestError, listing, shown
from vllmx_core.output_format import JsonArguments, NamedCall, OutputFormat
from vllmx_core.sampling import SamplingParams
from vllmx_core.structured import StructuredOutputsParams

from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.formats.call_grammar import may_call, must_call, tells_calls
from vllmx_engine.formats.tool_schemas import Tools, tools_by_name

CALLS_FIELD = "tool_choice"
"""The `field` of a form that was made for calls."""


def choice_of(given: str | Mapping[str, Any] | None) -> str:
    """`ChatOptions.tool_choice` from the form of OpenAI's API. Raises InvalidRequestError."""
    if isinstance(given, Mapping):
        function = given.get("function")
        given = function.get("name") if isinstance(function, Mapping) else ""
    if given is None or (isinstance(given, str) and given):
        return given or "auto"
    raise InvalidRequestError(
        'tool_choice is "auto", "none", "required", the name of a tool or {"type": "function",'
        ' "function": {"name": ...}}',
        param="tool_choice",
    )


def asks_for_calls(chat: ChatOptions | None) -> bool:
    """True if the request constrains the form of calls."""
    if chat is None or chat.tool_choice == "none":
        return False
    is_free = chat.tool_choice == "auto" and chat.allowed_tools is None
    return not is_free or any(map(_is_strict, chat.tools or ()))


def told_tools(made_of: OutputFormat, chat: ChatOptions) -> Sequence[Mapping[str, Any]] | None:
    """Tools that the prompt tells of, and that an answer can call: all, or only those that may be
    called where no grammar keeps the answer from calling others."""
    tools = chat.shown_tools
    if chat.allowed_tools is None or chat.tool_choice != "auto" or _holds_calls(made_of, chat):
        return tools
    return [tool for tool in tools or () if set(tools_by_name([tool])) & set(chat.allowed_tools)]


def with_calls(params: SamplingParams, made_of: OutputFormat, chat: ChatOptions) -> SamplingParams:
    """Parameters under which the answer calls what it must, or is right where it calls.

    Raises:
        InvalidRequestError: there is no such tool, the model has no format of calls, or the answer
            has another form already.
    """
    tools = tools_by_name(chat.tools)
    if chat.allowed_tools is not None:
        tools = {name: schema for name, schema in tools.items() if name in chat.allowed_tools}
    if chat.tool_choice == "auto":
        if not _holds_calls(made_of, chat) or params.structured_outputs is not None:
            return params
        tag = may_call(made_of, _loose(made_of, tools, chat.tools), one_call=chat.one_call)
    else:
        _check(params, chat.tool_choice, tools)
        if chat.tool_choice != "required":
            tools = {chat.tool_choice: tools[chat.tool_choice]}
        tag = must_call(made_of, tools, one_call=chat.one_call or chat.tool_choice != "required")
        if tag is None:
            raise InvalidRequestError(
                "tool_choice cannot make this model call a tool, for how it writes calls is not"
                ' known: leave tool_choice out, or start the server with --tool-parser ("vllmx'
                ' parsers" lists the formats)',
                param="tool_choice",
            )
    is_compact = made_of.calls is not None and made_of.calls.is_compact
    form = StructuredOutputsParams(
        structural_tag=tag, disable_any_whitespace=is_compact, field=CALLS_FIELD
    )
    return replace(params, structured_outputs=form)


def _holds_calls(made_of: OutputFormat, chat: ChatOptions) -> bool:
    """True if a grammar can constrain the calls of this answer. An answer that continues a message
    lacks the header with which others begin."""
    goes_on = chat.continue_final_message or chat.add_generation_prompt is False
    return tells_calls(made_of) and not (goes_on and made_of.channels is not None)


def _check(params: SamplingParams, choice: str, tools: Tools) -> None:
    if not tools or (choice != "required" and choice not in tools):
        known = listing(sorted(tools)) or "none"
        raise InvalidRequestError(
            f"tool_choice asks for {'a call' if choice == 'required' else shown(choice)}, but"
            f" the tools of the request are: {known}",
            param="tool_choice",
        )
    form = params.structured_outputs
    # OpenAI's field is about content, and an answer that must be a call has none.
    if form is not None and form.field != "response_format":
        raise InvalidRequestError(
            f"tool_choice makes the answer a call, and {form.field} gives it"
            " another form: leave one of them out",
            param="tool_choice",
        )


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function", tool)
    return isinstance(function, Mapping) and function.get("strict") is True


def _loose(made_of: OutputFormat, tools: Tools, given: Sequence[Mapping[str, Any]] | None) -> Tools:
    """Tools that are not strict take any object, where arguments are one."""
    call = None if made_of.calls is None else made_of.calls.call
    if isinstance(call, NamedCall) and not isinstance(call.arguments, JsonArguments):
        return tools
    strict = {name for tool in given or () if _is_strict(tool) for name in tools_by_name([tool])}
    return {name: schema if name in strict else {} for name, schema in tools.items()}
