"""Ollama's requests as chat completions, or as prompts without a template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.apis.ollama.schema import (
    AnswerFields,
    ChatRequest,
    GenerateRequest,
    Message,
    Options,
)
from vllmx_server.generating.chat_body import (
    THINKING_SWITCHES,
    ChatCompletionRequest,
    ChatMessage,
)
from vllmx_server.generating.chat_call import ChatCall, chat_call, prompt_tokens, submit_chat
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.fields import ResponseFormat, closed
from vllmx_server.generating.filling import filled
from vllmx_server.generating.reading import caller_of
from vllmx_server.generating.sampling import SamplingFields
from vllmx_server.generating.served import Served

NAMES = FieldNames(
    {
        r"response_format(\.json_schema)?(\.schema)?": "format",
        r"max_tokens": "options.num_predict",
        r"repetition_penalty": "options.repeat_penalty",
        r"(temperature|top_[kp]|min_p|seed|stop|\w+_penalty)": r"options.\1",
        r"reasoning_effort": "think",
    }
)


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt without a template, or one that follows the tokens of `before`."""

    prompt: str | list[int]
    body: SamplingFields
    params: SamplingParams


Asked = ChatCall | Prompted | None
"""None: nothing but that the model be loaded."""


def chat_asked(served: Served, body: ChatRequest) -> Asked:
    """The chat that a body asks for. Raises InvalidRequestError."""
    if body.only_loads:
        return None
    return _call(served, body, body.messages or [], body.tools)


def generate_asked(served: Served, body: GenerateRequest) -> Asked:
    """The chat of one turn, or the prompt, that a body asks for. Raises InvalidRequestError."""
    if body.only_loads:
        return None
    text = body.prompt or ""
    is_chat = served.llm.chat_template is not None or body.images or body.system
    if body.raw or body.suffix or not is_chat:
        prompt = filled(served, [text], body.suffix)[0] if body.suffix else text
        fields = SamplingFields(**_sampling(body))
        with NAMES.told():
            fields.check()
            params = fields.sampling_params(
                served.llm.default_sampling_params,
                max_tokens=(body.options or Options()).max_tokens,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            )
        return Prompted(prompt, fields, params)
    turns = [] if not body.system else [Message("system", body.system)]
    return _call(served, body, [*turns, Message("user", text, images=body.images)], None)


async def submit(
    request: Request, served: Served, body: AnswerFields, asked: ChatCall | Prompted
) -> list[RequestStream]:
    """Starts the answer. Raises what the engine refuses."""
    context = body.context if isinstance(body, GenerateRequest) else None
    with NAMES.told():
        if isinstance(asked, Prompted):
            return await _prompted(request, served, asked, context)
        if not context:
            return await submit_chat(request, served, asked, by_events=True)
        ids = await prompt_tokens(request, served, asked.conversation, asked.options)
        return await _prompted(request, served, Prompted(ids, asked.body, asked.params), context)


async def _prompted(
    request: Request, served: Served, asked: Prompted, context: list[int] | None
) -> list[RequestStream]:
    prompt = asked.prompt
    if context:
        ids = await served.llm.encode(prompt, False) if isinstance(prompt, str) else prompt
        prompt = [*context, *ids]
    who = caller_of(request, asked.body)
    return await served.llm.submit_all([prompt], asked.params, kind="delta", options=who)


def _call(
    served: Served,
    body: AnswerFields,
    turns: list[Message],
    tools: list[dict[str, Any]] | None,
) -> ChatCall:
    chat = ChatCompletionRequest(
        messages=list[ChatMessage](turns),
        tools=tools,
        max_tokens=(body.options or Options()).max_tokens,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        continue_final_message=True if turns[-1].role == "assistant" else None,
        **_sampling(body),
    )
    if isinstance(body.think, str):
        chat.reasoning_effort = body.think
    elif body.think is not None:
        chat.chat_template_kwargs = dict.fromkeys(THINKING_SWITCHES, body.think)
    with NAMES.told():
        chat.check()
        return chat_call(served, chat, fit=True)


def _sampling(body: AnswerFields) -> dict[str, Any]:
    found = {"model": body.model, "stream": body.stream, **(body.options or Options()).sampling()}
    if body.format == "json":
        found["response_format"] = ResponseFormat("json_object")
    elif body.format:
        found["response_format"] = ResponseFormat("json_schema", schema=closed(body.format))
    return found
