"""A conversation that the model is asked to go on with: what every route of chats submits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.chat import ChatOptions
from vllmx_engine.client.request_limits import resolve_logprobs
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server.generating.chat_body import ChatCompletionRequest
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.reading import body_bytes, caller_of, most_tokens
from vllmx_server.generating.served import Served
from vllmx_server.http.client import client_of
from vllmx_server.http.disconnect import while_there


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A parsed body."""

    body: ChatCompletionRequest
    conversation: list[dict[str, Any]]
    options: ChatOptions
    params: SamplingParams
    fit_max_tokens: bool
    """A `max_tokens` that the context cannot hold is cut, not refused."""


def chat_call(served: Served, body: ChatCompletionRequest, fit: bool = False) -> ChatCall:
    """The call for a checked body; for a large one, run this on a thread. Raises
    InvalidRequestError.

    Args:
        fit: a `max_tokens` of the body that the context cannot hold is cut, not refused.
    """
    check_template(served, body.chat_template)
    info = served.llm.info
    resolve_logprobs("top_logprobs", body.num_logprobs, info.max_logprobs, info.vocab_size)
    defaults, limit = served.llm.default_sampling_params, body.token_limit
    if limit is None:
        limit, fit = defaults.get("max_tokens"), True  # a recommendation is no one's mistake
    params = body.sampling_params(defaults, max_tokens=limit, logprobs=body.num_logprobs)
    return ChatCall(body, body.conversation(), body.chat_options(), params, fit)


async def prompt_tokens(
    request: Request,
    served: Served,
    conversation: list[dict[str, Any]],
    options: ChatOptions,
    add_special_tokens: bool = False,
) -> list[int]:
    """The tokens of a rendered conversation. Raises TemplateError, InvalidRequestError for too many
    of them."""
    encoding = served.llm.encode_chat(
        conversation,
        options,
        add_special_tokens,
        client_of(request),
        body_bytes(request),
        most_tokens(served),
    )
    return await while_there(request.receive, encoding)


def check_template(served: Served, source: str | None) -> None:
    """Raises InvalidRequestError for a template of the request's own, unless clients are trusted
    with that."""
    if source is not None and not served.config.trust_request_chat_template:
        raise field_error(
            "chat_template",
            "is not taken from requests here: the operator chooses the template with"
            " --chat-template, or lets clients choose with --trust-request-chat-template",
        )


async def submit_chat(
    request: Request, served: Served, call: ChatCall, *, by_events: bool = False
) -> list[RequestStream]:
    """Starts the answer. Raises what the engine refuses.

    Args:
        by_events: the answer is read by `chat_events`, a piece at a time, also where it is sent as
            a whole: one long text would be read in one go.
    """
    body = call.body
    stream = await served.llm.submit_chat(
        call.conversation,
        call.params,
        chat=call.options,
        kind="delta" if body.stream or by_events else "final",
        options=caller_of(request, body),
        add_special_tokens=bool(body.add_special_tokens),
        fit_max_tokens=call.fit_max_tokens,
        num_bytes=body_bytes(request),
        beams=body.beams(call.params),
    )
    if call.options.tools:
        served.metrics.parser_fell_back(served.llm.calls_origin)
    return [stream]
