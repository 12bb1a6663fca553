"""/v2, /v2/health, /v2/models: metadata, readiness, inference, texts."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import ModelNotFoundError, VllmxError, listing, shown
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.request_state import OutputKind
from vllmx_engine.client.request_stream import RequestStream

from vllmx_server import __version__
from vllmx_server.apis.kserve.schema import (
    GENERATE,
    INFER,
    GenerateRequest,
    InferRequest,
    Parameters,
)
from vllmx_server.errors import cut_message
from vllmx_server.generating.api import Api, keyed, posted
from vllmx_server.generating.field_names import FieldNames
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.generate import Answer, answered
from vllmx_server.generating.generation import Generation
from vllmx_server.generating.pooling import Task
from vllmx_server.generating.pooling_call import in_pieces, pool_body
from vllmx_server.generating.reading import caller_of, read_json
from vllmx_server.generating.served import ModelInfo, Served, served_of
from vllmx_server.http.event_stream import Framing
from vllmx_server.http.operation import GENERATING, JSON, STATUS, VECTORS, Operation
from vllmx_server.http.pages import answer
from vllmx_server.http.route import Right, Route
from vllmx_server.schema.decode import decode
from vllmx_server.schema.record import Items, encode, json_pieces

Asked = GenerateRequest | InferRequest
_MODEL = "/v2/models/{name:path}"
_NAMES = FieldNames({"input": r"inputs[0].data", "prompt": "text_input"})


def error_body(error: VllmxError) -> bytes:
    """JSON of one error as KServe has it."""
    return encode({"error": cut_message(error)})


FRAMING = Framing(lambda error: b"data: " + error_body(error) + b"\n\n")


# --- the server and its models --------------------------------------------------------------------
async def server(request: Request) -> Response:
    """The name and the version of the server."""
    return answer({"name": "vllmx", "version": __version__, "extensions": ["generate"]})


async def live(request: Request) -> Response:
    """200 while the process answers, unless the engine is gone for good."""
    return await _health(request, "live")


async def ready(request: Request) -> Response:
    """200 when requests are served, else 503."""
    return await _health(request, "ready")


async def _health(request: Request, name: str) -> Response:
    """The status of `/health/...`, in the protocol's shape."""
    endpoints = {each.path: each.endpoint for each in served_of(request).routes}
    status = (await endpoints[f"/health/{name}"](request)).status_code
    return Response(encode({name: status == 200}), status, media_type="application/json")


async def _info(request: Request) -> ModelInfo:
    """The model that the path names. Raises ModelNotFoundError."""
    name, served = request.path_params["name"], served_of(request)
    found = {each: info for info in await served.infos() for each in (info.name, *info.aliases)}
    if name not in found:
        raise ModelNotFoundError(
            f"model {shown(name)} is not served here; served: {listing(found)}", param="model"
        )
    return found[name]


async def model_ready(request: Request) -> Response:
    """200 when the model is loaded, else 503."""
    info = await _info(request)
    is_ready = info.state == "loaded"
    body = encode({"name": request.path_params["name"], "ready": is_ready})
    return Response(body, 200 if is_ready else 503, media_type="application/json")


async def model(request: Request) -> Response:
    """The tensors that a model takes and gives; of one that is not the default, none are known."""
    info, served = await _info(request), served_of(request)
    found: dict[str, Any] = {"name": request.path_params["name"], "platform": "vllmx"}
    inputs: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    if info.name == served.llm.config.name:
        name, datatype, size = _output(served)
        shape = [-1] if size is None else [-1, size]
        inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
        outputs = [{"name": name, "datatype": datatype, "shape": shape}]
    return answer({**found, "inputs": inputs, "outputs": outputs})


def _output(served: Served) -> tuple[str, str, int | None]:
    """Name and type of a model's output, and the numbers of a row."""
    if served.pooler is None:
        return "text_output", "BYTES", None
    if "embed" in served.pooler.tasks:
        return "embeddings", "FP32", served.pooler.dimensions
    return "probabilities", "FP32", len(served.pooler.labels)


# --- inference ------------------------------------------------------------------------------------
async def infer(request: Request) -> Any:
    """A vector, the probabilities of classes or a text for each text of the input."""
    served = served_of(request)
    if served.pooler is None:
        return await _generated(request, INFER)
    served.check_model(request.path_params["name"])
    name, datatype, size = _output(served)
    task: Task = "embed" if name == "embeddings" else "classify"
    body, pooled = await pool_body(request, INFER, task, _NAMES)
    _check_outputs(body, name)
    numbers = (number for each in pooled for number in each.values.tolist())
    shape = [len(pooled), size]
    found: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    if task == "classify":
        found["parameters"] = {"labels": list(served.pooler.labels)}
    outputs = Items([{**found, "data": Items(numbers)}])
    return in_pieces(json_pieces({**_about(body, request.path_params["name"]), "outputs": outputs}))


