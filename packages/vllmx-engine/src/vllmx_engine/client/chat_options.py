"""The options of a conversation, and checks of its tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_core.config_values import json_object
from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.records import Record, field

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def check_tools(tools: Any) -> None:
    """Raises InvalidRequestError for a malformed definition, and for names that models could not
    write or tell apart."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequestError(
            f"tools is {shown(tools)}: it is a list of definitions", param="tools"
        )
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f'{place} must be {{"type": "function", "function": {{"name": ...,'
                ' "description": ..., "parameters": ...}}',
                param=place,
            )
        if tool.get("type", "function") != "function":
            raise InvalidRequestError(
                f'{place}.type is {shown(tool["type"])}: tools are of type "function"',
                param=f"{place}.type",
            )
        _check_name(function["name"], f"{place}.function.name", seen)
        _check_parameters(function.get("parameters"), f"{place}.function.parameters")


def _check_name(name: str, param: str, seen: set[str]) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{param} is {shown(name)}: a name has 1 to 128 letters, digits and characters of"
            " _-.:/",
            param=param,
        )
    if name in seen:
        raise InvalidRequestError(f"{param} {name!r} is given twice: rename one", param=param)
    seen.add(name)


def _check_parameters(schema: Any, param: str) -> None:
    if schema is not None and not isinstance(schema, Mapping):
        raise InvalidRequestError(
            f"{param} is {shown(schema)}: it is a JSON schema of an object", param=param
        )
    kind = (schema or {}).get("type", "object")
    if kind not in ("object", None) and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(
            f"{param} is a schema of type {shown(str(kind))}: arguments are an object", param=param
        )


RESERVED_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "template",
    "add_generation_prompt",
    "continue_final_message",
)
"""Names that variables of a template may not have: they say what is rendered."""

ChatMessage = Mapping[str, Any]
"""An OpenAI message: role, content, and what else the template knows."""


class Message(Record):
    """One turn of a conversation, for callers that do not want to write dictionaries."""

    role: str
    content: str


class ChatOptions(Record):
    """Options for rendering a conversation; see `ChatTemplate.render`.

    Raises (constructor): InvalidRequestError for a malformed tool, and for template variables that
    have a field of their own.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    """None: the prompt is added unless `continue_final_message` is true."""
    continue_final_message: bool = False
    one_call: bool = False
    """Calls of tools after an answer's first are left out."""
    tool_choice: str = "auto"
    """"auto": the model decides; "none": no calls, and the prompt shows no tools; "required": the
    answer is calls; else the name of the tool that it calls."""
    allowed_tools: Sequence[str] | None = None
    """Names of the tools that may be called; None: all. The prompt tells of the others, too, so
    that its beginning stays, unless nothing but the prompt keeps them from being called."""
    needs_budget: bool = True
    """A budget for thoughts is refused where they are not separated from content."""
    template: str | None = None
    """Name of one of the model's templates."""
    source: str | None = None
    """Jinja source instead of the model's templates."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as enable_thinking."""

    def __post_init__(self) -> None:
        if self.tools is not None:
            check_tools(self.tools)
        if not isinstance(self.template_kwargs, Mapping):
            raise InvalidRequestError(
                f"chat_template_kwargs is {shown(self.template_kwargs)}: it is an object",
                param="chat_template_kwargs",
            )
        for name in RESERVED_VARIABLES:
            if name in self.template_kwargs:
                raise InvalidRequestError(
                    f"chat_template_kwargs may not hold {name!r}: use the field of that name",
                    param="chat_template_kwargs",
                )

    @property
    def shown_tools(self) -> list[Mapping[str, Any]] | None:
        """The tools that the prompt shows, each with its type."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return [tool if "type" in tool else {"type": "function", **tool} for tool in self.tools]

    @property
    def thinks(self) -> bool:
        """True if a known switch of the template asks the model to reason."""
        given = self.template_kwargs
        effort = given.get("reasoning_effort")
        switched_on = given.get("enable_thinking") is True or given.get("thinking") is True
        return switched_on or effort not in (None, "none")


def default_variables(text: str | None) -> dict[str, Any]:
    """Variables of the template for all chats, out of a JSON object. Raises ConfigError."""
    field_name = "default_chat_template_kwargs"
    values = json_object(text, field_name, '{"enable_thinking": false}')
    for name in RESERVED_VARIABLES:
        if name in values:
            raise ConfigError(
                f"--default-chat-template-kwargs may not hold {name!r}, which requests bring",
                param=field_name,
            )
    return values
