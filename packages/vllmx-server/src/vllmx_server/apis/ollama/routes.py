"""Ollama's routes: POST /api/chat, /api/generate, /api/embed and others."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import ModelNotFoundError, listing, shown
from vllmx_engine.text.fim import fim_marks

from vllmx_server.apis.ollama.answers import FRAMING, OllamaAnswer, Turn, error_body, piece
from vllmx_server.apis.ollama.as_chat import Asked, chat_asked, generate_asked, submit
from vllmx_server.apis.ollama.schema import (
    CHAT,
    EMBED,
    GENERATE,
    MODEL,
    AnswerFields,
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    ModelRequest,
    bare_name,
)
from vllmx_server.generating.api import Api, keyed, posted
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.generate import answered
from vllmx_server.generating.pooling_call import in_pieces, pool_body, shortened
from vllmx_server.generating.reading import checked, read_json
from vllmx_server.generating.served import ModelInfo, Served, served_of
from vllmx_server.http.operation import (
    GENERATES,
    GENERATING,
    JSON,
    STATUS,
    VECTORS,
    Media,
    Operation,
)
from vllmx_server.http.pages import answer
from vllmx_server.http.route import Right, Route
from vllmx_server.schema.decode import decode
from vllmx_server.schema.record import Items, encode, json_pieces

_API_VERSION = "0.13.0"
"""The release of Ollama whose API this follows: clients refuse to speak to older ones."""
_FOREVER = "9999-12-31T23:59:59Z"
Body = TypeVar("Body", bound=AnswerFields)


async def chat(request: Request) -> Any:
    """Ollama's chat, a line of JSON for each piece unless `stream` is false."""
    return await _answered(request, CHAT, chat_asked)


async def generate(request: Request) -> Any:
    """Ollama's completion of one prompt, as a turn of a chat unless `raw` is true."""
    return await _answered(request, GENERATE, generate_asked)


async def _answered(
    request: Request,
    decoder: msgspec.json.Decoder[Body],
    prepare: Callable[[Served, Body], Asked],
) -> Any:
    served, started_s = served_of(request), time.monotonic()

    def parse(data: bytes) -> tuple[Body, Asked]:
        body = checked(data, served, decoder)
        return body, prepare(served, body)

    served.check_admission()
    body, asked = await read_json(request, served, parse)
    if asked is None:
        loaded = piece(body.model, Turn(), is_chat=isinstance(body, ChatRequest), done=True)
        return answer({**loaded, "done_reason": "load"})
    starting = partial(submit, request, served, body, asked)
    answer_of = partial(OllamaAnswer, started_s)
    return await answered(request, served, body, starting, answer_of, FRAMING, started_s)


