"""The ASGI application: routes, middleware, error handlers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from vllmx_core.errors import VllmxError
from vllmx_engine.async_llm import AsyncLLM

from vllmx_server import errors
from vllmx_server.background import Background
from vllmx_server.batches.line import LineAnswerer
from vllmx_server.batches.places import Places
from vllmx_server.batches.runner import BatchRunner
from vllmx_server.body_budget import BodyBudget
from vllmx_server.config import ServerConfig
from vllmx_server.errors import route_path
from vllmx_server.hosts import HostCheck, allowed_hosts
from vllmx_server.keys.limits import KeyDesk
from vllmx_server.keys.ring import KeyRing
from vllmx_server.keys.usage import UsageBook
from vllmx_server.metrics import Metrics
from vllmx_server.middleware import Authorization, RequestContext
from vllmx_server.rights import entitled
from vllmx_server.routes import (
    admin,
    batches,
    chat,
    completions,
    conversations,
    document,
    files,
    invocations,
    key_usage,
    message_batches,
    messages,
    pooling,
    response_input,
    responses,
    status,
    tei,
    text,
    tokenizer_info,
    web,
)
from vllmx_server.sharing import Sharing
from vllmx_server.state import ServerState, cache_labels, pooler_of
from vllmx_server.store.storage import Storage
from vllmx_server.tracing import Tracer, open_tracer

if TYPE_CHECKING:
    from vllmx_server.batches.line import Endpoint
    from vllmx_server.workers.peers import Peers

OPERATORS_ROUTES = (
    ("POST", "/v1/models/load", admin.load),
    ("POST", "/v1/models/unload", admin.unload),
    ("POST", "/sleep", admin.sleep),
    ("POST", "/wake", admin.wake),
    ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
    ("POST", "/shutdown", admin.shutdown),
)
"""The routes of operators. On the public port they want an operator's key; with
`ServerConfig.admin_uds` they are not there at all."""
_ROUTES = (
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/messages", messages.messages),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("POST", "/v1/messages/batches", message_batches.create),
    ("GET", "/v1/messages/batches", message_batches.list_batches),
    ("GET", "/v1/messages/batches/{id}", message_batches.retrieve),
    ("DELETE", "/v1/messages/batches/{id}", message_batches.delete),
    ("POST", "/v1/messages/batches/{id}/cancel", message_batches.cancel),
    ("GET", "/v1/messages/batches/{id}/results", message_batches.show_results),
    ("POST", "/v1/embeddings", pooling.embeddings),
    ("POST", "/v1/rerank", pooling.rerank),
    ("POST", "/v2/rerank", pooling.rerank),
    ("POST", "/rerank", tei.rerank),
    ("POST", "/embed", tei.embed),
    ("POST", "/v1/score", pooling.score),
    ("POST", "/score", pooling.score),
    ("POST", "/classify", pooling.classify),
    ("POST", "/pooling", pooling.pooling),
    ("POST", "/v1/responses", responses.create),
    ("POST", "/v1/responses/input_tokens", response_input.input_tokens),
    ("POST", "/v1/responses/compact", response_input.compact),
    ("GET", "/v1/responses/{id}", responses.retrieve),
    ("DELETE", "/v1/responses/{id}", responses.delete),
    ("POST", "/v1/responses/{id}/cancel", responses.cancel),
    ("GET", "/v1/responses/{id}/input_items", responses.input_items),
    ("POST", "/v1/conversations", conversations.create),
    ("GET", "/v1/conversations/{id}", conversations.retrieve),
    ("POST", "/v1/conversations/{id}", conversations.update),
    ("DELETE", "/v1/conversations/{id}", conversations.delete),
    ("POST", "/v1/conversations/{id}/items", conversations.add_items),
    ("GET", "/v1/conversations/{id}/items", conversations.list_items),
    ("GET", "/v1/conversations/{id}/items/{item}", conversations.item),
    ("DELETE", "/v1/conversations/{id}/items/{item}", conversations.delete_item),
    ("POST", "/v1/files", files.upload),
    ("GET", "/v1/files", files.list_files),
    ("GET", "/v1/files/{id}", files.retrieve),
    ("DELETE", "/v1/files/{id}", files.delete),
    ("GET", "/v1/files/{id}/content", files.content),
    ("POST", "/v1/batches", batches.create),
    ("GET", "/v1/batches", batches.list_batches),
    ("GET", "/v1/batches/{id}", batches.retrieve),
    ("POST", "/v1/batches/{id}/cancel", batches.cancel),
    ("GET", "/v1/models", status.models),
    ("GET", "/v1/models/{name:path}", status.model),
    ("POST", "/tokenize", text.tokenize),
    ("POST", "/detokenize", text.detokenize),
    ("POST", "/invocations", invocations.invocations),
    ("GET", "/ping", status.ready),
    ("POST", "/ping", status.ready),
    ("GET", "/health", status.ready),
    ("GET", "/health/live", status.live),
    ("GET", "/health/ready", status.ready),
    ("GET", "/metrics", status.metrics),
    ("GET", "/version", status.version),
    ("GET", "/openapi.json", document.document),
    ("GET", "/docs", document.page),
    ("GET", "/docs/{name}", document.file),
    ("GET", "/v1/usage", key_usage.usage),
)
WEB_ROUTES = (("GET", "/", web.page), ("GET", web.PREFIX + "{name:path}", web.file))
"""The routes of the web page, which `ServerConfig.web` leaves out; open to those without a key."""
TOKENIZER_ROUTES = (("GET", "/tokenizer_info", tokenizer_info.tokenizer_info),)
"""The routes of `ServerConfig.enable_tokenizer_info_endpoint`."""
ROUTES = (*OPERATORS_ROUTES, *_ROUTES, *TOKENIZER_ROUTES)
ALL_ROUTES = (*ROUTES, *WEB_ROUTES)
"""Each has an `Operation` in `vllmx_server.openapi.operations`, which a test demands, and a right
in `vllmx_server.rights`, without which it answers nobody."""
_OF_MODEL = {
    chat.chat_completions,
    completions.completions,
    messages.messages,
    messages.count_tokens,
    pooling.embeddings,
    pooling.rerank,
    pooling.score,
    pooling.classify,
    pooling.pooling,
    tei.rerank,
    tei.embed,
    responses.create,
    response_input.input_tokens,
    response_input.compact,
    text.tokenize,
    text.detokenize,
    invocations.invocations,
}
"""What answers for the model that a body names."""
_LED = {
    responses.retrieve,
    responses.delete,
    responses.cancel,
    files.delete,
    batches.create,
    batches.list_batches,
    batches.retrieve,
    batches.cancel,
    message_batches.create,
    message_batches.list_batches,
    message_batches.retrieve,
    message_batches.delete,
    message_batches.cancel,
}
"""What one of several processes answers, whichever took the request."""
_METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")
_PATHS = {path for _, path, _ in ALL_ROUTES if "{" not in path}
_PATTERNS = [
    (
        re.compile(re.sub(r"{[^}]*}", "[^/]+", re.sub(r"{\w+:path}", ".+", path))),
        path.replace(":path}", "}"),
    )
    for path in dict.fromkeys(path for _, path, _ in ALL_ROUTES if "{" in path)
]
"""The patterns of paths with a part of the client's, and what is shown of them."""


