"""POST /completion, /infill, /apply-template, /tokenize, /detokenize, /slots/{id}, GET /props,
/slots, /lora-adapters, and routes of vllmx under llama.cpp's paths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import ContextLengthError, VllmxError, shown
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server import __version__
from vllmx_server.apis.llamacpp.answers import LlamaAnswer
from vllmx_server.apis.llamacpp.schema import (
    COMPLETION,
    DETOKENIZE,
    INFILL,
    TOKENIZE,
    BiasMapping,
    BiasPairs,
    CompletionRequest,
    DetokenizeRequest,
    InfillRequest,
    Parts,
    TokenizeRequest,
)
from vllmx_server.errors import cut_message, error_fields, route_path
from vllmx_server.generating.api import Api, keyed, posted
from vllmx_server.generating.chat_body import DECODER, ChatCompletionRequest
from vllmx_server.generating.chat_call import check_template, prompt_tokens
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.filling import filled
from vllmx_server.generating.generate import generate
from vllmx_server.generating.reading import (
    caller_of,
    check_ids,
    checked,
    counted,
    most_tokens,
    read_json,
)
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.event_stream import Framing, HeldResponse
from vllmx_server.http.operation import GENERATES, GENERATING, JSON, STATUS, TEXT
from vllmx_server.http.pages import answer
from vllmx_server.http.route import Route
from vllmx_server.schema.record import encode

_NAMES = FieldNames(
    {"max_tokens": "n_predict", "logprobs": "n_probs", "repetition_penalty": "repeat_penalty"}
)
_TYPES = {404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}
_SLOT_ACTIONS = {
    "save": "prefixes are saved by their content: start with --kv-disk DIR, and the next server"
    " finds them",
    "restore": "saved prefixes are found by their content: start with --kv-disk DIR and send the"
    " prompt",
    "erase": "prefixes are shared by all requests: DELETE /v1/sessions/{id} unpins those of a"
    " session_id, POST /reset_prefix_cache (operators) forgets all",
}
_MODELS = ("GET", "/v1/models")
_SPAN = "text_completion"
_SNIPPET = "\n\n--- snippet ---\n\n"
_SAME = {
    "/chat/completions": "/v1/chat/completions",
    "/responses": "/v1/responses",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
}
"""llama.cpp's other paths of routes that vllmx has itself."""
Asked = tuple[list[str | Parts], SamplingParams]


def error_body(error: VllmxError) -> bytes:
    """JSON of one error as llama.cpp has it."""
    status = error.http_status
    kind = _TYPES.get(status) or error_fields(error).type
    found = {"code": status, "message": cut_message(error), "type": kind}
    if isinstance(error, ContextLengthError):
        # Clients look for these words.
        found["message"] = f"request exceeds the available context size: {found['message']}"
        found["type"] = "exceed_context_size_error"
        if error.num_tokens is not None:
            found |= {"n_prompt_tokens": error.num_tokens, "n_ctx": error.limit}
    return encode({"error": found})


FRAMING = Framing(lambda error: b"data: " + error_body(error) + b"\n\n")


async def completion(request: Request) -> HeldResponse:
    """llama.cpp's completion of one or several prompts, streamed or not."""
    return await generate(request, COMPLETION, _asked, _submit, LlamaAnswer, FRAMING)


async def infill(request: Request) -> HeldResponse:
    """Completes the text between `input_prefix`, with `prompt` behind it, and `input_suffix`."""
    return await generate(request, INFILL, _infilled, _submit, LlamaAnswer, FRAMING)


def _asked(served: Served, body: CompletionRequest) -> Asked:
    body.name_adapter(served.adapter_names)
    if body.logit_bias:
        body.logit_bias = dict(_biases(served, body.logit_bias))
    with _NAMES.told():
        params = body.sampling_params(
            served.llm.default_sampling_params,
            max_tokens=body.token_limit,
            logprobs=body.n_probs or None,
        )
    return body.prompts(), params


