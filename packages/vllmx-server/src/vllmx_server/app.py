"""The ASGI application: routes, middleware, error handlers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from vllmx_core.errors import VllmxError
from vllmx_engine.async_llm import AsyncLLM

from vllmx_server import errors
from vllmx_server.config import ServerConfig
from vllmx_server.metrics import Metrics
from vllmx_server.middleware import Authorization, RequestContext
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


def build_app(llm: AsyncLLM, config: ServerConfig) -> Starlette:
    """The application over a started engine; it does not own the engine."""
    middleware = [Middleware(RequestContext, log=not config.disable_access_log)]
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
    middleware.append(Middleware(Authorization, keys=config.api_key))
    app = Starlette(
        routes=[Route(path, endpoint, methods=[method]) for method, path, endpoint in ROUTES],
        middleware=middleware,
        exception_handlers={
            VllmxError: errors.on_vllmx_error,
            HTTPException: errors.on_http_error,
            Exception: errors.on_bug,
        },
    )
    app.state.server = ServerState(llm, config, Metrics(llm.config.name, lambda: llm.stats))
    return app
