"""The ASGI application: routes, middleware, error handlers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from vllmx_core.errors import VllmxError
from vllmx_engine.async_llm import AsyncLLM

from vllmx_server import errors
from vllmx_server.body_budget import BodyBudget
from vllmx_server.config import ServerConfig
from vllmx_server.hosts import HostCheck, allowed_hosts
from vllmx_server.metrics import Metrics
from vllmx_server.middleware import Authorization, RequestContext, route_path
from vllmx_server.routes import chat, completions, status, text
from vllmx_server.state import ServerState

ROUTES = (
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("GET", "/v1/models", status.models),
    ("GET", "/v1/models/{name:path}", status.model),
    ("POST", "/tokenize", text.tokenize),
    ("POST", "/detokenize", text.detokenize),
    ("GET", "/health", status.ready),
    ("GET", "/health/live", status.live),
    ("GET", "/health/ready", status.ready),
    ("GET", "/metrics", status.metrics),
    ("GET", "/version", status.version),
)
_METHODS = ("GET", "POST", "HEAD", "OPTIONS")
_PATHS = {path.replace(":path}", "}") for _, path, _ in ROUTES}


class App(Starlette):
    """`scope["state"]["send"]` is the server's own: what follows the start of an answer skips all
    layers, which only look at the start, and each of which costs as much as a stream's JSON."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["send"] = send
        await super().__call__(scope, receive, send)


def build_app(llm: AsyncLLM, config: ServerConfig) -> Starlette:
    """The application over a started engine; it does not own the engine."""
    metrics = Metrics(llm.config.name, lambda: llm.stats, _cache_labels(llm))
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
        )
    )
    hosts = allowed_hosts(config)
    if hosts is not None:
        middleware.append(Middleware(HostCheck, allowed=hosts))
    middleware.append(Middleware(Authorization, keys=config.api_key))
    app = App(
        routes=[Route(path, endpoint, methods=[method]) for method, path, endpoint in ROUTES],
        middleware=middleware,
        exception_handlers={
            VllmxError: errors.on_vllmx_error,
            HTTPException: errors.on_http_error,
        },
    )
    app.router.redirect_slashes = False  # it redirects to whatever host the client named
    app.state.server = ServerState(llm, config, metrics, BodyBudget(config.max_body_bytes))
    return app


def name_route(scope: Scope) -> tuple[str, str]:
    """The path and the method of a request where they are ones of ours, else "other"."""
    path, method = route_path(scope), scope["method"]
    if path.startswith("/v1/models/"):
        path = "/v1/models/{name}"
    return path if path in _PATHS else "other", method if method in _METHODS else "other"


def _cache_labels(llm: AsyncLLM) -> dict[str, object]:
    info, config = llm.info, llm.config
    return {
        "block_size": info.block_size,
        "num_gpu_blocks": info.num_kv_blocks,
        "kv_cache_bytes": info.kv_cache_bytes,
        "cache_dtype": info.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.memory_fraction,
    }