class App(Starlette):
    """`scope["state"]["send"]` is the server's own: what follows the start of an answer skips all
    layers, which only look at the start, and each of which costs as much as a stream's JSON.
    Trailing slashes of paths, which clients make when they join addresses, are dropped."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["send"] = send
        if scope["type"] == "http" and scope["path"].endswith("/"):
            path = route_path(scope)
            surplus = len(path) - len(path.rstrip("/"))
            if surplus < len(path):  # else it is the root's
                scope["path"] = scope["path"][:-surplus]
        await super().__call__(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """The layers without starlette's outermost one, whose work `RequestContext` does."""
        stack = super().build_middleware_stack()
        assert isinstance(stack, ServerErrorMiddleware)
        return stack.app


def known_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys with which one may use the server; empty: everybody may."""
    asked = config.api_key or config.api_keys_file is not None
    return (*config.api_key, *config.admin_key) if asked else ()


def build_app(
    llm: AsyncLLM,
    config: ServerConfig,
    storage: Storage | None = None,
    peers: Peers | None = None,
    *,
    several: bool = False,
) -> Starlette:
    """The application over a started engine; it does not own the engine, nor what it stores where
    that is given. `app.state.server.background` must be started and stopped; of a server with
    several processes, `peers`, in one of them. `several`: models, which `app.state.server.models`
    gets before the first request."""
    ring = KeyRing(known_keys(config), config.api_keys_file)
    metrics = Metrics(llm.config.name, lambda: llm.stats, cache_labels(llm))
    llm.grammars.observer = metrics
    tracer = open_tracer(config.otlp_traces_endpoint)
    routes = (
        *_ROUTES,  # they are looked through in this order
        *(() if config.admin_uds else OPERATORS_ROUTES),
        *(TOKENIZER_ROUTES if config.enable_tokenizer_info_endpoint else ()),
        *(WEB_ROUTES if config.web else ()),
    )
    app = App(
        routes=[
            Route(
                path,
                entitled(method, path, _wrapped(endpoint, peers, several)),
                methods=[method],
            )
            for method, path, endpoint in routes
        ],
        middleware=_middleware(config, ring, metrics, tracer),
        exception_handlers={
            VllmxError: errors.on_vllmx_error,
            HTTPException: errors.on_http_error,
        },
    )
    app.router.redirect_slashes = False  # it redirects to whatever host the client named
    sharing = Sharing() if peers is None else peers.sharing
    bodies = BodyBudget(config.max_body_bytes, sharing)
    storage = storage or Storage(config)
    is_shared = peers is not None or storage.folder.outlives
    usage = UsageBook(storage.database if is_shared else None)
    state = ServerState(
        llm, config, metrics, bodies, storage, sharing=sharing, peers=peers, keys=ring, usage=usage
    )
    state.tracer = tracer
    state.pooler = pooler_of(llm)
    state.batches = _batch_runner(app, state)
    state.background = Background(state.storage, state.batches)
    app.state.server = state
    if config.api_keys_file is not None:
        state.desk = KeyDesk(ring)
    if peers is not None:
        peers.join(app, state)
    return app


def _middleware(
    config: ServerConfig, ring: KeyRing, metrics: Metrics, tracer: Tracer | None
) -> list[Middleware]:
    """The outermost first: browsers' origins, the log, hosts, keys."""
    middleware = []
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=list(config.allowed_methods),
                allow_headers=list(config.allowed_headers),
                allow_credentials=config.allow_credentials,
                expose_headers=["X-Request-Id"],
            )
        )
    middleware.append(
        Middleware(
            RequestContext,
            log=not config.disable_access_log,
            name_route=name_route,
            count=metrics.count_http,
            tracer=tracer,
        )
    )
    hosts = allowed_hosts(config)
    if hosts is not None:
        middleware.append(Middleware(HostCheck, allowed=hosts))
    opened = (document.is_page, *((web.is_web,) if config.web else ()))
    middleware.append(
        Middleware(
            Authorization,
            ring=ring,
            is_open=lambda path: any(is_open(path) for is_open in opened),
        )
    )
    return middleware