async def embed(request: Request) -> Response:
    """A vector for each input, in Ollama's shape."""
    started_s = time.monotonic()
    body, pooled = await pool_body(request, EMBED, "embed")
    vectors = (shortened(each.values, body.dimensions, normalize=True) for each in pooled)
    found = {
        "model": body.model,
        "embeddings": Items(each.tolist() for each in vectors),
        "total_duration": round((time.monotonic() - started_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": sum(each.num_tokens for each in pooled),
    }
    return in_pieces(json_pieces(found))


async def embeddings(request: Request) -> Response:
    """The vector of one text, in Ollama's older shape."""
    _, (pooled, *_) = await pool_body(request, EMBED, "embed", FieldNames({"input": "prompt"}))
    return answer({"embedding": pooled.values.tolist()})


async def tags(request: Request) -> Response:
    """The models that are served, with an entry for each of their names."""
    served = served_of(request)
    return answer({"models": [_entry(served, *each) for each in await _named(served)]})


async def ps(request: Request) -> Response:
    """The models that are loaded."""
    served = served_of(request)
    found = [
        {
            **_entry(served, name, info),
            "size_vram": info.num_bytes or 0,
            "context_length": info.max_model_len or 0,
            "expires_at": _FOREVER,
        }
        for name, info in await _named(served)
        if info.state == "loaded"
    ]
    return answer({"models": found})


async def show(request: Request) -> Response:
    """A model's architecture, settings and capabilities."""
    served = served_of(request)
    body = await read_json(request, served, lambda data: checked(data, served, MODEL))
    info = served.llm.info
    parameters = {"num_ctx": info.max_model_len, **served.llm.default_sampling_params}
    model_info = {
        "general.architecture": info.architecture,
        f"{info.architecture}.context_length": info.max_model_len,
        f"{info.architecture}.vocab_size": info.vocab_size,
    }
    if served.pooler is not None:
        model_info[f"{info.architecture}.embedding_length"] = served.pooler.dimensions
    found = {
        "modelfile": f"FROM {body.model}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in parameters.items()),
        "template": served.llm.chat_template or "",
        "details": _details(served),
        "model_info": model_info,
        "capabilities": await served.llm.text.run("", 0, lambda _: _capabilities(served)),
        "modified_at": _created(served),
    }
    return answer(found)


async def pull(request: Request) -> Response:
    """Says that a model of this server is there. Raises ModelNotFoundError for another one."""
    served = served_of(request)

    body = await read_json(request, served, lambda data: decode(data, MODEL))
    names = [name for name, _ in await _named(served)]
    if body.model not in names:
        raise ModelNotFoundError(
            f"model {shown(body.model)} is not here, and this server downloads nothing: start it"
            f" with vllmx serve --model NAME=PATH; served: {listing(names)}",
            param="model",
        )
    if body.stream is False:
        return answer({"status": "success"})
    lines = b"".join(encode({"status": each}) + b"\n" for each in ("pulling manifest", "success"))
    return Response(lines, media_type=FRAMING.media_type.decode())


async def version(request: Request) -> Response:
    """The version of Ollama's API that is served."""
    return answer({"version": _API_VERSION})


async def _named(served: Served) -> list[tuple[str, ModelInfo]]:
    infos = await served.infos()
    return [(name, each) for each in infos for name in (each.name, *each.aliases)]


def _entry(served: Served, name: str, info: ModelInfo) -> dict[str, Any]:
    is_own = info.name == served.llm.config.name
    return {
        "name": name,
        "model": name,
        "modified_at": _created(served),
        "size": info.num_bytes or 0,
        "digest": hashlib.sha256(info.root.encode()).hexdigest(),
        "details": _details(served if is_own else None, info.root),
    }


def _details(served: Served | None, root: str = "") -> dict[str, Any]:
    """The kind of a model; None: one that is not loaded in this process."""
    family = quantization = ""
    if served is not None:
        root, family = served.llm.info.path, served.llm.info.architecture
        quantization = served.llm.config.quantization or served.llm.info.dtype
    return {
        "parent_model": "",
        "format": "gguf" if root.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": quantization,
    }


def _created(served: Served) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z")


def _capabilities(served: Served) -> list[str]:
    """May take a while: the format of answers is found out by trying."""
    if served.pooler is not None:
        return ["embedding"] if "embed" in served.pooler.tasks else []
    found: list[str] = ["completion"]
    if served.llm.chat_template is not None:
        made_of = served.llm.answer_format
        if made_of.calls is not None or made_of.channels is not None:
            found.append("tools")
        if made_of.thinking is not None or made_of.channels is not None:
            found.append("thinking")
    if served.llm.info.takes_images:
        found.append("vision")
    if fim_marks(served.llm.tokenizer) is not None:
        found.append("insert")
    return found


async def running(request: Request) -> Response:
    """Says that the server is there, as clients ask before they begin."""
    return Response()


def _model_of(request: Request, name: str | None) -> str | None:
    return None if name is None else bare_name(name)


_LINES = Media(("application/json", "application/x-ndjson"))
_posted = partial(posted, model_of=_model_of, is_sse=False)


class OllamaApi(Api):
    error_shapes = (("/api", error_body),)
    takes_untyped = True
    routes = (
        _posted("/api/chat", chat, GENERATING, ChatRequest, "generate", answer=_LINES, span="chat"),
        _posted(
            "/api/generate",
            generate,
            GENERATING,
            GenerateRequest,
            "generate",
            answer=_LINES,
            span="text_completion",
        ),
        _posted("/api/embed", embed, VECTORS, EmbedRequest, "embed", span="embeddings"),
        _posted("/api/embeddings", embeddings, VECTORS, EmbedRequest, "embed", span="embeddings"),
        _posted("/api/show", show, STATUS, ModelRequest),
        keyed("POST", "/api/pull", pull, STATUS, _LINES, ModelRequest, statuses=GENERATES),
        keyed("GET", "/api/tags", tags, STATUS, JSON),
        keyed("GET", "/api/ps", ps, STATUS, JSON),
        keyed("GET", "/api/version", version, STATUS, JSON),
        Route("HEAD", "/", running, Operation(STATUS, JSON), Right.EVERYBODY, is_logged=False),
    )