async def generate(request: Request) -> Any:
    """The text that follows `text_input`."""
    return await _generated(request, GENERATE)


async def generate_stream(request: Request) -> Any:
    """The same in pieces, an event each."""
    return await _generated(request, GENERATE, is_streamed=True)


async def _generated(
    request: Request, decoder: msgspec.json.Decoder[Any], *, is_streamed: bool = False
) -> Any:
    served, name, started_s = served_of(request), request.path_params["name"], time.monotonic()

    def parse(data: bytes) -> tuple[Asked, SamplingParams]:
        asked: Asked = decode(data, decoder)
        served.check_model(name)
        _check_outputs(asked, "text_output")
        body = asked.parameters
        if body.stream and not is_streamed:
            raise field_error("parameters.stream", "= true is for generate_stream: use that route")
        body.model, body.stream = name, is_streamed
        body.check()
        limit = 16 if body.max_tokens is None else body.max_tokens
        defaults = served.llm.default_sampling_params
        return asked, body.sampling_params(defaults, max_tokens=limit, logprobs=None)

    served.check_admission()
    asked, params = await read_json(request, served, parse)
    body = asked.parameters

    async def submit() -> list[RequestStream]:
        kind: OutputKind = "delta" if is_streamed else "final"
        who, fits = caller_of(request, body), body.max_tokens is None
        with _NAMES.told():
            return await served.llm.submit_all(
                asked.texts(), params, kind=kind, options=who, fit_max_tokens=fits
            )

    answer_of = partial(KServeAnswer, asked, name)
    return await answered(request, served, body, submit, answer_of, FRAMING, started_s)


def _check_outputs(asked: Asked, name: str) -> None:
    """Raises InvalidRequestError for an output that the model does not have."""
    for each in getattr(asked, "outputs", None) or ():
        if each.name != name:
            raise field_error("outputs", f"names {shown(each.name)}; the model has {name}")


def _about(asked: Asked, name: str) -> dict[str, Any]:
    return {"model_name": name, **({} if asked.id is None else {"id": asked.id})}


class KServeAnswer(Answer):
    """Makes the wire format of one request's outputs."""

    def __init__(
        self,
        asked: Asked,
        name: str,
        served: Served,
        body: Parameters,
        request_id: str,
        generation: Generation,
    ) -> None:
        self._asked, self._generation = asked, generation
        self._about = _about(asked, name)

    async def whole(self) -> Iterator[bytes]:
        texts = [each.outputs[0].text for each in await self._generation.finals()]
        if isinstance(self._asked, GenerateRequest):
            return iter((encode({**self._about, "text_output": texts[0]}),))
        output = {"name": "text_output", "datatype": "BYTES", "shape": [len(texts)]}
        return json_pieces({**self._about, "outputs": [{**output, "data": texts}]})

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                if (text := output.outputs[0].text) or output.finished:
                    yield b"data: %b\n\n" % encode({**self._about, "text_output": text})


def _model_of(request: Request, name: str | None) -> str:
    found: str = request.path_params["name"]
    return found


_posted = partial(posted, model_of=_model_of, is_sse=False)
_open = partial(Route, operation=Operation(STATUS, JSON), right=Right.EVERYBODY, is_logged=False)


class KServeApi(Api):
    error_shapes = (("/v2/models", error_body), ("/v2/health", error_body))
    routes = (
        keyed("GET", "/v2", server, STATUS, JSON),
        _open("GET", "/v2/health/live", live),
        _open("GET", "/v2/health/ready", ready),
        keyed("GET", f"{_MODEL}/ready", model_ready, STATUS, JSON, statuses=(404,)),
        _posted(f"{_MODEL}/infer", infer, VECTORS, InferRequest, span="infer"),
        _posted(
            f"{_MODEL}/generate",
            generate,
            GENERATING,
            GenerateRequest,
            "generate",
            span="text_completion",
        ),
        _posted(
            f"{_MODEL}/generate_stream",
            generate_stream,
            GENERATING,
            GenerateRequest,
            "generate",
            span="text_completion",
        ),
        keyed("GET", _MODEL, model, STATUS, JSON, statuses=(404,)),  # behind the paths that it fits
    )