def _wrapped(endpoint: Endpoint, peers: Peers | None, several: bool) -> Endpoint:
    if several and endpoint in _OF_MODEL:
        from vllmx_server.models.routing import of_model

        return of_model(endpoint)
    if peers is not None and endpoint in _LED:
        from vllmx_server.workers.relay import led

        return led(endpoint, has_body=endpoint in (batches.create, message_batches.create))
    return endpoint


def _batch_runner(app: App, state: ServerState) -> BatchRunner:
    llm, storage = state.llm, state.storage
    endpoints = {
        route.path: route.endpoint
        for route in app.routes
        if isinstance(route, Route) and "POST" in (route.methods or ())
    }
    places = Places(
        lambda: llm.info.max_num_seqs, lambda: max(0, llm.num_in_flight - places.num_taken)
    )
    answerer = LineAnswerer(app, endpoints)
    return BatchRunner(
        storage.batches,
        storage.files,
        answerer,
        places,
        state.config.max_body_bytes,
        lambda: llm.is_ready or state.dozes,
    )


def name_route(scope: Scope) -> tuple[str, str]:
    """The path and the method of a request where they are ones of ours, else "other"."""
    path, method = route_path(scope), scope["method"]
    found = (
        path
        if path in _PATHS
        else next((shown for pattern, shown in _PATTERNS if pattern.fullmatch(path)), "other")
    )
    return found, method if method in _METHODS else "other"