def _biases(served: Served, entries: BiasPairs | BiasMapping) -> Iterator[tuple[str, float]]:
    """Biases by token id; a text stands for each of its tokens. Raises InvalidRequestError."""
    has_keys = isinstance(entries, dict)
    for token, bias in entries.items() if isinstance(entries, dict) else entries:
        if bias is True:
            raise field_error("logit_bias", f"of {shown(token)} is true: give a number or false")
        value = -100.0 if bias is False else bias
        if isinstance(token, int) or (has_keys and token.isascii() and token.isdigit()):
            yield str(token), value
        else:
            for each in served.llm.tokenizer.encode(token, False):
                yield str(each), value


def _infilled(served: Served, body: InfillRequest) -> Asked:
    before = body.input_prefix + body.prompt
    (prompt,) = filled(served, [before], body.input_suffix, "input_suffix")
    extra = "".join(_SNIPPET + each.text for each in body.input_extra or ())
    return [extra + str(prompt)], _asked(served, body)[1]


async def _submit(
    request: Request, served: Served, body: CompletionRequest, asked: Asked
) -> list[RequestStream]:
    prompts, params = asked
    with _NAMES.told():
        return await served.llm.submit_all(
            [each if isinstance(each, str) else await _ids(served, each) for each in prompts],
            params,
            kind="delta" if body.stream else "final",
            options=caller_of(request, body),
            fit_max_tokens=body.token_limit is None,
        )


async def _ids(served: Served, parts: Parts) -> list[int]:
    """The tokens of ids and texts in a row; special ones come before a text that begins it."""
    found: list[int] = []
    for index, each in enumerate(parts):
        found += [each] if isinstance(each, int) else await served.llm.encode(each, index == 0)
    return found


async def _chat(request: Request, served: Served) -> tuple[list[dict[str, Any]], ChatOptions]:
    def parse(data: bytes) -> tuple[list[dict[str, Any]], ChatOptions]:
        body = checked(data, served, DECODER)
        check_template(served, body.chat_template)
        return body.conversation(), body.chat_options()

    return await read_json(request, served, parse)


async def input_tokens(request: Request) -> Response:
    """The number of tokens of a chat's prompt."""
    served = served_of(request)
    conversation, options = await _chat(request, served)
    async with counted(request) as admitted:
        tokens = await prompt_tokens(request, served, conversation, options)
        admitted.num_tokens = len(tokens)
    return answer({"object": "chat.completion.input_tokens", "input_tokens": len(tokens)})


async def apply_template(request: Request) -> Response:
    """The prompt that the chat template makes of `messages`."""
    served = served_of(request)
    conversation, options = await _chat(request, served)
    async with counted(request):
        size = request.scope["state"]["body_bytes"]
        client, render = client_of(request), served.llm.render_chat
        prompt = await served.llm.text.run(
            client, size, lambda stopped: render(conversation, options, stopped)
        )
    return answer({"prompt": prompt})


async def tokenize(request: Request) -> Response:
    """Token ids of `content`, with the text of each where `with_pieces` is true."""
    served = served_of(request)
    body = await read_json(request, served, lambda data: checked(data, served, TOKENIZE))
    client, limit = client_of(request), most_tokens(served)
    async with counted(request) as admitted:
        ids = await served.llm.encode(body.content, body.add_special, client=client, limit=limit)
        admitted.num_tokens = len(ids)

    def made(_: object) -> bytes:
        tokens = [_piece(served, each) for each in ids] if body.with_pieces else ids
        return encode({"tokens": tokens})

    data = await served.llm.text.run(client, len(ids), made)
    return Response(data, media_type="application/json")


def _piece(served: Served, token: int) -> dict[str, Any]:
    piece = served.llm.tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    served = served_of(request)
    body = await read_json(request, served, lambda data: checked(data, served, DETOKENIZE))
    check_ids(body.tokens, served.llm.info.vocab_size)
    async with counted(request) as admitted:
        text = await served.llm.decode(body.tokens, client=client_of(request))
        admitted.num_tokens = len(body.tokens)
    return answer({"content": text})


