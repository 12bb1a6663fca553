"""LoRA adapters of a running server, as vLLM has them: /v1/load_lora_adapter and
/v1/unload_lora_adapter. Both require a key of --admin-key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import AdapterError, ConfigError, ModelNotFoundError, shown

from vllmx_server.errors import ForbiddenError
from vllmx_server.generating.api import Api
from vllmx_server.generating.fields import field_error
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.body import read_body
from vllmx_server.http.client import client_of
from vllmx_server.http.operation import BODY, STATUS, Operation
from vllmx_server.http.pages import answer
from vllmx_server.http.route import Right, Route
from vllmx_server.schema.decode import decode
from vllmx_server.schema.record import Record

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class LoadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """A folder or file below --lora-root: absolute, or from there."""
    load_inplace: bool = False
    """Replace an adapter of this name."""
    base_model_name: str | None = None
    """A name of the model, which has to be the one that is served."""


class UnloadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """A number that vLLM wants; here names tell adapters apart."""


class AdapterState(Record, kw_only=True):
    lora_name: str
    state: Literal["unloaded", "loaded"]


_LOAD = msgspec.json.Decoder(LoadAdapter)
_UNLOAD = msgspec.json.Decoder(UnloadAdapter)


async def load(request: Request) -> Response:
    """Reads an adapter and serves it under its name; requests in flight do not notice."""
    served = served_of(request)
    with served.bodies.hold(client_of(request)) as held:
        body = decode(await read_body(request, served.config, held), _LOAD)
    if body.base_model_name is not None:
        served.check_model(body.base_model_name)
    if body.lora_name in served.names:
        raise field_error("lora_name", f"{shown(body.lora_name)} is the name of the model")
    if served.adapter_of(body.lora_name) and not body.load_inplace:
        raise field_error(
            "lora_name",
            f"{shown(body.lora_name)} is loaded already: unload it, or set load_inplace",
        )
    _check_room(served)
    path = await asyncio.to_thread(_below, served.config.lora_root, body.lora_path)
    await served.llm.load_adapter(body.lora_name, str(path))
    return answer(AdapterState(lora_name=body.lora_name, state="loaded"))


async def unload(request: Request) -> Response:
    """Forgets an adapter; requests in flight keep it."""
    served = served_of(request)
    with served.bodies.hold(client_of(request)) as held:
        body = decode(await read_body(request, served.config, held), _UNLOAD)
    _check_room(served)
    if not served.adapter_of(body.lora_name):
        raise ModelNotFoundError(
            f"adapter {shown(body.lora_name)} is not loaded", param="lora_name"
        )
    await served.llm.unload_adapter(body.lora_name)
    return answer(AdapterState(lora_name=body.lora_name, state="unloaded"))


def _check_room(served: Served) -> None:
    if served.llm.adapters is None:
        raise ConfigError(
            "the model was loaded without room for adapters: start with --enable-lora",
            param="enable_lora",
        )


def _below(root: str | None, given: str) -> Path:
    """The path of an adapter, links resolved. Raises ForbiddenError for one that is not below the
    root, or has a file that is not, and AdapterError for one that cannot be."""
    if root is None:
        raise ForbiddenError(
            "adapters are loaded from one folder, which is not set: start with --lora-root FOLDER",
            param="lora_path",
        )
    try:
        top = Path(root).resolve(strict=True)
        path = (top / given).resolve()
        files = [path, *((path / name).resolve() for name in _FILES)]
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"lora_path {shown(given)} cannot be: {error}") from None
    if ".." in Path(given).parts or not all(one.is_relative_to(top) for one in files):
        raise ForbiddenError(
            f"lora_path {shown(given)} is not below --lora-root: move the adapter there",
            param="lora_path",
        )
    return path


_TEXT = "For holders of a key of `--admin-key`, or of one with `admin` in the file of keys."


class AdaptersApi(Api):
    routes = (
        Route(
            "POST",
            "/v1/load_lora_adapter",
            load,
            Operation(
                STATUS,
                AdapterState,
                LoadAdapter,
                _TEXT,
                statuses=(*BODY, 403, 404),
                example={"lora_name": "sql", "lora_path": "sql"},
            ),
            Right.OPERATORS,
        ),
        Route(
            "POST",
            "/v1/unload_lora_adapter",
            unload,
            Operation(
                STATUS,
                AdapterState,
                UnloadAdapter,
                _TEXT,
                statuses=(*BODY, 404),
                example={"lora_name": "sql"},
            ),
            Right.OPERATORS,
        ),
    )