async def props(request: Request) -> Response:
    """The model, its context and the sampling parameters of requests that give none."""
    served = served_of(request)
    llm, info = served.llm, served.llm.info
    params = {**asdict(llm.sampling_params()), "n_predict": -1}
    found = {
        "default_generation_settings": {"n_ctx": info.max_model_len, "params": params},
        "total_slots": info.max_num_seqs,
        "model_path": info.path,
        "model_alias": llm.config.name,
        "chat_template": llm.chat_template or "",
        "bos_token": llm.tokenizer.config.get("bos_token") or "",
        "eos_token": llm.tokenizer.config.get("eos_token") or "",
        "modalities": {
            "vision": info.takes_images,
            "audio": info.audio_rows > 0 or info.takes_audio,
        },
        "build_info": f"vllmx-{__version__}",
    }
    return answer(found)


async def slots(request: Request) -> Response:
    """One entry for each sequence that may run; the first ones are those that do."""
    served = served_of(request)
    info, running = served.llm.info, served.llm.stats.num_running
    n_ctx = info.max_model_len
    found = [
        {"id": index, "n_ctx": n_ctx, "is_processing": index < running}
        for index in range(info.max_num_seqs)
    ]
    return answer(found)


async def lora_adapters(request: Request) -> Response:
    """The adapters that `lora` of a request may name; none is on unless one does."""
    adapters = served_of(request).llm.adapters or ()
    return answer(
        [{"id": index, "path": each.path, "scale": 0.0} for index, each in enumerate(adapters)]
    )


class SlotActionError(VllmxError):
    """No slot belongs to a client here, so there is none to save, restore or erase."""

    http_status = 501
    code = "not_supported"


async def slot_action(request: Request) -> Response:
    """Says what replaces an action on a slot."""
    action = request.query_params.get("action")
    if action not in _SLOT_ACTIONS:
        known = ", ".join(_SLOT_ACTIONS)
        raise field_error("action", f"it is one of {known}, got {shown(action)}")
    raise SlotActionError(f"action={action}: {_SLOT_ACTIONS[action]}", param="action")


async def _as_there(request: Request) -> Any:
    """Answers as the route of the same name with `/v1` does."""
    path = route_path(request.scope)
    return await served_of(request).endpoints[_SAME[path]](request)


async def models(request: Request) -> Any:
    """The models that are served."""
    served = served_of(request)
    (endpoint,) = (each.endpoint for each in served.routes if (each.method, each.path) == _MODELS)
    return await endpoint(request)


def _same(path: str) -> Route:
    return keyed(
        "POST", path, _as_there, GENERATING, text=f"See `{_SAME[path]}`.", statuses=GENERATES,
        shapes=(_SAME[path],),
    )  # fmt: skip


class LlamaCppApi(Api):
    takes_any_model = True
    routes = (
        *map(_same, _SAME),
        keyed("GET", "/models", models, STATUS, JSON),
        posted(
            "/chat/completions/input_tokens", input_tokens, TEXT, ChatCompletionRequest, "generate"
        ),
        posted(
            "/v1/chat/completions/input_tokens",
            input_tokens,
            TEXT,
            ChatCompletionRequest,
            "generate",
        ),
        posted("/completion", completion, GENERATING, CompletionRequest, "generate", span=_SPAN),
        posted("/completions", completion, GENERATING, CompletionRequest, "generate", span=_SPAN),
        posted("/infill", infill, GENERATING, InfillRequest, "generate", span=_SPAN),
        posted("/apply-template", apply_template, TEXT, ChatCompletionRequest, "generate"),
        posted("/tokenize", tokenize, TEXT, TokenizeRequest),
        posted("/detokenize", detokenize, TEXT, DetokenizeRequest),
        keyed("GET", "/props", props, STATUS, JSON),
        keyed("GET", "/slots", slots, STATUS, JSON),
        keyed("GET", "/lora-adapters", lora_adapters, STATUS, JSON),
        keyed("POST", "/slots/{id}", slot_action, STATUS, JSON, statuses=(501,)),
    )
    error_shapes = tuple((route.path, error_body) for route in routes)
